"""Find out whether a step draws random numbers.

The bits of such a step depend on its rank and on all other code that draws from the same generator.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.compat.interrupts import one_thread
from canzona_compile.ir.compiled_call import opened


def draws(graph: fx.Graph) -> bool:
    """Tell whether an operator of a graph draws from a random generator."""
    return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in opened(graph))


def watched(device: torch.device) -> Callable[[], bool]:
    """Return what tells whether numbers were drawn since now from the generators of the CPU and of a device."""
    before = generators(device)
    return lambda: any(not torch.equal(a, b) for a, b in zip(before, generators(device), strict=True))


@contextlib.contextmanager
def undisturbed(optimizer: Optimizer) -> Iterator[None]:
    """Inside this context code of an optimizer may draw; on exit the generators get their earlier states back."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    with torch.random.fork_rng(devices=[own for device in devices for own in devices_of(device)]):
        yield


@contextlib.contextmanager
def seeded(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Inside this context for a trial, seeds are the same every time; yields what `watched` returns."""
    with torch.random.fork_rng(devices=devices_of(device)):
        torch.manual_seed(0)
        yield watched(device)


def devices_of(device: torch.device) -> list[torch.device]:
    """The devices other than the CPU whose generators code for a device draws from."""
    return [device] if device.type == "cuda" else []


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of a device, and of no other device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class MatrixGenerators:
    """The state of the default generators for one matrix, so that its draws do not depend on its rank or on others.

    Args:
        device: the device that it lies on.

    Attributes:
        states: that of the CPU's generator, and that of the device's if it is a CUDA device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        with one_thread(), torch.random.fork_rng(devices=devices_of(device)):
            seed_generators(seed, device)
            self.states = generators(device)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let default generators go on from these states inside this context, and from their own after it."""
        with torch.random.fork_rng(devices=devices_of(self.device)):
            torch.set_rng_state(self.states[0])
            if len(self.states) > 1:
                torch.cuda.set_rng_state(self.states[1], self.device)
            try:
                yield
            finally:
                self.states = generators(self.device)


def generators(device: torch.device) -> list[Tensor]:
    """Return the generator states of the CPU, on which code for a GPU may draw as well, and of a CUDA device."""
    found: list[Tensor] = [torch.get_rng_state()]
    if device.type == "cuda":
        found.append(torch.cuda.get_rng_state(device))
    return found
