"""What can be said of CUDA graphs without a device: numbers in tensors, when to record, when to stop.

`replayed` stands in for the device: what is "recorded" is the run with the tensors that it was given, and replaying
runs it again, so that it sees new numbers only through tensors, as a CUDA graph does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import copy as copy_of
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.optim import Muon, Optimizer

import canzona_compile
from canzona_compile import planner
from canzona_compile.codegen.launch import GroupedKernel, Part
from canzona_compile.instructions import copy, each
from canzona_compile.ir import Machine
from canzona_compile.kernels.ops import GEMM_AXPBY, SYM_GEMM
from canzona_compile.program import Program
from canzona_compile.runtime import cuda_graph
from canzona_compile.runtime.cuda_graph import MOST_RECORDINGS, Replay, obstacle, obstacle_in
from canzona_compile.runtime.number_forms import FORMS, DeviceNumber
from examples.optimizers.normuon import NorMuon
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.pairs import parameters

aten = torch.ops.aten
CPU = torch.device("cpu")
BOUNDS = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def programs_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are written as for CUDA: operator by operator where the CPU's have torch's foreach functions."""
    monkeypatch.setattr(planner, "machine_of", lambda params, rates=None: Machine("cuda", "nccl", 1, rates))


# -- operators with numbers in tensors ---------------------------------------------------------------


def number_of(value: float) -> DeviceNumber:
    made = DeviceNumber(CPU)
    made.fill(value)
    return made


