"""On one GPU: the numbers of the plain optimizer, no waiting host, recorded programs, few launches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer
from torch.profiler import ProfilerActivity, profile

import canzona_compile
from acceptance.side_by_side import same_operators
from canzona_compile.kernels.ops import PAD_CAST
from examples.optimizers.shampoo import Shampoo
from examples.optimizers.soap import SOAP
from tests.harness.gpu import CUDA, DEVICE
from tests.harness.marks import first, full

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the debug mode says that it is a prototype, drivers have their own
]

SIZE = 128 if CUDA else 8  # the interpreter is slow
ODD = ((250, 500), (250, 500), (1000, 300)) if CUDA else ((31, 47), (31, 47))
SHAPES = ((2 * SIZE, SIZE), (SIZE, 2 * SIZE), (SIZE, SIZE), (2 * SIZE, SIZE))
EVERY = 4
MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.02, weight_decay=0.1),
    "stacks": lambda params: canzona_compile.optimizers.Muon(params, lr=0.02, weight_decay=0.1),
    "adamw": lambda params: AdamW(params, lr=0.003, weight_decay=0.1, foreach=False),
    "soap": lambda params: SOAP(params, lr=0.003, every=EVERY),
    "shampoo": lambda params: Shampoo(params, lr=0.02, every=EVERY),
}
# Of a parameter, relative, after some steps: one difference in a 16-bit product grows through Newton-Schulz, and
# eigenvectors of close eigenvalues turn.
BOUNDS = {("muon", "exact"): 2e-3, ("muon", "fast"): 3e-2, ("soap", "exact"): 2e-2, ("shampoo", "exact"): 2e-2}


class Steps:
    """A plain optimizer and a wrapped one on equal gradients, which stay where they are."""

    def __init__(self, name: str, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> None:
        self.random = torch.Generator(DEVICE).manual_seed(0)
        values = [torch.randn(shape, device=DEVICE, generator=self.random) for shape in shapes]
        self.plain = MAKERS[name]([torch.nn.Parameter(v.clone()) for v in values])
        self.ours: Any = canzona_compile.wrap(MAKERS[name]([torch.nn.Parameter(v) for v in values]), **options)
        self.gradients = [torch.empty_like(v) for v in values]
        self.pairs: list[tuple[Tensor, Tensor]] = list(
            zip(self.plain.param_groups[0]["params"], self.ours.param_groups[0]["params"], strict=True)
        )
        for (a, b), gradient in zip(self.pairs, self.gradients, strict=True):
            a.grad = b.grad = gradient

    def step(self, **hypers: Any) -> None:
        for gradient in self.gradients:
            gradient.normal_(generator=self.random)
        for optimizer in (self.plain, self.ours):
            optimizer.param_groups[0].update(hypers)
            optimizer.step()

    @property
    def apart(self) -> float:
        return max(float((a - b).detach().norm() / a.detach().norm()) for a, b in self.pairs)

    @property
    def execution(self) -> str:
        found: str = self.ours.canzona.report().execution
        return found


@pytest.mark.parametrize(("name", "numerics"), [("muon", "exact"), *(full(*own) for own in list(BOUNDS)[1:])])
def test_equals_the_plain_optimizer(name: str, numerics: str, record_property: Callable[[str, object], None]) -> None:
    steps = Steps(name, numerics=numerics)
    for i in range(2 * EVERY + 1):
        steps.step(lr=0.02 / (1 + i))
    record_property("relative distance", steps.apart)
    assert steps.apart < BOUNDS[name, numerics]


@pytest.mark.parametrize("numerics", first(["exact", "fast"]))
def test_matrices_that_are_padded(numerics: str) -> None:
    steps = Steps("muon", ODD, numerics=numerics)
    for i in range(4):
        steps.step(lr=0.02 / (1 + i))
    cuts = steps.ours.canzona.step.placed
    assert all(any(node.target is PAD_CAST for node in cut.compute.nodes) for cut in cuts)
    assert steps.apart < BOUNDS["muon", numerics]


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_bits_are_equal_where_operators_are(name: str, record_property: Callable[[str, object], None]) -> None:
    """No two matrices alike, which would be stacked. Muon's products are symmetric, and operators of ours."""
    steps = Steps(name, SHAPES[:3])
    steps.step()
    steps.step()
    same = all(same_operators(session.last()[0]) for session in steps.ours.canzona.sessions)
    assert same == (name == "adamw")
    record_property("relative distance", steps.apart)
    assert steps.apart <= (0.0 if same else BOUNDS[name, "exact"])


