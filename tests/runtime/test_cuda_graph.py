"""What can be said of CUDA graphs without a device: when to record, and what runs call by call.

`rerun` stands in for the device: what is "recorded" is the run with the tensors and numbers that it was given, and
replaying runs it again, so that it sees new ones only in words, as a CUDA graph does. `tests/fake_cuda` has a whole
device.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from copy import copy as copy_of
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import fx
from torch.optim import Muon, Optimizer

import canzona_compile
from canzona_compile.codegen.launch import GroupedKernel, LaunchPart
from canzona_compile.compat.matmul_precision import matmul_precision
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.program_ops import copy
from canzona_compile.machine.hardware import Machine
from canzona_compile.runtime import cuda_graph
from canzona_compile.runtime.cuda_graph import MOST_CHANGES, MOST_FAILURES, Replay, ReplayState
from canzona_compile.runtime.graph_recorder import pool_of
from canzona_compile.runtime.streams import InOrder
from canzona_compile.runtime.stretches import obstacle, obstacle_in
from canzona_compile.session import plan, session
from examples.optimizers.normuon import NorMuon
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.marks import first, full, only
from tests.harness.optimizers import share_captures
from tests.harness.pairs import parameters
from tests.harness.toys import Breaking

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def programs_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are written as for CUDA: operator by operator where the CPU's have torch's foreach functions."""
    monkeypatch.setattr(plan, "machine_of", lambda params, rates=None: Machine("cuda", "nccl", 1, rates))
    monkeypatch.setattr(session, "free_memory", lambda device: 0)


MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "normuon": lambda params: NorMuon(params, lr=0.1),
    "soap": lambda params: SOAP(params, lr=0.1, every=4),
    "shampoo": lambda params: Shampoo(params, lr=0.1, every=4),
}


Run = Callable[[], None]


def rerun(run: Run) -> Run:
    """A recording that runs again on every replay. The first replay is what ran while it was recorded.

    In a replay generated kernels see no numbers but those in their words, and no tensors of the program's inputs but
    those whose addresses are in their words. What the program computes is elsewhere than in the run that was recorded.
    """
    refresh = GroupedKernel.refresh
    laid: dict[GroupedKernel, Any] = {}
    held: dict[GroupedKernel, Any] = {}

    def recording(kernel: GroupedKernel, parts: Sequence[LaunchPart]) -> bool:
        found = refresh(kernel, parts)
        laid[kernel] = kernel.laid().addresses
        return found

    def keeping(kernel: GroupedKernel, parts: Sequence[LaunchPart]) -> bool:
        words = kernel.words
        assert words is not None
        assert words.changed() is None, "something was not sent"
        numbers, places = held[kernel] = kernel._numbers.copy(), kernel._places.copy()
        found = refresh(kernel, parts)
        kernel._numbers[:] = numbers
        moved = places != laid[kernel]
        kernel._places[moved] = places[moved]
        kernel.flush()
        return found

    def again() -> None:
        with patch.object(GroupedKernel, "refresh", keeping):
            run()
        for kernel, (numbers, places) in held.items():  # a replay changes no words
            kernel._numbers[:], kernel._places[:] = numbers, places
            kernel.flush()

    with patch.object(GroupedKernel, "refresh", recording):
        run()
    replays = iter([lambda: None])
    return lambda: next(replays, again)()


@dataclass
class Recording:
    """Stands in for `GraphRecorder`."""

    of: Callable[[Run], Run]

    def make_room(self) -> None:
        pass

    def take_turn(self) -> None:
        pass

    def record(self, run: Run, stream: str) -> Run:
        return self.of(run)


