"""`make test` leaves out combinations and repeats, and no kind of thing.

Each rule is a function of tests that returns what breaks it. `test_a_planted_violation_is_found` plants a violation of
each, so that no rule passes because it looks at nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import COLLECTED
from tests.harness.core import CORE
from tests.harness.gpu import ONLY_ON_A_GPU
from tests.harness.layouts import BUILDERS, Case

ROOT = Path(__file__).parents[1]
FAILURES = {  # each test of these files is a way in which ranks can fail, or be wrong
    "tests/data_parallel/test_mistakes.py",
    "tests/session/test_checkpoints_interrupted.py",
    "tests/session/test_ranks_that_differ.py",
    "tests/session/test_failures.py",
    "tests/session/test_split_errors.py",
}
END_TO_END = "tests/end_to_end/"
NAMES = ("make", "name", "optimizer")  # of parameters that are optimizers there
WORDS = (Case, str, torch.dtype)
CLIENTS = {f"tests/clients/test_{name}.py" for name in ("lightning", "torchtitan_package")}
TORCH_FREE = {"acceptance", "docs", "benchmarks", "ownership", "packages"}  # tests that need no other torch
DTYPES = {str(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


@dataclass(frozen=True, slots=True)
class Selected:
    """What counts of a test: its file below the root, its function, and its parameters by name."""

    file: str
    function: str
    full: bool
    params: dict[str, Any] = field(default_factory=dict)


Tests = Sequence[Selected]


def selected(item: pytest.Function) -> Selected:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    file = item.path.relative_to(ROOT).as_posix()
    return Selected(file, item.originalname, item.get_closest_marker("full") is not None, dict(params))


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> Tests:
    """All tests, before any was deselected."""
    found = [selected(item) for item in request.config.stash[COLLECTED] if isinstance(item, pytest.Function)]
    if any("::" in argument for argument in request.config.args) or not files(found) >= FAILURES:
        pytest.skip("only some tests were collected")
    return found


def files(tests: Tests) -> set[str]:
    return {test.file for test in tests}


def fast(tests: Tests) -> Tests:
    return [test for test in tests if not test.full]


def flat(value: Any) -> Iterator[Any]:
    """A value, or what is in a list of values."""
    if isinstance(value, list | tuple):
        for own in value:
            yield from flat(own)
    else:
        yield value


def values(tests: Tests) -> set[str]:
    """Layouts, dtypes and other words that tests are parametrized with."""
    found = [own for test in tests for value in test.params.values() for own in flat(value)]
    return {own.layout if isinstance(own, Case) else str(own) for own in found if isinstance(own, WORDS)}


# -- rules -----------------------------------------------------------------------------------------


def empty_files(tests: Tests) -> set[str]:
    """Files of which nothing is left, except what only `make test-clients` runs."""
    return files(tests) - files(fast(tests)) - CLIENTS


def lost_kinds(tests: Tests) -> set[str]:
    """Layouts and dtypes that no test is left of."""
    return {*BUILDERS, *DTYPES} - values(fast(tests))


def lost_failures(tests: Tests) -> set[str]:
    """Tests of failures that no set of parameters is left of."""
    kinds = [(test.function, test.full) for test in tests if test.file in FAILURES]
    return {function for function, _ in kinds} - {function for function, full in kinds if not full}


def lost_optimizers(tests: Tests) -> set[str]:
    """Optimizers of the end-to-end tests, the words of parameters called as in `NAMES`, that no test is left of.

    Such a word with more behind it, as soap-one-sided, is soap with options.
    """
    named = {
        value
        for test in tests
        for name, value in test.params.items()
        if test.file.startswith(END_TO_END) and name in NAMES and isinstance(value, str)
    }
    left = values(fast(tests))
    return {
        name
        for name in named
        if not any(own == name or own.startswith(f"{name}-") for own in left)
        and not any(name.startswith(f"{own}-") for own in named)
    }


Rule = Callable[[Tests], set[str]]
RULES: tuple[Rule, ...] = (empty_files, lost_kinds, lost_failures, lost_optimizers)
CUDA = "tests/kernels/test_gpu.py"
PLANTED: dict[Rule, tuple[Callable[[Selected], bool], str]] = {  # which tests are marked, and what is lost then
    empty_files: (lambda test: test.file == CUDA, CUDA),
    lost_kinds: (lambda test: any("hsdp_tp" in str(value) for value in test.params.values()), "hsdp_tp"),
    lost_failures: (lambda test: test.function == "test_a_rank_stays_away", "test_a_rank_stays_away"),
    lost_optimizers: (lambda test: "adamuon" in test.params.values(), "adamuon"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_are_kept(rule: Rule, collected: Tests) -> None:
    assert rule(collected) == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found(rule: Rule, collected: Tests) -> None:
    marked, lost = PLANTED[rule]
    changed = [Selected(t.file, t.function, t.full or marked(t), t.params) for t in collected]
    assert lost in rule(changed)


def test_gpu_tests_run_on_the_stand_in_or_are_listed(collected: Tests, request: pytest.FixtureRequest) -> None:
    """A skip that is written at a test would hide that it is out of date."""
    own = [item for item in request.config.stash[COLLECTED] if item.get_closest_marker("gpu")]
    left = [item for item in own if not any(map(item.get_closest_marker, ("skip", "skipif")))]
    names, run = ({getattr(item, "originalname", item.name) for item in items} for items in (own, left))
    assert names > ONLY_ON_A_GPU.keys() >= names - run


# -- the core --------------------------------------------------------------------------------------


def core(tests: Tests, kinds: Iterable[str] = CORE) -> Tests:
    """What `make test-torch` runs."""
    names = {name for kind in kinds for name in CORE[kind]}
    return [t for t in fast(tests) if names & {t.file, f"{t.file}::{t.function}", t.file.rpartition("/")[0]}]


def missing_in_core(tests: Tests, kinds: Iterable[str] = CORE) -> set[str]:
    """Rooms, layouts and dtypes that the core has no test of."""
    found = core(tests, kinds)
    folders = {test.file.split("/")[1] for test in tests if test.file.count("/") > 1} - TORCH_FREE
    within = {"stack_dim0", "tp_alone"}  # tests of test_parity.py have them without a parameter
    return lost_kinds(found) - within | folders - {test.file.split("/")[1] for test in found}


def test_the_core_has_every_room_layout_and_dtype(collected: Tests) -> None:
    assert missing_in_core(collected) == set()


def test_what_the_core_names_is_there(collected: Tests) -> None:
    assert [kind for kind in CORE if not core(collected, [kind])] == []


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("layouts on ranks: FSDP2, TP, DDP, HSDP", "hsdp_tp"),
        ("ZeRO-1", "data_parallel"),
        ("generated kernels", "codegen"),
        ("the stand-in for a GPU", "fake_cuda"),
    ],
)
def test_a_kind_that_the_core_lacks_is_found(kind: str, lost: str, collected: Tests) -> None:
    assert lost in missing_in_core(collected, CORE.keys() - {kind})
