"""Whole trainings on the stand-in: the bits of the plain optimizer, in any order of the device's work."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Muon

import canzona_compile
from canzona_compile.errors import CanzonaError
from canzona_compile.runtime.step_clock import StepClock
from tests.fake_cuda.device import current_device
from tests.fake_cuda.model_on_device import parameters_on_device, training
from tests.fake_cuda.on_device import look, on_stand_in
from tests.fake_cuda.rank_programs import torch_alone
from tests.fake_cuda.scheduler import DeviceError
from tests.fake_cuda.trainings import SHAPES, RankResult, Script, plain_training, run_script, wrong
from tests.harness.layouts import Case
from tests.harness.marks import also, first, full, only
from tests.harness.optimizers import share_captures
from tests.harness.pairs import different, feed, left_after, parameters
from tests.lowering.emitted_steps import ENDLESS

CASES = [
    Case("fsdp", (2,)),
    Case("plain", ()),
    Case("tp_rows", (2,)),
    Case("ddp", (2,)),
    Case("fsdp", (4,)),
    Case("hsdp", (2, 2)),
    Case("fsdp_tp", (2, 2)),
    Case("tp_ddp", (2, 2)),
]


def rate(value: float) -> Any:
    def edit(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = value

    return edit


def reload(optimizer: Any) -> None:
    """Load the optimizer's own state: its plan is given up, and recordings with it."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def measure(optimizer: Any) -> None:
    """Measure two steps, by events of the device."""
    if canzona_compile.is_wrapped(optimizer):
        optimizer.canzona.measure(2)
        optimizer.canzona.session.measuring.clock = StepClock(torch.device("cuda", current_device().index))


# A scheduler: another rate for each step.
RATES = {step: rate(0.05 / (1 + step)) for step in range(1, 9)}
SCRIPTS: dict[str, dict[str, Any]] = {
    "one rank copies": {"moving": lambda rank, step: rank == 1, "steps": 7},
    "default loop": {"moving": lambda rank, step: True, "edits": RATES, "steps": 9},
    "default loop, with kernels": {"moving": lambda rank, step: True, "edits": RATES, "steps": 7, "kernels": True},
    "rates": {"edits": {3: rate(0.02), 5: rate(0.01)}, "steps": 8},
    "missing gradients and a reload": {"missing": {2: (1,), 3: (1,)}, "edits": {5: reload}, "steps": 9},
    "three micro-groups": {"options": {"micro_groups": 3, "strategy": "owner"}, "steps": 7},
    "kernels": {"kernels": True, "edits": {3: rate(0.02)}, "steps": 6},
    "lanes": {
        "kernels": True,
        "edits": {3: rate(0.02)},
        "steps": 6,
        "options": {"hardware": ENDLESS, "strategy": "owner"},
    },
    "state in host memory": {"options": {"state": "cpu", "micro_groups": 3, "strategy": "owner"}, "steps": 7},
    "state in 16 bits in host memory": {
        "options": {"state": "bfloat16 cpu", "micro_groups": 2, "strategy": "owner"},
        "kernels": True,
        "steps": 7,
    },
}


@pytest.mark.parametrize("name", first(["muon", "shampoo", "soap"]))
@pytest.mark.parametrize("case", first(CASES), ids=str)
@pytest.mark.parametrize("script", first(SCRIPTS))
@pytest.mark.parametrize("seeds", [range(1), *also([range(1, 3)])], ids=str)
def test_bits_of_the_plain_optimizer(name: str, case: Case, script: str, seeds: range) -> None:
    right = Right(name, case, script)
    for seed in seeds:
        results = run_script(right.script, seed, right.plain)
        assert right.wrong(results) == []
        if name == "muon":  # the others decompose, and torch looks at error codes
            assert all(result.waits == 0 for result in results)
            # A whole matrix that no other one is stacked with is read by operators of torch, wherever its gradient is.
            by_kernels = right.script.kernels and case.layout != "ddp"
            assert "recorded once" in results[0].how[-1] or (right.script.moving(0, 1) and not by_kernels)