class Steps:
    """A plain optimizer and a wrapped one, whose programs are replayed."""

    def __init__(self, name: str, stable: bool = True, record: Any = rerun, **options: Any) -> None:
        shapes = [(6, 4), (4, 6), (6, 4)]
        self.stable, self.record = stable, record
        self.plain = MAKERS[name](parameters(shapes))
        self.ours: Any = canzona_compile.wrap(MAKERS[name](parameters(shapes)), **options)
        share_captures(self.ours)
        self.number = 0
        self.kept: list[Any] = []

    def step(self, **hypers: Any) -> float:
        """One step of both; returns how far apart they are, at most."""
        random = torch.Generator().manual_seed(self.number)
        self.number += 1
        for optimizer in (self.plain, self.ours):
            optimizer.param_groups[0].update(hypers)
        for a, b in zip(self.plain.param_groups[0]["params"], self.ours.param_groups[0]["params"], strict=True):
            # Multiples of 1/256: their products are exact, so that statistics are symmetric on every processor.
            a.grad = torch.randn(a.shape, generator=random).mul_(256).round_().div_(256)
            if b.grad is None or not self.stable:
                self.kept.append(b.grad)
                b.grad = torch.empty_like(b)
            b.grad.copy_(a.grad)
        for optimizer in (self.plain, self.ours):
            optimizer.step()
        for program in self.ours.canzona.session.driver.programs:  # as an executor on CUDA does
            executor = program.executor
            if executor.replay is None:
                executor.replay = Replay(executor.program, CPU, InOrder(), Recording(self.record))
        pairs = zip(self.plain.param_groups[0]["params"], self.ours.param_groups[0]["params"], strict=True)
        return max(float((a - b).detach().abs().max() / a.detach().abs().max()) for a, b in pairs)

    @property
    def replays(self) -> list[Replay]:
        executors = [program.executor for program in self.ours.canzona.session.driver.programs]
        return [executor.replay for executor in executors if executor.replay is not None]


RECORDED = "a CUDA graph, recorded once"


@pytest.mark.parametrize("name", first(["muon", "normuon"]))
def test_a_schedule_of_rates_reaches_what_was_recorded(name: str) -> None:
    steps = Steps(name)
    for i in range(14):
        assert steps.step(lr=0.1 / (i + 1)) < 1e-5
    (replay,) = steps.replays
    assert (replay.recordings, replay.how, steps.ours.canzona.report().execution) == (1, RECORDED, RECORDED)


@pytest.mark.parametrize("name", first(["muon", "normuon"]))
def test_numbers_of_a_step_are_words_of_its_program(name: str) -> None:
    steps = Steps(name)
    for i in range(6):
        assert steps.step(lr=0.1 / (i + 1)) < 1e-5
    (replay,) = steps.replays
    assert replay.recordings == 1
    words = replay._words.words
    assert words is not None
    kernels = [call.kernel for call in replay._words.calls]
    assert len(kernels) == 2 * len(steps.ours.canzona.step.micro_groups), "prepare and apply of each micro-group"
    assert all(kernel.words is words for kernel in kernels)
    uploads = sum(kernel.uploads for kernel in kernels)
    assert steps.step(lr=0.3) < 1e-5
    assert sum(kernel.uploads for kernel in kernels) == uploads, "no table"


def test_the_sign_of_zero_reaches_what_was_recorded() -> None:
    steps = Steps("muon")
    for rate in (0.1, 0.2, 0.3, 0.4, 0.0):
        assert steps.step(lr=rate) < 1e-5
    (replay,) = steps.replays
    sent = {call: call.kernel._numbers.copy() for call in replay._words.calls}
    assert steps.step(lr=-0.0) < 1e-5
    assert replay.recordings == 1
    assert any((call.kernel._numbers != numbers).any() for call, numbers in sent.items())


@pytest.mark.parametrize("name", first(["muon", "normuon"]))
def test_gradients_that_move_are_read_where_they_are(name: str) -> None:
    """`zero_grad(set_to_none=True)` and a rate for each step: one recording, which every later step replays."""
    steps = Steps(name, stable=False)
    for i in range(4):
        assert steps.step(lr=0.1 / (i + 1)) < 1e-5
    for i in range(5):
        assert steps.step(lr=0.3 / (i + 1)) < 1e-5
    (replay,) = steps.replays
    assert (replay.recordings, replay.how) == (1, RECORDED)


def test_a_table_that_is_made_anew_ends_its_recording() -> None:
    steps = Steps("muon")
    for _ in range(5):
        steps.step()
    (replay,) = steps.replays
    (kernel, *_) = [m for m in replay.plain.modules() if isinstance(m, GroupedKernel)]
    kernel.table = copy_of(kernel.table)
    for _ in range(4):
        assert steps.step(lr=0.05) < 1e-5
    assert replay.recordings == 2