CALLS: dict[Any, Callable[[Tensor, Tensor, Tensor, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.mul.Tensor: lambda x, y, z, s: ((x, s), {}),
    aten.div.Tensor: lambda x, y, z, s: ((x, s), {}),
    aten.add.Tensor: lambda x, y, z, s: ((x, y), {"alpha": s}),
    aten.sub.Tensor: lambda x, y, z, s: ((x, y), {"alpha": s}),
    aten.lerp.Scalar: lambda x, y, z, s: ((x, y, s), {}),
    aten.addcmul.default: lambda x, y, z, s: ((x, y, z), {"value": s}),
    aten.addcdiv.default: lambda x, y, z, s: ((x, y, z), {"value": s}),
}


# Products: what runs on CUDA, of which the library's way is taken here.
PRODUCTS: dict[Any, Callable[[Tensor, Tensor, Tensor, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    SYM_GEMM: lambda x, y, z, s: ((x, None, y), {"alpha": s, "beta": s, "diag": s}),
    GEMM_AXPBY: lambda x, y, z, s: ((x, z), {"alpha": s, "beta": s}),
}


def in_place(op: Any) -> Any:
    return getattr(getattr(aten, f"{op.overloadpacket.__name__}_"), op._overloadname)


@pytest.mark.parametrize("op", CALLS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@settings(max_examples=15, deadline=None)
@given(value=st.floats(-3, 3).filter(lambda v: abs(v) > 0.1), seed=st.integers(0, 2**16))
def test_an_operator_takes_its_number_in_a_tensor(op: Any, dtype: torch.dtype, value: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x, y, z = (torch.rand(7, 5, generator=random, dtype=torch.float64).add(0.5).to(dtype) for _ in range(3))
    args, kwargs = CALLS[op](x, y, z, value)
    exact = op(*(a.double() if isinstance(a, Tensor) else a for a in args), **kwargs)
    args, kwargs = CALLS[op](x, y, z, number_of(value))
    found = FORMS[op](*args, **kwargs)
    scale = (1 + abs(value)) * 12  # of the largest term, so that cancellation does not count
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * scale
    own = x.clone()
    args, kwargs = CALLS[op](own, y, z, number_of(value))
    assert FORMS[in_place(op)](*args, **kwargs) is own
    assert torch.equal(own, found)


def test_every_form_is_tested() -> None:
    assert set(FORMS) == {*CALLS, *map(in_place, CALLS), *PRODUCTS}


@pytest.mark.parametrize("op", PRODUCTS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_product_takes_its_numbers_in_tensors(op: Any, dtype: torch.dtype) -> None:
    """Stacked, and for every task; numbers that stay numbers may stand beside them."""
    random = torch.Generator().manual_seed(0)
    x, y, z = (torch.rand(3, 6, 6, generator=random, dtype=torch.float64) for _ in range(3))
    x, y, z = x.to(dtype), (y + y.mT).to(dtype), z.to(dtype)
    for value in (0.7, -1.3):
        args, kwargs = PRODUCTS[op](x, y, z, value)
        exact = op(*(a.double() if isinstance(a, Tensor) else a for a in args), **kwargs)
        args, numbered = PRODUCTS[op](x, y, z, number_of(value))
        for some in (numbered, {**numbered, "beta": value}):
            found = FORMS[op](*args, **some)
            assert found.dtype == dtype
            assert (found.double() - exact).abs().max() <= BOUNDS[dtype] * 40
            lists = [None if a is None else list(a) for a in args]
            for one, expected in zip(each(FORMS[op], *lists, **some), found, strict=True):
                torch.testing.assert_close(one, expected, rtol=BOUNDS[dtype] * 4, atol=BOUNDS[dtype] * 40)


@pytest.mark.parametrize("op", [aten.addcmul.default, aten.addcdiv.default], ids=str)
def test_the_quotient_or_product_of_tensors_is_rounded_before_it_is_scaled(op: Any) -> None:
    """As CUDA's kernels do it, whose bits a recording is to keep (the CPU's multiply from the left)."""
    random = torch.Generator().manual_seed(0)
    x, y, z = (torch.rand(999, generator=random) + 0.5 for _ in range(3))
    inner = y * z if op is aten.addcmul.default else y / z
    expected = torch.addcmul(x, inner, torch.tensor(0.3))
    assert torch.equal(FORMS[op](x, y, z, value=number_of(0.3)), expected)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor], ids=str)
def test_a_counter_of_a_state_keeps_its_dtype(op: Any) -> None:
    """0-d tensors would take the dtype of a 0-d number of 64 bits."""
    assert FORMS[op](torch.tensor(2.0), number_of(3.0)).dtype == torch.float32
    assert FORMS[op](torch.tensor(2.0), number_of(3.0)) == op(torch.tensor(2.0), 3.0)
    assert FORMS[op](torch.tensor([2]), number_of(3.0)).dtype == op(torch.tensor([2]), 3.0).dtype


def test_a_number_is_written_when_it_changes() -> None:
    number = number_of(0.1)
    assert (float(number.double), number.single) == (0.1, torch.tensor(0.1))
    number.double.zero_()
    number.fill(0.1)
    assert number.double == 0
    number.fill(0.2)
    assert number.double == 0.2


# -- whole steps -------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "normuon": lambda params: NorMuon(params, lr=0.1),
    "soap": lambda params: SOAP(params, lr=0.1, every=4),
    "shampoo": lambda params: Shampoo(params, lr=0.1, every=4),
}


class Steps:
    """A plain optimizer and a wrapped one, whose programs are replayed."""

    def __init__(self, name: str, stable: bool = True, record: Any = lambda run: run, **options: Any) -> None:
        shapes = [(6, 4), (4, 6), (6, 4)]
        self.stable, self.record = stable, record
        self.plain = MAKERS[name](parameters(shapes))
        self.ours: Any = canzona_compile.wrap(MAKERS[name](parameters(shapes)), **options)
        self.number = 0
        self.kept: list[Any] = []

    def step(self, **hypers: Any) -> float:
        """One step of both; returns how far apart they are, at most."""
        random = torch.Generator().manual_seed(self.number)
        self.number += 1
        for optimizer in (self.plain, self.ours):
            optimizer.param_groups[0].update(hypers)
        for a, b in zip(self.plain.param_groups[0]["params"], self.ours.param_groups[0]["params"], strict=True):
            a.grad = torch.randn(a.shape, generator=random)
            if b.grad is None or not self.stable:
                self.kept.append(b.grad)
                b.grad = torch.empty_like(b)
            b.grad.copy_(a.grad)
        for optimizer in (self.plain, self.ours):
            optimizer.step()
        running = self.ours.canzona.session.running
        for executor, _, _ in running.programs.values():  # as an executor on CUDA does
            if executor.replay is None:
                executor.replay = Replay(executor.program, CPU, contextlib.nullcontext, self.record)
        pairs = zip(self.plain.param_groups[0]["params"], self.ours.param_groups[0]["params"], strict=True)
        return max(float((a - b).detach().abs().max() / a.detach().abs().max()) for a, b in pairs)

    @property
    def replays(self) -> list[Replay]:
        programs = self.ours.canzona.session.running.programs.values()
        return [executor.replay for executor, _, _ in programs if executor.replay is not None]


@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_of_rates_reaches_what_was_recorded(name: str) -> None:
    steps = Steps(name)
    for i in range(14):
        assert steps.step(lr=0.1 / (i + 1)) < 1e-5
    recorded = [replay for replay in steps.replays if replay.recordings]
    assert recorded, [replay.how for replay in steps.replays]
    assert all(replay.recordings == 1 and replay.how == "a CUDA graph, recorded once" for replay in recorded)
    assert "a CUDA graph, recorded once" in [steps.ours.canzona.report().execution, *(r.how for r in recorded)]


def tables_only(run: Callable[[], None]) -> Callable[[], None]:
    """A recording in which generated kernels see no numbers but those that their tables hold.

    While it is recorded, which here is when it runs for the first time, they are given numbers as ever.
    """
    refresh, first = GroupedKernel.refresh, [True]

    def keeping(kernel: GroupedKernel, parts: Sequence[Part]) -> bool:
        return refresh(kernel, [(lists, known) for (lists, _), known in zip(parts, kernel._numbers, strict=True)])

    def replay() -> None:
        with patch.object(GroupedKernel, "refresh", refresh if first else keeping):
            first.clear()
            run()

    return replay


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_tables_of_generated_kernels_are_written_before_a_replay(name: str) -> None:
    steps = Steps(name, record=tables_only)
    for i in range(6):
        assert steps.step(lr=0.1 / (i + 1)) < 1e-5
    (replay,) = steps.replays
    assert replay.recordings == 1
    kernels = [m for m in replay.plain.modules() if isinstance(m, GroupedKernel)]
    uploads = [kernel.uploads for kernel in kernels]
    assert len(kernels) == 2 * len(steps.ours.canzona.step.groups), "prepare and apply of each micro-group"
    assert steps.step(lr=0.1 / 6) < 1e-5
    assert steps.step(lr=0.3) < 1e-5
    assert sum(kernel.uploads for kernel in kernels) > sum(uploads)


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


@pytest.mark.parametrize(("numerics", "bound"), [("exact", 1e-5), ("fast", 5e-2)])
def test_momentum_changes_without_a_new_recording(numerics: str, bound: float) -> None:
    """Numbers that the host computes first (1 - momentum) included."""
    steps = Steps("muon", numerics=numerics)
    for i in range(8):
        assert steps.step(momentum=0.9 + 0.01 * i, weight_decay=0.01 * (i + 1)) < bound
    assert [replay.recordings for replay in steps.replays] == [1]


def test_an_operator_that_keeps_its_number_is_recorded_anew() -> None:
    """Muon's eps is the bound of a clamp, which has no form with a tensor."""
    steps = Steps("muon")
    for eps in (1e-7, 1e-7, 1e-7, 1e-7, 1e-2, 1e-2, 1e-2, 1e-2, 1e-7):
        assert steps.step(eps=eps) < 1e-5
    assert [replay.recordings for replay in steps.replays] == [2]


def test_changing_addresses_end_the_recordings() -> None:
    steps = Steps("muon", stable=False)
    for _ in range(6):
        assert steps.step() < 1e-5
    assert [replay.recordings for replay in steps.replays] == [0]
    assert "two steps in a row" in steps.ours.canzona.report().execution
    for _ in range(4 * MOST_RECORDINGS + 4):  # the same places for a while, then others
        steps.stable = steps.number % 4 != 0
        assert steps.step() < 1e-5
    assert [replay.recordings for replay in steps.replays] == [MOST_RECORDINGS]
    assert steps.ours.canzona.report().execution.startswith("call by call: gradients are elsewhere")


def test_what_cannot_be_recorded_runs_call_by_call() -> None:
    tried = []

    def record(run: Any) -> Any:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    steps = Steps("muon", record=record)
    for _ in range(7):
        assert steps.step() < 1e-5
    assert len(tried) == 1
    assert steps.ours.canzona.report().execution == (
        "call by call: it cannot be recorded: operation not permitted when stream is capturing"
    )


def test_variants_are_recorded_apart() -> None:
    """Shampoo's steps with and without roots: what decomposes is never recorded, the other is once."""
    steps = Steps("shampoo")
    for _ in range(16):
        assert steps.step() < 1e-4
    assert len(steps.replays) > 1
    how = sorted(replay.how for replay in steps.replays)
    assert how[0] == "a CUDA graph, recorded once"
    assert any("makes the host wait" in text for text in how)


def test_a_rate_in_a_tensor_on_the_cpu_is_not_recorded() -> None:
    """`copy` between devices would keep what it held."""
    steps = Steps("muon")
    steps.step()
    (replay,) = steps.replays
    replay.device = torch.device("meta")  # any other than that of the tensor
    arguments = [torch.tensor(0.1) if i in replay._hypers else [] for i in range(len(replay.program.inputs))]
    assert replay._look(arguments) is None
    assert "a tensor on the CPU" in replay.how


def test_a_module_that_is_no_graph_is_not_recorded() -> None:
    root = torch.nn.Module()
    root.add_module("other", torch.nn.Linear(2, 2))
    graph = fx.Graph()
    graph.call_module("other", (graph.placeholder("x"),))
    graph.output(())
    program = Program(fx.GraphModule(root, graph), {}, (), 0)
    assert obstacle(program) == "it calls Linear, which may not be recorded"


def test_what_makes_the_host_wait_is_known() -> None:
    assert "linalg_eigh" in obstacle_in(aten.linalg_eigh.default)
    assert "item" in obstacle_in(aten._local_scalar_dense.default) or obstacle_in(aten._local_scalar_dense.default)
    assert obstacle_in(aten.linalg_vector_norm.default) == ""
    assert obstacle_in(aten.mm.default) == obstacle_in(copy) == ""
    assert "may not be recorded" in obstacle_in(cuda_graph.pool_of)
