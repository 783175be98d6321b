"""On one GPU: a program of one rank of two on its streams, with copies in the place of collectives.

One GPU cannot hold two ranks of NCCL. What is tested is the rest: that events order what shares memory, also where
streams are slow at random, and that nobody waits.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from canzona_compile.ir import program_ops
from canzona_compile.ir.program import StreamSet
from canzona_compile.ir.step import Step
from canzona_compile.lowering.stream_sync import CALLER
from canzona_compile.runtime.graph_recorder import GraphRecorder
from canzona_compile.runtime.streams import CudaStreams, InOrder
from tests.fake_cuda.tensors import adopted, programs_run_here
from tests.harness.gpu import CUDA, DEVICE
from tests.harness.marks import first
from tests.lowering.emitted_steps import emitted
from tests.lowering.happens_before import Bound, Ledger

pytestmark = [
    pytest.mark.gpu,
    # The mode in which a waiting host raises says that it is a prototype. Other warnings are errors here too.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

# Tensors of the device, and where operators work on them; those of the stand-in lie in the same memory.
own: Callable[[Tensor], Tensor] = Tensor.cuda if CUDA else adopted
working = contextlib.nullcontext if CUDA else programs_run_here


class OnDevice(Bound):
    """Buffers and leaves on the device; equal on every call, but for what a run has written."""

    def __init__(self, step: Step, streams: Any) -> None:
        super().__init__(step, 0, Ledger())
        self.streams = streams
        self.leaves: dict[tuple[str, str], Tensor] = {}
        self.slots = [own(slot) for slot in self.slots]
        self.arguments = [self.of(value) for value in step.program.inputs.values()]

    def of(self, value: Any) -> Any:
        return self.streams if isinstance(value, StreamSet) else super().of(value)

    def leaf(self, name: str, task: str, whole: bool) -> Tensor:
        if (task, name) not in self.leaves:
            made = super().leaf(name, task, whole)
            noise = torch.Generator().manual_seed(len(self.leaves))
            self.leaves[task, name] = own((made * torch.rand(made.shape, generator=noise)).to(made.dtype))
        return self.leaves[task, name]

    @property
    def values(self) -> list[Tensor]:
        return [value.clone() for _, value in sorted(self.leaves.items())]


class Copying(fx.Interpreter):
    """Collectives become copies on a stream of their own, as NCCL's is one; calls may be made late at random."""

    def __init__(self, module: fx.GraphModule, late: random.Random | None) -> None:
        super().__init__(module)
        self.late, self.nccl = late, torch.cuda.Stream()

    def run_node(self, n: fx.Node) -> Any:
        if self.late is not None and n.op in ("call_module", "call_function") and self.late.random() < 0.3:
            torch.cuda._sleep(self.late.randrange(1_000_000))
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is program_ops.start_all_to_all:
            received, sent = args[:2]
            size = min(received.numel(), sent.numel())
            self.nccl.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.nccl):
                if self.late is not None:
                    torch.cuda._sleep(self.late.randrange(1_000_000))
                received[:size].copy_(sent[:size])
                return self.nccl.record_event()
        if target is program_ops.finish:
            torch.cuda.current_stream().wait_event(args[0])
            return None
        return super().call_function(target, args, kwargs)


def run_of(step: Step, bound: OnDevice, late: random.Random | None = None) -> Callable[[], None]:
    program = Copying(step.program.module, late)

    def run() -> None:
        with torch.no_grad(), working(), bound.streams.entered():
            program.run(*bound.arguments)

    return run


def on_streams(step: Step) -> OnDevice:
    wanted = next(v for v in step.program.inputs.values() if isinstance(v, StreamSet))
    return OnDevice(step, CudaStreams(wanted, DEVICE))


@pytest.mark.parametrize("grid", first([(1, 2), (2, 1), (2, 2)]), ids=str)
def test_streams_give_what_one_stream_gives(grid: tuple[int, int]) -> None:
    step = emitted("muon", grid, strategy="owner", micro_groups=4, matrices=8)
    plain, streamed = OnDevice(step, InOrder()), on_streams(step)
    runs = [run_of(step, plain), run_of(step, streamed)]
    for run in runs:  # the second run finds kernels compiled and tables sent
        run()
        run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs[1]()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    runs[0]()
    for seed in range(5 if CUDA else 1):
        runs[0]()
        run_of(step, streamed, random.Random(seed))()
    for a, b in zip(streamed.values, plain.values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_recording_that_fails_leaves_the_device_as_it_was() -> None:
    """Also where streams were forked: the allocator, the random generator, the current stream, the next recording."""
    value, stream = torch.ones(8, device=DEVICE), torch.cuda.Stream()

    def fails() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            value.add(1).sum().item()

    before = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            GraphRecorder(DEVICE).record(fails, CALLER)
        assert torch.cuda.current_stream() == before
        assert torch.rand(8, device=DEVICE).isfinite().all()
        lent = torch.empty(2**20, device=DEVICE)
        lent.record_stream(stream)
        place = lent.data_ptr()
        del lent
        torch.cuda.synchronize()
        assert torch.empty(2**20, device=DEVICE).data_ptr() == place
        torch.cuda.empty_cache()

    def adds() -> None:
        value.add_(1)

    GraphRecorder(DEVICE).record(adds, CALLER)()
    assert value.tolist() == [2.0] * 8