def test_another_thread_records_anew() -> None:
    """A recording uses memory of the thread that made it."""
    steps, found = Steps("muon"), list[float]()
    for _ in range(5):
        steps.step()
    (replay,) = steps.replays
    assert replay.recordings == 1
    other = threading.Thread(target=lambda: found.extend(steps.step() for _ in range(4)))
    other.start()
    other.join()
    assert (len(found), replay.recordings, replay.called) == (4, 2, {})
    assert max(found) < 1e-5


@pytest.mark.parametrize(("numerics", "bound"), [("exact", 1e-5), full("fast", 5e-2)])
def test_momentum_changes_without_a_new_recording(numerics: str, bound: float) -> None:
    """Numbers that the host computes first (1 - momentum) included."""
    steps = Steps("muon", numerics=numerics)
    for i in range(8):
        assert steps.step(momentum=0.9 + 0.01 * i, weight_decay=0.01 * (i + 1)) < bound
    assert [replay.recordings for replay in steps.replays] == [1]


def test_an_operator_that_keeps_its_number_is_recorded_anew() -> None:
    """Muon's eps is the bound of a clamp, which is an operator of torch."""
    steps = Steps("muon")
    for eps in (1e-7, 1e-7, 1e-7, 1e-7, 1e-2, 1e-2, 1e-2, 1e-2, 1e-7):
        assert steps.step(eps=eps) < 1e-5
    assert [replay.recordings for replay in steps.replays] == [2]


CHANGING = "call by call: operators of torch read what changes from step to step: "


