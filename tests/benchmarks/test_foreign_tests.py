"""benchmarks/foreign_tests.py tells a step that is wrong from one that is refused, and from an internal error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.demo import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from foreign_outcomes import DIFFERENT, ERROR, NEVER_ENDED, PASSED, PLAIN_FAILS, REFUSED, SKIPPED, Ended, compare, read

TESTS = """
import pytest
import torch
from torch.optim import Optimizer

import canzona_compile.session.session as session


def stepped(kind, **options):
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    optimizer = kind([param], **options)
    optimizer.step()
    return param, optimizer


class Coupled(Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.norm() for p in params)
        for p in params:
            p -= p.grad / norm


def test_right():
    param, optimizer = stepped(torch.optim.SGD, lr=0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    assert param.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_refused():
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2, 2)
    Coupled(params).step()


def test_wrong(monkeypatch):
    plain = session.Session.step

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 2
        return plain(self)

    monkeypatch.setattr(session.Session, "step", step)
    assert stepped(torch.optim.SGD, lr=0.5)[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_error(monkeypatch):
    monkeypatch.setattr(session.Session, "step", lambda self: {}["exp_avg"])
    stepped(torch.optim.SGD, lr=0.5)


def test_fails():
    assert stepped(torch.optim.SGD, lr=0.5)[0].tolist() == []


@pytest.mark.skipif(True, reason="GPU required")
def test_despite():
    stepped(torch.optim.SGD, lr=0.5)


@pytest.mark.skip(reason="no network")
def test_skipped():
    pass
"""


def run(how: str, folder: Path, *options: str) -> Path:
    """The results of the tests above."""
    results = folder / f"{how}.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "foreign_run.py"), how, str(results), *options]
    done = subprocess.run([*command, "--rootdir", str(folder), str(folder / "test_a.py")], cwd=folder, check=False)
    assert done.returncode == 1  # of pytest: some have failed
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each of the tests above, by its name."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "test_a.py").write_text(TESTS, encoding="utf-8")
    plain = run("plain", folder, "--despite", "GPU required")
    ours = run("ours", folder, "--despite", "GPU required", "--passed", str(plain))
    return {one.test.split("::")[-1]: one for one in compare(read(plain), read(ours))}


@pytest.mark.parametrize(
    ("test", "outcome", "reason"),
    [
        ("test_right", PASSED, ""),
        ("test_despite", PASSED, ""),
        ("test_refused", REFUSED, "UnsupportedOptimizer: Coupled updates parameters together"),
        ("test_wrong", DIFFERENT, "AssertionError: assert [[0.0, 0.0], [0.0, 0.0]] == [[0.5, 0.5]"),
        ("test_error", ERROR, "KeyError: 'exp_avg' (test_a.py:"),
        ("test_fails", PLAIN_FAILS, "AssertionError"),
        ("test_skipped", SKIPPED, ""),
    ],
)
def test_every_outcome(found: dict[str, Any], test: str, outcome: str, reason: str) -> None:
    assert found[test].outcome == outcome, found[test].ours.text
    assert found[test].reason.startswith(reason)
    assert (found[test].ours.wrapped > 0) == (outcome not in (SKIPPED, PLAIN_FAILS))


BROKEN = 'File "/x/canzona_compile/session/bind.py", line 3, in bind\n    assert boxes\n'


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (f"Traceback (most recent call last):\n  {BROKEN}AssertionError", ERROR),
        ("canzona_compile.errors.InvalidStep: two boxes overlap", ERROR),
        ("canzona_compile.errors.CanzonaError: planning failed: KeyError: 3", ERROR),
        ("RuntimeError: Process 1 exited:\ncanzona_compile.errors.InvalidGradient: it is complex", REFUSED),
        (NEVER_ENDED, ERROR),
    ],
)
def test_what_ranks_and_our_own_code_raise(text: str, outcome: str) -> None:
    (one,) = compare({"test": Ended("passed")}, {"test": Ended("failed", text)})
    assert one.outcome == outcome


def test_a_test_that_takes_the_process_with_it_has_failed(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps({"test": "a", "outcome": "collected"}), encoding="utf-8")
    assert read(tmp_path / "results.jsonl") == {"a": Ended("failed", NEVER_ENDED)}