NAMES = ["blocks", "several leaves", "sent as it is"]
STACKED = [Case("stack_dim1", (2,)), Case("stack_dim0", (2,)), Case("stack_dims", (2, 2))]


@pytest.mark.full  # tests/runtime/test_gpu_steps.py records some
@pytest.mark.parametrize("case", STACKED, ids=str)
@pytest.mark.parametrize("script", ["kernels", "rates", "missing gradients and a reload", "three micro-groups"])
def test_stacks_of_matrices(case: Case, script: str) -> None:
    right = Right("stacks", case, script)
    results = run_script(right.script, 0, right.plain)
    assert right.wrong(results) == []
    assert "recorded once" in results[0].how[-1]


# Symmetric products of ours, which CUDA takes, round otherwise than plain ones: a bit of bfloat16 in Muon's updates of
# about 0.05, of float32 in the others'.
ROUNDING = {"muon": 0.05 * 2**-7, "stacks": 0.05 * 2**-7, "shampoo": 2**-20, "soap": 2**-20}


class Right:
    """What a training has to give in any order: the bits that it has when each piece of work is done at once.

    These are the plain optimizer's bits, up to the rounding of symmetric products.
    """

    def __init__(self, name: str, case: Case, script: str) -> None:
        self.script = Script(name, case, **SCRIPTS[script])
        self.plain = plain_training(self.script)
        self.prompt = run_script(self.script, None, self.plain)
        assert all(result.distance <= ROUNDING[name] for result in self.prompt)
        if name == "muon" and "missing" not in script:
            assert wrong(self.prompt) == []

    def wrong(self, results: list[RankResult]) -> list[str]:
        """What differs on any rank."""
        ranks = enumerate(zip(results, self.prompt, strict=True))
        return [f"rank {rank}" for rank, (a, b) in ranks if not same_values(a, b)]


def same_values(one: RankResult, other: RankResult) -> bool:
    """Whether a rank holds equal parameters and equal state after two trainings."""
    return all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", ["muon", "shampoo", "soap"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_orders(name: str, case: Case) -> None:
    """Twenty-five orders of each optimizer and layout, 200 of each optimizer, over all that happens meanwhile."""
    scripts = list(SCRIPTS)
    known: dict[str, Right] = {}
    bad: list[str] = []
    for i, seed in enumerate(range(1000, 1025)):
        script = scripts[(i + CASES.index(case)) % len(scripts)]
        if script not in known:
            known[script] = Right(name, case, script)
        right, where = known[script], f"{script}, seed {seed}"
        try:
            bad += [f"{where}: {what}" for what in right.wrong(run_script(right.script, seed, right.plain))]
        except (Exception, DeviceError) as error:  # whatever the stand-in says
            bad.append(f"{where}: {error!r}")
    assert bad == []


@pytest.mark.parametrize("case", first(CASES), ids=str)
@pytest.mark.parametrize("seeds", [range(1), *also([range(1, 27)])], ids=str)
def test_codes_in_host_memory(case: Case, seeds: range) -> None:
    """Momentum in 8 bits on the host: each order of fetches, stores and all else gives the bits of rounded state."""
    options = {"state": {"momentum_buffer": "int8 cpu"}, "micro_groups": 3, "strategy": "owner"}
    script = Script("muon", case, steps=9, edits={5: rate(0.02)}, options=options)
    plain = plain_training(script)
    for seed in seeds:
        results = run_script(script, seed, plain)
        assert wrong(results) == [], f"seed {seed}"
        assert all(result.waits == 0 for result in results)
        assert "recorded" in results[0].how[-1]