def test_a_replayed_step_is_an_eager_step() -> None:
    """Two wrapped optimizers, of which one is never recorded."""
    replayed, eager = Steps("muon"), Steps("muon", cuda_graphs=False)
    for i in range(8):
        for steps in (replayed, eager):
            steps.step(lr=0.02 / (1 + i))
    assert replayed.execution == "a CUDA graph, recorded once"
    assert eager.execution == "call by call: cuda_graphs=False"
    for (_, a), (_, b) in zip(replayed.pairs, eager.pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """What makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recorded", [True, False], ids=["replayed", "call by call"])
def test_the_host_never_waits_in_a_steady_step(recorded: bool) -> None:
    """Nor where gradients are elsewhere, as `zero_grad()` makes them."""
    steps = Steps("muon", cuda_graphs=recorded)
    for _ in range(5):
        steps.step()
    assert steps.execution.startswith("a CUDA graph" if recorded else "call by call")
    for i in range(3):
        for (_, b), gradient in zip(steps.pairs, steps.gradients, strict=True):
            b.grad = gradient.clone()
        with no_synchronisation():
            steps.ours.param_groups[0]["lr"] = 0.01 / (1 + i)
            steps.ours.step()


@pytest.mark.full
def test_another_variant_is_another_recording() -> None:
    """Shampoo finds roots every few steps: those steps run call by call, the others from one recording."""
    steps = Steps("shampoo")
    seen = set()
    for _ in range(4 * EVERY):
        steps.step()
        seen |= {program.executor.how for program in steps.ours.canzona.session.driver.programs}
    assert "a CUDA graph, recorded once" in seen
    assert steps.apart < BOUNDS["shampoo", "exact"]


def test_stacks_of_experts_are_recorded(record_property: Callable[[str, object], None]) -> None:
    """Each matrix of a stack is stepped as if it were alone."""
    steps = Steps("stacks", ((4, 2 * SIZE, SIZE), (3, SIZE, 2 * SIZE), (SIZE, SIZE)))
    for i in range(6):
        steps.step(lr=0.02 / (1 + i))
    record_property("relative distance", steps.apart)
    assert steps.execution == "a CUDA graph, recorded once"
    assert steps.apart < BOUNDS["muon", "exact"]


def test_gradients_that_move_are_recorded_once() -> None:
    steps = Steps("muon")
    held = []
    for i in range(12):
        if i % 4 == 0:
            for a, b in steps.pairs:
                a.grad = b.grad = torch.empty_like(b)
                held.append(b.grad)
            steps.gradients = held[-len(steps.pairs) :]
        steps.step()
    assert steps.execution == "a CUDA graph, recorded once"
    assert steps.apart < BOUNDS["muon", "exact"]


def launches(work: Callable[[], object]) -> dict[str, int]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    kernels = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
    return {"graphs": names.count("cudaGraphLaunch"), "kernels": sum(map(names.count, kernels))}


def test_a_replayed_step_is_one_launch() -> None:
    """One graph, and two small kernels for each number that changed."""
    steps = Steps("muon")
    for _ in range(5):
        steps.step()
    found = launches(steps.ours.step)
    assert found == {"graphs": 1, "kernels": 0}
    steps.ours.param_groups[0]["lr"] = 0.005
    found = launches(steps.ours.step)
    assert found["graphs"] == 1
    assert found["kernels"] <= 8


def test_memory_of_streams_and_recordings_does_not_grow() -> None:
    steps = Steps("muon")
    for _ in range(5):
        steps.step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        steps.ours.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@contextlib.contextmanager
def nccl() -> Iterator[None]:
    """A process group of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_sharded_model_on_nccl() -> None:
    """FSDP2 of one rank: the same parameters as plain, from a program that is recorded and lets no host wait."""
    with nccl():
        torch.manual_seed(0)
        models = [torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(3))).cuda() for _ in "ab"]
        models[1].load_state_dict(models[0].state_dict())
        fully_shard(models[1])
        plain = MAKERS["muon"](list(models[0].parameters()))
        ours: Any = canzona_compile.wrap(MAKERS["muon"](list(models[1].parameters())))
        data = torch.randn(16, 128, device="cuda")
        for _ in range(6):
            for model, optimizer in zip(models, (plain, ours), strict=True):
                model(data).square().mean().backward()
                optimizer.step()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.zero_()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b.full_tensor(), rtol=1e-2, atol=1e-4)
        with no_synchronisation():
            ours.step()
