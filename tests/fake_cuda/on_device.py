"""Wrapped optimizers whose programs run on the stand-in, by the real runtime.

Parameters, gradients and state lie in plain tensors, so that binding and planning are those of CPU tensors for a
machine of CUDA; each program then sees the same memory as tensors of the device. First steps, which run the
optimizer's own code, stay on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from canzona_compile.ir.program import Program
from canzona_compile.ir.step import Step
from canzona_compile.ir.storage import Stored
from canzona_compile.machine.hardware import Hardware, Machine
from canzona_compile.runtime import channel
from canzona_compile.runtime.buffers import SharedSlots
from canzona_compile.runtime.executor import Executor, Sources
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.waiter import Waiter
from canzona_compile.session import plan, program_cache, state, step_driver
from canzona_compile.session.audit import Audit
from canzona_compile.session.program_cache import BoundProgram, ProgramMaker
from canzona_compile.session.session import Session
from canzona_compile.session.variant_selection import Names
from tests.fake_cuda.cuda_names import cuda_replaced
from tests.fake_cuda.device import FakeDevice, current_device, use_device
from tests.fake_cuda.ranks import thread_ranks
from tests.fake_cuda.scheduler import Scheduler
from tests.fake_cuda.tensors import adopted, plainly, programs_run_here


class TensorsOnDevice:
    """Finds tensors as another source does, and shows their memory as the device's."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def fragment(self, role: Any, leaf: str, task: str) -> Any:
        return shown(self.source.fragment(role, leaf, task))

    def resident(self, leaf: str, task: str) -> Any:
        return shown(self.source.resident(leaf, task))


def shown(value: Tensor | Stored) -> Any:
    """A tensor, or a stored leaf, as one of this rank's device; what is in host memory is pinned there."""
    if not isinstance(value, Stored):
        return adopted(value)
    twin = copy.copy(value)
    twin.device = torch.device("cuda", current_device().index)
    for tensor in value.tensors if value.storage.host else ():
        tensor.pinned = True  # type: ignore[attr-defined]
    twin.tensors = value.tensors if value.storage.host else tuple(map(adopted, value.tensors))
    return twin


class DeviceExecutor(Executor):
    """The runtime's executor, on the device of this rank, or on the CPU where any rank interprets a task."""

    def __init__(self, program: Program, sources: Sources, memory: Any, cuda_graphs: bool = True) -> None:
        self.here = MAKES_FOR_DEVICE.get()
        if self.here:
            device = torch.device("cuda", current_device().index)
            own = TensorsOnDevice(sources.tensors)
            sources = Sources(device, sources.groups, Waiter([], device), own, sources.numbers, sources.eager)
        with self._operators():
            super().__init__(program, sources, memory, cuda_graphs)

    def _operators(self) -> Any:
        return programs_run_here() if self.here else contextlib.nullcontext()

    def arguments(self) -> list[Any]:
        with plainly():
            return super().arguments()

    def _run(self, launch: Callable[..., None]) -> None:
        with self._operators():
            super()._run(launch)


# Whether the program that is being made runs on the device. Inputs do not say: only the owner of a task has its code.
MAKES_FOR_DEVICE: ContextVar[bool] = ContextVar("MAKES_FOR_DEVICE", default=True)


class DeviceProgramMaker(ProgramMaker):
    """Decides by the step, which is the same on all ranks, where programs run; they exchange with one another."""

    def _make(self, owned: Step, tasks: Names, memory: SharedSlots) -> BoundProgram:
        look()
        interpreted = any(owned.placed_of(owned.task(name)).template.interpreted for name in tasks)
        token = MAKES_FOR_DEVICE.set(not interpreted)
        try:
            return super()._make(owned, tasks, memory)
        finally:
            MAKES_FOR_DEVICE.reset(token)


def settled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, once the caller's stream has done all of its work: it looks at what tensors hold."""

    @functools.wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        look()
        return function(*args, **kwargs)

    return waiting


def look() -> None:
    """Let the host wait for the caller's stream, as a test does that reads parameters."""
    device = current_device()
    device.forced = True
    device.finish(device.default)
    device.forced = False


@contextlib.contextmanager
def stand_in_here() -> Iterator[None]:
    """Give this thread a device that does each piece of work at once."""
    with on_stand_in(None, 1):
        use_device(FakeDevice(0, Scheduler(None), lambda until: None))
        try:
            yield
        finally:
            use_device(None)


def machine_of_given(_: Any, rates: Hardware | None = None) -> Machine:
    """A GPU with the rates that a test gives; those that ranks measured are of this machine."""
    return Machine("cuda", "nccl", 1, None if rates is None or rates.here else rates)


@contextlib.contextmanager
def on_stand_in(seed: int | None, world: int) -> Iterator[Callable[..., list[Any]]]:
    """Make ranks with devices; gives what runs a function on all of them."""
    scheduler = Scheduler(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_replaced())
        run = stack.enter_context(thread_ranks(scheduler, world))
        patched = functools.partial(mock.patch.object, autospec=False)
        stack.enter_context(patched(plan, "machine_of", machine_of_given))
        stack.enter_context(patched(program_cache, "Executor", DeviceExecutor))
        stack.enter_context(patched(step_driver, "ProgramMaker", DeviceProgramMaker))
        stack.enter_context(patched(channel, "host_group", lambda store, ranks, *_: Groups().of(tuple(ranks))))
        for owner, name in (
            (state.StateStore, "release"),
            (Session, "_start"),
            (Audit, "before"),
            (Audit, "after"),
        ):
            stack.enter_context(patched(owner, name, settled(getattr(owner, name))))
        yield run
