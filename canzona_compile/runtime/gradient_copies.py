"""Copies of gradients that stay where they are, for recordings whose operators read gradients by address.

Generated kernels take addresses from words that every step sends (`step_words`), so they read gradients wherever these
are. Operators of torch keep the addresses that they were recorded with. Where one of them reads gradients, and those
are elsewhere on every step, a step copies them first: it reads and writes each element once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canzona_compile.ir import program_ops


class GradientCopies:
    """The copies that one program reads.

    Args:
        shared: the copies by task, which serve all programs: only one of them runs at a time.

    Attributes:
        copies: for each input of the program that is copied, by index, the copies of its tensors.
    """

    def __init__(self, shared: dict[str, Tensor]) -> None:
        self.shared = shared
        self.copies: dict[int, list[Tensor]] = {}

    def add(self, inputs: Mapping[int, Sequence[str]], arguments: Sequence[Any]) -> None:
        """Copy further inputs from now on.

        Args:
            inputs: for each one, by index, the tasks whose gradients it has.
            arguments: those of the program, for the shapes.
        """
        for i, tasks in inputs.items():
            for task, gradient in zip(tasks, arguments[i], strict=True):
                if task not in self.shared:
                    self.shared[task] = torch.empty_like(gradient)
            self.copies[i] = [self.shared[task] for task in tasks]

    def fill(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Copy the gradients of this step on the current stream, by one call for all of a dtype.

        Args:
            arguments: those of the program.

        Returns:
            The arguments, with the copies in place of what was copied.
        """
        if not self.copies:
            return arguments
        pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for i, own in self.copies.items():
            for pair in zip(own, arguments[i], strict=True):
                pairs[pair[0].dtype].append(pair)
        for alike in pairs.values():
            program_ops.copy(*(list(column) for column in zip(*alike, strict=True)))
        return [self.copies.get(i, value) for i, value in enumerate(arguments)]
