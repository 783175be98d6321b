"""Every public call after every state of a training: whatever it does to recordings, all bits are the plain ones."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.fake_cuda.device import current_device, has_device
from tests.fake_cuda.test_trainings import CASES, ROUNDING, measure, rate, reload, same_values
from tests.fake_cuda.trainings import Edit, RankResult, Script, plain_training, run_script, wrong
from tests.harness.layouts import Case
from tests.harness.marks import only

FSDP, ALONE = CASES[:2]
# The step before which there is a call. In between a new plan has time to be recorded and replayed.
STATES = {"planned": 1, "recorded": 6, "recorded, with gradients elsewhere": 13, "loaded": 18}
STEPS = 24


def ours(call: Callable[[Any], Any]) -> Edit:
    """A call that only a wrapped optimizer has. Without a plan it may say so."""

    def edit(optimizer: Any) -> None:
        if canzona_compile.is_wrapped(optimizer):
            with contextlib.nullcontext() if optimizer.canzona.session.driver else contextlib.suppress(CanzonaError):
                call(optimizer)

    return edit


def dump(optimizer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        optimizer.canzona.dump(folder)


def wrapped_anew(optimizer: Any) -> None:
    """Release an optimizer, and wrap it once more."""
    if canzona_compile.is_wrapped(optimizer):
        options = optimizer.canzona.session.options
        canzona_compile.unwrap(optimizer)
        canzona_compile.wrap(optimizer, replicate=options.replicate)


CALLS: dict[str, Edit] = {
    "measure": measure,
    "report": ours(lambda optimizer: optimizer.canzona.report().to_json()),
    "dump": ours(dump),
    "plan": ours(lambda optimizer: optimizer.canzona.plan().to_json()),
    "graph": ours(lambda optimizer: optimizer.canzona.graph().print_readable(print_output=False)),
    "explain": lambda optimizer: str(canzona_compile.explain(optimizer)),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": reload,
    "release": wrapped_anew,
    "deepcopy": lambda optimizer: copy.deepcopy(optimizer),
    "a changed number": lambda optimizer: rate(optimizer.param_groups[0]["lr"] * 0.9)(optimizer),
    "torch forgets workspaces": lambda optimizer: current_device().forget_workspaces() if has_device() else None,
    "consolidate": ours(lambda optimizer: optimizer.canzona.consolidate(to=0)),  # then only rank 0 may copy
}
KEEPING = [edit for name, edit in CALLS.items() if name not in ("measure", "load_state_dict", "release")]
# What several calls do, and what a script itself knows.
MORE: dict[str, dict[str, Any]] = {
    "all that keep the plan": {"edit": lambda optimizer: [edit(optimizer) for edit in KEEPING]},
    "audit=": {"options": {"audit": 2}},
    "add_param_group": {"joins": tuple(STATES.values())},
    "a missing gradient": {"missing": dict.fromkeys(STATES.values(), (1,))},
}


def script_of(name: str, case: Case, call: str) -> Script:
    """A training with a call in each state."""
    options = dict(MORE.get(call, {}))
    edit = options.pop("edit", CALLS.get(call, lambda optimizer: None))
    edits = dict.fromkeys(STATES.values(), edit)
    edits[STATES["loaded"]] = lambda optimizer: [own(optimizer) for own in (reload, edit)]
    return Script(name, case, STEPS, edits, moving=lambda rank, step: step > 10, kernels=True, **options)


def wrong_in(script: Script, seeds: Iterable[int]) -> list[str]:
    """What differs from the plain optimizer, or from what is right where products of ours round otherwise."""
    plain, bad = plain_training(script), list[str]()
    right: list[RankResult] = []
    for seed in seeds:
        found = run_script(script, seed, plain)
        if (bits := wrong(found)) and (script.name != "muon" or script.missing or script.joins):
            right = right or run_script(script, None, plain)
            assert all(result.distance <= ROUNDING[script.name] for result in right)
            bits = [] if all(map(same_values, found, right)) else bits
        bad += [f"seed {seed}: {what}" for what in bits]
    return bad


@pytest.mark.parametrize(
    ("name", "case", "call"),
    only(
        [("muon", FSDP, "measure"), ("muon", ALONE, "all that keep the plan")],
        ("muon", "shampoo"),
        (ALONE, FSDP),
        (*CALLS, *MORE),
    ),
    ids=str,
)
def test_training_goes_on(name: str, case: Case, call: str) -> None:
    assert wrong_in(script_of(name, case, call), range(1)) == []
