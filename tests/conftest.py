"""Fixtures."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
Golden = Callable[..., None]
# Files that take longest of those without ranks: a browser, processes of their own, captures in this process.
LONG = (
    "test_gpu_benchmark",
    "test_any_optimizer",
    "test_page_in_browser",
    "test_cuda_graph",
    "test_trainer",
    "test_random_traps",
)
STARTERS = ("run", "on_ranks", "Mistakes")  # of tests/harness: files that import one of them start ranks
COLLECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()  # all tests, before any is deselected


def pytest_configure(config: pytest.Config) -> None:
    # Dynamo imports deprecated parts of torch; were that an error, every capture would fail.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit:DeprecationWarning")
    # The interpreter of Triton 3.6 makes loop bounds of arrays.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    # Triton asks when it decorates a kernel, so this has to come before the first import of one. Ranks inherit it.
    # Nothing above imports ours or torch's, and nothing else may set it: tests on a GPU want kernels compiled.
    if config.option.markexpr.strip() != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with most work on ranks first, then other long ones: no worker is left with one at the end."""
    config.stash[COLLECTED] = list(items)
    work = Counter(
        item.path
        for item in items
        if isinstance(item, pytest.Function) and not item.get_closest_marker("full") and starts_ranks(item.module)
    )
    items.sort(key=lambda item: (-work[item.path], item.path.stem not in LONG))


def starts_ranks(module: Any) -> bool:
    """Does a file of tests start ranks?"""
    found = (getattr(module, name, None) for name in STARTERS)
    return any(getattr(one, "__module__", "").startswith("tests.harness.") for one in found)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run tests with the mark `gpu` where there is a device, or a stand-in for one."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    from tests.harness.gpu import device  # late, see pytest_configure

    with device(getattr(item, "originalname", item.name)):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def captures_are_quick() -> Iterator[None]:
    """In this process; the one that ranks are forked from does it by itself."""
    from tests.harness.optimizers import (  # late, see pytest_configure
        keep_what_is_shared,
        leave_guards_unmeasured,
        leave_rates_assumed,
        plans_share_captures,
    )

    leave_guards_unmeasured()
    leave_rates_assumed()
    keep_what_is_shared()
    with plans_share_captures():
        yield


@pytest.fixture
def captures_shared() -> Iterator[None]:
    """What this process wraps uses what optimizers alike captured before, copies too: see `share_captures`."""
    from tests.harness.optimizers import shared_captures  # late, see pytest_configure

    with shared_captures():
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of tools come from the tests' fork server, which has imported torch and has its own standard error."""
    from canzona_compile.tools import processes  # late, see pytest_configure
    from tests.harness import nursery

    first = nursery.server().Process(target=os.getpid)
    first.start()  # waits until the server has imported everything, which is no part of any limit
    first.join()
    monkeypatch.setattr(processes, "START_METHOD", "forkserver")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, as ranks do that share a machine's cores: what rounds may depend on it."""
    import torch  # late, see pytest_configure

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with tests/golden/<test>.ir, or with the file of a given name."""

    def check(text: str, name: str = "") -> None:
        from canzona_compile.ir.printer import differences  # late, see pytest_configure

        path = GOLDEN / (name or f"{re.sub(r'[^A-Za-z0-9_]+', '-', request.node.name).strip('-')}.ir")
        if os.environ.get("GOLDEN") == "accept":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            where = path.relative_to(GOLDEN.parents[1])
            state = "differs from" if path.exists() else "does not exist; expected is"
            pytest.fail(
                f"{where} {state} what this test prints:\n{differences(expected, text)}"
                f"If that is wanted: GOLDEN=accept pytest '{request.node.nodeid}'",
                pytrace=False,
            )

    return check
