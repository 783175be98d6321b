"""Keep addresses and numbers of several generated kernels in one list of words, and send what changed by one copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from canzona_compile.codegen.launch import Laid, StepWords
from canzona_compile.runtime.stretches import KernelCall


class KernelWords:
    """The words of the kernels that are recorded of one program.

    Args:
        device: the device.
    """

    def __init__(self, calls: Sequence[KernelCall], device: torch.device) -> None:
        self.calls, self.device = calls, device
        self.operands: dict[int, list[tuple[KernelCall, int, int]]] = defaultdict(list)  # by input of the program
        for call in calls:
            for i, part, operand in call.operands:
                self.operands[i].append((call, part, operand))
        found = (i for call in calls for _, own in call.numbers or () for i in own)
        self.numbers = tuple(dict.fromkeys(found))  # the inputs from which the host computes numbers
        self.words: StepWords | None = None
        self._laid: dict[KernelCall, Laid] = {}
        self._held: tuple[dict[int, list[int]], str] = {}, ""  # the addresses and numbers that the words hold
        self._writes = -1  # how often they had been written to when they held that

    def lay(self) -> None:
        """Put the words of all kernels in one place, if they are not. Numbers come first: where they alone change, the
        words to send are few."""
        kernels = [call.kernel for call in self.calls]
        if self.words is not None and all(kernel.words is self.words for kernel in kernels):
            return
        rooms = [kernel.room for kernel in kernels]
        count, addresses = 0, sum(numbers for numbers, _ in rooms)
        self.words = StepWords(addresses + sum(own for _, own in rooms), self.device)
        for kernel, (numbers, own) in zip(kernels, rooms, strict=True):
            kernel.attach(self.words, count, addresses)
            count, addresses = count + numbers, addresses + own

    def keep(self) -> None:
        """Remember how operands lie in what was recorded now."""
        self._laid = {call: call.kernel.laid() for call in self.calls}
        self._writes = -1

    def send(self, places: Mapping[int, list[int]], arguments: Sequence[Any]) -> bool:
        """Send the numbers of this step, and where tensors are, on the caller's stream.

        Returns:
            Whether what was recorded can be replayed. It cannot if a table was built again since, because a recorded
            launch would read memory that is gone.
        """
        if self.words is None:
            return True
        stale = self._writes != self.writes()  # somebody ran the program in another way
        for call, laid in self._laid.items():
            if not (call.kernel.resume(laid) if stale else call.kernel.table is laid.table):
                return False
        held, numbers = ({}, "") if stale else self._held
        for i, addresses in places.items():
            if held.get(i) != addresses:
                for call, part, operand in self.operands[i]:
                    call.kernel.place(part, operand, addresses)
        wanted = repr([arguments[i] for i in self.numbers])  # 0.0 and -0.0 are equal as numbers
        if wanted != numbers:
            for call in self.calls:
                call.kernel.number(
                    [float(v) for count, own in call.numbers or () for v in count(*(arguments[i] for i in own))]
                )
        self._held, self._writes = (dict(places), wanted), self.writes()
        self.words.send()
        return True

    def writes(self) -> int:
        """How often anything was written to the words of the kernels."""
        return sum(call.kernel.writes for call in self.calls)