@pytest.mark.parametrize("case", first([Case("plain", ()), *CASES[:1], *CASES[2:]]), ids=str)
@pytest.mark.parametrize(
    ("name", "state"),
    only([("blocks", "int8"), ("several leaves", "int8"), ("sent as it is", "bfloat16")], NAMES, ["int8", "bfloat16"]),
)
@pytest.mark.parametrize("seeds", [range(1), *also([range(1, 26)])], ids=str)
def test_kernels_open_stored_state(case: Case, name: str, state: str, seeds: range) -> None:
    """What is on the device is opened inside of prepare, where it is made of whole blocks: with the bits, also of what
    is stored, that calls of torch give."""
    options = {"state": {"*": state}, "micro_groups": 2, "strategy": "owner"}
    script = Script(name, case, steps=7, edits={5: rate(0.02)}, options=options, kernels=True)
    plain = plain_training(script)
    expected = run_script(replace(script, kernels=False), None, plain)
    assert all(result.distance <= ROUNDING["muon"] for result in expected)
    for seed in seeds:
        results = run_script(script, seed, plain)
        assert all(map(same_values, results, expected)), f"seed {seed}"
        assert all(result.waits == 0 for result in results)
        assert "recorded" in results[0].how[-1] or case.layout == "ddp"


@pytest.mark.parametrize("seed", [0, *also([1, 2])])
def test_measured_steps(seed: int) -> None:
    """The bits stay, recordings go on, and each lane does one thing after the other."""
    options = {"micro_groups": 2, "strategy": "owner"}
    script = Script("muon", CASES[0], steps=7, edits={3: measure}, options=options)
    results = run_script(script, seed)
    assert wrong(results) == []
    for result in results:
        assert result.waits == 0, "the host waits for the device once, after the last step"
        assert "recorded" in result.how[-1]
        assert len(result.measured) == 2
        for taken in result.measured:
            lanes = {lane: [s for s in taken.spans if s.lane == lane] for lane in ("compute", "pack")}
            assert {"prepare", "apply", "wait gather"} <= {s.act for s in lanes["pack"]}
            assert {"compute", "wait stream", "agree", "other"} <= {s.act for s in lanes["compute"]}
            for spans in lanes.values():
                assert all(s.start <= s.end for s in spans)
                assert all(a.end <= b.start for a, b in pairwise(spans))
            assert 0 < taken.exposed <= taken.seconds


@pytest.mark.parametrize("seed", [0, *also([1, 2])])
def test_measured_steps_in_lanes(seed: int) -> None:
    """What computes side by side counts once, and is no waiting for communication."""
    script = Script("muon", Case("plain", ()), steps=7, edits={3: measure}, options={"hardware": ENDLESS})
    results = run_script(script, seed)
    assert wrong(results) == []
    for taken in results[0].measured:
        computing = [s for s in taken.spans if s.act == "compute"]
        assert {s.lane for s in computing} == {"compute", "compute 1", "compute 2"}
        assert {s.group for s in computing} == {0}
        each = [s.end - s.start for s in computing]
        assert max(each) <= taken.by_act()["compute"] < sum(each)
        waits = [s for s in taken.spans if s.act == "wait stream" and s.lane == "compute"]
        first = min(s.start for s in computing)
        assert all(s.end <= first or s.group == -1 for s in waits)  # for what came before the program, and at its end


@pytest.mark.parametrize("seed", [0, *also([1, 2])])
def test_the_default_training_loop_is_replayed(seed: int) -> None:
    """`zero_grad(set_to_none=True)` and a rate for each step: every step from then on is a replay, and the only copy
    from the host has what changed."""
    results = run_script(Script("muon", CASES[0], 9, RATES, moving=lambda rank, step: True, kernels=True), seed)
    assert wrong(results) == []
    for result in results:
        assert result.waits == 0
        assert all(how.endswith("recorded once") for how in result.how[4:])
        # A number of both kinds of matrices in two kernels, and the addresses of up to five operands of five matrices.
        assert all(len(sizes) == 1 and sizes[0] <= 8 * 30 for sizes in result.copied[4:]), result.copied
        assert result.steady == STREAMS | {"CUDAGraph.replay": 4}


# In the default loop: how many stretches of a program are recorded, and how many run call by call.
COUNTS = {("muon", "fsdp"): (4, 0), ("muon", "ddp"): (0, 2), ("soap", "fsdp"): (2, 2), ("shampoo", "fsdp"): (4, 0)}


