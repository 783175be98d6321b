"""`measure()`: phases that add up, equal on all ranks; the same bits and the same calls as without it."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Muon, Optimizer

import canzona_compile
from canzona_compile.errors import CanzonaError, InvalidGradient
from canzona_compile.ir.program_ops import on_stream
from canzona_compile.lowering.stream_sync import LOOKS
from canzona_compile.machine.hardware import RATES, assumed_hardware
from canzona_compile.runtime import meeting
from canzona_compile.runtime.timed_program import CLOCK, TimedProgram, turn, turns
from examples.optimizers.soap import SOAP
from tests.data_parallel.runs import set_up, step_alone
from tests.harness.layouts import Case
from tests.harness.marks import full
from tests.harness.model_pairs import train as train_model
from tests.harness.optimizers import Shared, muon
from tests.harness.pairs import feed, parameters
from tests.harness.ranks import Died, run
from tests.harness.training import Training, check, on_ranks
from tests.lowering.emitted_steps import emitted

pytestmark = pytest.mark.usefixtures("captures_shared")
SHAPES = ((31, 17), (2, 20), (24, 24), (24, 24))
KNOWN = replace(assumed_hardware("cpu"), measured=RATES)
AT, COUNT = 2, 4  # steps before those that are measured, and how many are


def measured_in_between(optimizer: Optimizer) -> Callable[[int], None]:
    """Measure the wrapped optimizer; the plain one has nothing to measure."""

    def change(step: int) -> None:
        if step == AT and canzona_compile.is_wrapped(optimizer):
            handle: Any = optimizer
            handle.canzona.measure(COUNT)

    return change


TRAININGS = {
    name: Training(make, SHAPES, AT + COUNT + 1, measured_in_between, among=Shared())
    for name, make in {"muon": lambda p: muon([{"params": p}]), "soap": lambda p: SOAP(p, every=3)}.items()
}


PHASES = {
    "fsdp": {"look", "agree", "prepare", "gather", "compute", "scatter", "apply", "local", "plan", "other"},
    "hsdp": {"exchange"},
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case("fsdp", (2,)), "muon"),
        full(Case("fsdp", (2,)), "soap"),
        full(Case("hsdp", (2, 2)), "muon"),
    ],
    ids=str,
)
def test_phases_add_up_and_bits_stay(case: Case, name: str) -> None:
    outcomes = on_ranks(__name__, name, [case], strategy="owner", hardware=KNOWN)
    check(outcomes)  # the bits of the plain optimizer, and in the last step no collective more
    found = outcomes[0].report["measured"]
    assert found == outcomes[1].report["measured"]
    assert (found["steps"], found["ranks"]) == (COUNT, case.world)
    phases = {one["name"]: one for one in found["phases"]}
    assert phases.keys() == PHASES["fsdp"] | PHASES.get(case.layout, set())
    assert sum(one["mean"] for one in phases.values()) == pytest.approx(found["seconds"], rel=1e-9)
    for one in phases.values():
        assert 0 <= one["mean"] <= one["slowest"]
        assert one["mean"] <= one["worst"] <= found["worst_seconds"]
        assert one["slowest_rank"] in range(case.world)
    assert 0 < found["exposed"] <= found["exposed_worst"] < found["worst_seconds"]
    assert found["exposed"] <= sum(phases[p]["mean"] for p in ("gather", "scatter", "exchange") if p in phases)
    for predicted in ("prepare", "gather", "compute", "scatter", "apply", "look"):
        own = phases[predicted]
        assert own["predicted"] > 0
        assert own["error"] == pytest.approx(own["predicted"] / own["mean"] - 1)
    assert found["error"] == pytest.approx(found["predicted_seconds"] / found["seconds"] - 1)
    assert found["assumed"] == []


# -- what is measured --------------------------------------------------------------------------------


def alone() -> Any:
    return canzona_compile.wrap(Muon(parameters([(6, 4), (4, 6)]), lr=0.1))


def step(optimizer: Any) -> None:
    feed(optimizer, 0)
    optimizer.step()


def test_a_step_that_plans_does_not_count() -> None:
    optimizer = alone()
    optimizer.canzona.measure(2)
    for _ in range(2):
        step(optimizer)
        assert optimizer.canzona.report().measured is None
    step(optimizer)
    assert optimizer.canzona.report().measured.steps == 2
    assert optimizer.canzona.session.measuring.wanted == 0


def test_a_new_plan_forgets_and_another_call_begins_anew() -> None:
    optimizer = alone()
    step(optimizer)
    optimizer.canzona.measure(1)
    step(optimizer)
    assert optimizer.canzona.report().measured is not None
    optimizer.canzona.measure(3)
    assert optimizer.canzona.report().measured is None
    step(optimizer)
    optimizer.canzona.measure(1)
    step(optimizer)
    assert optimizer.canzona.report().measured.steps == 1
    optimizer.add_param_group({"params": parameters([(3, 5)])})
    step(optimizer)
    assert optimizer.canzona.report().measured is None


def test_a_step_that_plans_anew_counts() -> None:
    """Under ZeRO-1 ranks plan anew on steps of their own, and all of them have to come to the exchange."""
    optimizer = alone()
    step(optimizer)
    optimizer.canzona.measure(2)
    optimizer.add_param_group({"params": parameters([(3, 5)])})
    for _ in range(2):
        step(optimizer)
    (plan,) = (phase for phase in optimizer.canzona.report().measured.phases if phase.name == "plan")
    assert plan.worst > plan.median > 0


@pytest.mark.parametrize("steps", [0, -1, True, 2.0], ids=str)
def test_a_number_of_steps_that_is_none(steps: Any) -> None:
    optimizer = alone()
    with pytest.raises(CanzonaError, match="not a positive integer"):
        optimizer.canzona.measure(steps)


def test_an_error_ends_it() -> None:
    optimizer = alone()
    step(optimizer)
    optimizer.canzona.measure(5)
    feed(optimizer, 0)
    param = optimizer.param_groups[0]["params"][1]
    param.grad = torch.ones_like(param).to_sparse()
    with pytest.raises(InvalidGradient):
        optimizer.step()
    session = optimizer.canzona.session
    assert (session.measuring.wanted, session.measuring.clock, session.driver.clock) == (0, None, None)
    step(optimizer)


def test_the_report_shows_it() -> None:
    optimizer = alone()
    step(optimizer)
    assert "Measured" not in optimizer.canzona.report().to_text()
    optimizer.canzona.measure(1)
    step(optimizer)
    text = optimizer.canzona.report().to_text()
    assert "measured step" in text
    assert "canzona-compile calibrate" in text
    assert "── Measured ── 1 step on 1 rank, by the clock of each rank" in text
    assert optimizer.canzona.report().to_dict()["measured"]["phases"][0]["name"] == "look"


# -- when it is off ----------------------------------------------------------------------------------


def calls_of_a_step(optimizer: Any) -> Counter[str]:
    """Every call in a step, of Python and of C."""
    feed(optimizer, 0)
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            file = re.sub(r"<eval_with_key>.\d+", "a graph", frame.f_code.co_filename)  # torch numbers what it compiles
            found[f"{file} {frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            found[getattr(argument, "__qualname__", str(argument))] += 1

    gc.disable()  # hypothesis times collections, once it has run in this process
    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_a_step_that_is_not_measured_makes_the_calls_of_one_that_never_was() -> None:
    optimizer = alone()
    for _ in range(3):
        step(optimizer)
    before = calls_of_a_step(optimizer)
    assert not [name for name in before if "step_clock" in name and "during" not in name]
    assert not [name for name in before if "timed_program" in name or "perf_counter" in name]
    optimizer.canzona.measure(1)
    assert calls_of_a_step(optimizer)["perf_counter"] > 0
    after = calls_of_a_step(optimizer)
    assert (after - before, before - after) == (Counter(), Counter())


# -- zero1 -------------------------------------------------------------------------------------------


def zero1_figures() -> Any:
    model, optimizers, handle = set_up(make="muon and adamw", hardware=KNOWN)
    train_model(model, optimizers, 2)
    handle.measure(3)
    train_model(model, optimizers, 3)
    assert handle.zero1.reduction.clock.stopped
    return handle.report().to_dict()["measured"]


def test_zero1_has_phases_of_its_own() -> None:
    found, other = run(2, zero1_figures, after=partial(step_alone, "muon and adamw"))
    assert found == other
    phases = {one["name"]: one for one in found["phases"]}
    assert {"reduce", "gather params", "compute"} <= phases.keys()
    assert sum(one["mean"] for one in phases.values()) == pytest.approx(found["seconds"], rel=1e-9)
    assert found["ranks"] == 2
    for name in ("reduce", "gather params"):
        assert phases[name]["predicted"] > 0
        assert phases[name]["mean"] > 0


# -- a rank that does not come -------------------------------------------------------------------------


def last_step_without(absent: int) -> str:
    """Rank `absent` dies once it has taken the last step that is measured."""
    meeting.PATIENCE = timedelta(seconds=1)  # in a pool of its own
    params = parameters([(4, 6), (3, 5)])
    optimizer: Any = canzona_compile.wrap(Muon(params, lr=0.05), replicate=dist.group.WORLD, strategy="owner")
    step(optimizer)
    if dist.get_rank() == absent:
        optimizer.canzona.session.sharing = lambda: os._exit(7)
    optimizer.canzona.measure(2)
    step(optimizer)
    before = params[0].detach().clone()
    try:
        step(optimizer)
    except CanzonaError as error:
        assert not torch.equal(before, params[0])
        assert optimizer.canzona.session.measuring.clock is None
        return str(error)
    return ""


def test_a_rank_that_does_not_bring_its_figures_is_named() -> None:
    said, died = run(2, last_step_without, 1, dying=[1])
    assert died == Died(7)
    assert "the last step of measure() needs the ranks [0, 1], because each rank has measured only itself" in said
    assert "rank 1 did not make this call within 1 s" in said
    assert "look at the output of the missing rank: it died, raised an error, or takes fewer steps" in said
    assert "consolidate" not in said


# -- programs with a clock ---------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a_clock_is_told_of_every_act_on_every_stream(shards: int) -> None:
    """Before a program for CUDA changes the stream, what goes on there ends; then the next act begins."""
    program = emitted("muon", (1, shards), strategy="owner", micro_groups=2, matrices=4).program
    told = dict(turns(program))
    lane, open_act = "compute", ""
    seen = set()
    for node in program.module.graph.nodes:
        for act, group, own in told.get(node, ()):
            assert own == lane
            open_act = act
            seen.add((act, group))
        event = program.events.get(node.name)
        if event is not None and node.target not in LOOKS:
            assert open_act == event.act
        if node.target is on_stream:
            assert open_act == ""
            lane = "compute" if node.args[1] in ("caller", "compute") else node.args[1]
    assert (lane, open_act) == ("compute", "other")
    acts = {(str(event.act), event.micro_group) for event in program.events.values()}
    assert acts <= seen
    graph = TimedProgram(program).module.graph
    plain = [n.target for n in program.module.graph.nodes if n.op.startswith("call")]
    assert [n.target for n in graph.nodes if n.op.startswith("call") and n.target is not turn] == plain
    assert next(iter(graph.nodes)).name == CLOCK