def test_a_number_that_an_operator_keeps_may_change_twice() -> None:
    """After the third time its stretch runs call by call; here it is the only one."""
    steps = Steps("muon")
    for i in range(4 * MOST_CHANGES + 6):
        assert steps.step(eps=1e-7 * (1 + i // 4)) < 1e-5
    (replay,) = steps.replays
    assert (replay.recordings, replay.state) == (1 + MOST_CHANGES, ReplayState.STOPPED)
    assert replay.how.startswith(CHANGING)
    assert "eps" in replay.how


@pytest.mark.parametrize("name", first(["soap", "shampoo"]))
def test_gradients_that_operators_of_torch_read_may_move_twice(name: str) -> None:
    """Both multiply gradients. SOAP's operators read its counter as well, which changes on each step."""
    steps = Steps(name)
    for i in range(16):
        steps.stable = i not in (5, 9, 13)
        assert steps.step() < 1e-4
    (replay,) = (own for own in steps.replays if "makes the host wait" not in own.how)
    assert replay.state is ReplayState.STOPPED
    assert replay.how.startswith(CHANGING)
    assert ("_step" if name == "soap" else "_grad") in replay.how
    assert replay.recordings == (0 if name == "soap" else 3)


def test_a_switch_of_the_precision_of_products_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators choose their algorithm by it when they are recorded."""
    monkeypatch.setitem(MAKERS, "breaking", Breaking)  # captured by dispatch, so that a switch makes no new plan
    steps = Steps("breaking")
    for i in range(10):
        with matmul_precision("highest" if i < 5 else "high"):
            assert steps.step() < 1e-5
    assert [replay.recordings for replay in steps.replays] == [2]


@pytest.mark.parametrize(
    ("kind", "passing"), only([(RuntimeError, 0), (KeyError, 2)], (RuntimeError, AssertionError, KeyError), (0, 2))
)
def test_what_cannot_be_recorded_runs_call_by_call(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], passing: int
) -> None:
    """For some steps. Then it is tried again, twice at most."""
    tried = []

    def record(run: Any) -> Any:
        tried.append(run)
        if len(tried) == passing:
            return rerun(run)
        raise kind("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(cuda_graph, "PAUSE", 2)
    steps = Steps("muon", record=record)
    for _ in range(9 if passing else 16):
        assert steps.step() < 1e-5
        how = steps.ours.canzona.report().execution
        assert ("operation not permitted when stream is capturing" in how) == (bool(tried) and len(tried) != passing)
    if passing:
        assert how == RECORDED
    else:
        assert len(tried) == MOST_FAILURES
        assert how.startswith("call by call: it cannot be recorded: ")


def test_tables_are_sent_after_a_recording_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While recording they are only written (what is sent is shared on CPU, so that values would not show it)."""

    def record(run: Callable[[], None]) -> Callable[[], None]:
        with monkeypatch.context() as patched:
            patched.setattr(GroupedKernel, "_recording", True)
            patched.setattr(GroupedKernel, "launch", lambda kernel: None)
            run()
        raise RuntimeError("no")

    steps = Steps("muon", record=record)
    for i in range(4):  # the last one is to be recorded, with numbers of its own
        assert steps.step(momentum=0.9 + 0.01 * i) < 1e-5
    (replay,) = steps.replays
    assert "could not be recorded" in replay.how
    kernels = [m for m in replay.plain.modules() if isinstance(m, GroupedKernel)]
    assert all(kernel.words is not None and kernel.words.changed() is None for kernel in kernels)


def test_variants_are_recorded_apart() -> None:
    """Shampoo's steps with and without roots: what decomposes is never recorded, the other is once."""
    steps = Steps("shampoo")
    for _ in range(16):
        assert steps.step() < 1e-4
    assert len(steps.replays) > 1
    how = sorted(replay.how for replay in steps.replays)
    assert how[0] == RECORDED
    assert any("makes the host wait" in text for text in how)


@pytest.mark.parametrize("role", ["hyperparameter", "state"])
def test_what_lies_on_the_cpu_is_not_recorded(role: str) -> None:
    """`copy` between devices would keep what a rate held, and a counter would count once, when it is recorded."""
    steps = Steps("muon")
    steps.step()
    (replay,) = steps.replays
    replay.device = torch.device("meta")  # any other than that of the tensor
    arguments: list[Any] = [torch.tensor(0.1, device="meta") for _ in replay.names]
    numbers, tensors = replay._words.numbers, list(replay._words.operands)
    arguments[numbers[-1] if role == "hyperparameter" else tensors[-1]] = [torch.tensor(0.1)]
    assert not replay._may_record(arguments)
    assert "a tensor on the CPU" in replay.how


def test_nothing_is_recorded_where_that_is_not_wanted() -> None:
    steps = Steps("muon")
    steps.step()
    (program,) = steps.ours.canzona.session.driver.programs
    unwanted = Replay(program.executor.program, CPU, InOrder(), wanted=False)
    assert unwanted.how == "call by call: cuda_graphs=False"
    with pytest.raises(CanzonaError, match="neither True nor False"):
        canzona_compile.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), cuda_graphs=1)  # type: ignore[arg-type]


def test_programs_of_a_plan_that_is_given_up_are_freed() -> None:
    """With them buffers and recordings, at once and not when Python looks for cycles."""
    steps = Steps("muon")
    for _ in range(4):
        steps.step()
    (replay,) = (weakref.ref(replay) for replay in steps.replays)
    gc.collect()
    gc.disable()
    try:
        canzona_compile.unwrap(steps.ours)
        assert replay() is None
    finally:
        gc.enable()


def test_a_module_that_is_no_graph_is_not_recorded() -> None:
    root = torch.nn.ModuleDict({"other": torch.nn.Linear(2, 2)})
    graph = fx.Graph()
    graph.call_module("other", (graph.placeholder("x"),))
    graph.output(())
    assert obstacle(fx.GraphModule(root, graph)) == "it calls Linear, which may not be recorded"


def test_what_makes_the_host_wait_is_known() -> None:
    assert "linalg_eigh" in obstacle_in(aten.linalg_eigh.default)
    assert "cholesky_ex" in obstacle_in(aten.linalg_cholesky_ex.default)
    assert "item" in obstacle_in(aten._local_scalar_dense.default) or obstacle_in(aten._local_scalar_dense.default)
    assert obstacle_in(aten.linalg_vector_norm.default) == ""
    assert obstacle_in(aten.mm.default) == obstacle_in(copy) == ""
    assert "may not be recorded" in obstacle_in(pool_of)