@pytest.mark.parametrize(("name", "layout"), [*list(COUNTS)[:2], *(full(*own) for own in list(COUNTS)[2:])])
def test_what_is_recorded_in_the_default_training_loop(name: str, layout: str) -> None:
    """With a rate for each step, and gradients elsewhere; docs/gpu.md says it."""
    script = Script(name, Case(layout, (2,)), 13, RATES, moving=lambda rank, step: True, kernels=True)
    how = [text for text in run_script(script, None)[0].how if "makes the host wait" not in text][-1]
    recorded, called = COUNTS[name, layout]
    if not recorded:
        assert how.startswith("call by call: operators of torch read what changes")
    else:
        assert how.startswith(f"{recorded} CUDA graphs, recorded")
        assert (f"; {called} more run call by call: operators of torch read" in how) == bool(called)


STREAMS = {"current_stream": 2, "set_stream": 5}  # once to see whether recordings ran on another one


@pytest.mark.parametrize(
    ("recorded", "calls"),
    [
        pytest.param(True, STREAMS | {"CUDAGraph.replay": 4}, id="replayed"),
        pytest.param(
            False,
            STREAMS | {"current_stream": 1, "device": 4, "is_current_stream_capturing": 1},
            id="call by call",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_a_steady_step_calls(recorded: bool, calls: dict[str, int]) -> None:
    """On each of two ranks, with none beside those of the stand-in; docs/architecture.md says how many."""
    results = run_script(Script("muon", CASES[0], options={"cuda_graphs": recorded}, kernels=True), None)
    assert [("recorded" in one.how[-1], one.steady) for one in results] == [(recorded, calls)] * 2


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_inside_of_a_capture_of_the_user_is_refused(steps: int) -> None:
    """Also the first one. The optimizer goes on after it."""

    def work(rank: int) -> None:
        plain, wrapped = (Muon(parameters(SHAPES), lr=0.05) for _ in range(2))
        canzona_compile.wrap(wrapped)
        share_captures(wrapped)
        for step in range(steps + 2):
            for optimizer in (plain, wrapped):
                feed(optimizer, step)
            plain.step()
            if step == steps:
                before = [param.detach().clone() for param in wrapped.param_groups[0]["params"]]
                with (
                    torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
                    training(),
                    pytest.raises(CanzonaError, match=r"(?s)inside of a CUDA graph capture.*outside of the capture"),
                ):
                    wrapped.step()
                assert all(map(torch.equal, before, wrapped.param_groups[0]["params"]))
                assert bool(wrapped.state) == bool(steps)
            wrapped.step()
            look()
        assert different(plain, wrapped) == []

    with torch_alone(), parameters_on_device(), on_stand_in(None, 1) as run:
        run(work)


def test_recordings_are_freed_with_their_optimizer() -> None:
    """And the memory of programs, as soon as nobody holds the optimizer."""
    graphs: list[Any] = []

    def use(optimizer: Any) -> None:
        share_captures(optimizer)
        feed(optimizer, 0)
        for _ in range(5):
            optimizer.step()
        look()
        (program,) = optimizer.canzona.session.driver.programs
        recordings = program.executor.replay._recorded.values()
        graphs.extend(weakref.ref(own.replay.graph) for own in recordings if own.replay is not None)

    def work(rank: int) -> list[str]:
        make = lambda: canzona_compile.wrap(Muon(parameters(SHAPES), lr=0.05))  # noqa: E731
        left_after(make, use)  # what the stand-in loads at its first use
        found = left_after(make, use)
        assert len(graphs) == 2
        assert [graph() for graph in graphs] == [None, None]
        return found

    with torch_alone(), on_stand_in(None, 1) as run:
        assert run(work) == [[]]


def test_planning_gathers_no_objects_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks compare goes through the host. Torch would send objects through the current device, the first one."""
    gather, seen = dist.all_gather_object, []

    def checked(*args: Any, **kwargs: Any) -> None:
        seen.append(args)
        gather(*args, **kwargs)

    monkeypatch.setattr(dist, "all_gather_object", checked)
    run_script(Script("muon", CASES[0], steps=2), None)
    assert seen == []
