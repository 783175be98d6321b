"""What is copied of what users own: values are, and nothing that holds a handle; no finalizer runs once too often."""

from __future__ import annotations

import collections
import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from tests.harness.pairs import Pair, feed, params_of, same_bits
from tests.harness.toy_optimizers import PerParameter, State, cube

SHAPES = ((6, 4), (4, 6), (6, 4))


class FreedHandles:
    """Counts how often finalizers free the handles of weak references of storages.

    Attributes:
        count: how many were freed.
        too_often: how many frees there were without a handle that was given out.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held: collections.Counter[int] = collections.Counter()
        self.count = self.too_often = 0
        give, take = torch.UntypedStorage._weak_ref, torch.UntypedStorage._free_weak_ref

        def given(storage: Any) -> int:
            handle: int = give(storage)
            self.held[handle] += 1
            return handle

        def freed(handle: int) -> None:
            if handle not in self.held:  # given out before
                take(handle)
            elif self.held[handle] > 0:
                self.held[handle] -= 1
                self.count += 1
                take(handle)
            else:
                self.too_often += 1  # and the handle is left alone, so that this process lives

        patch.setattr(torch.UntypedStorage, "_weak_ref", given)
        patch.setattr(torch.UntypedStorage, "_free_weak_ref", staticmethod(freed))


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FreedHandles]:
    gc.collect()
    found = FreedHandles(monkeypatch)
    yield found
    gc.collect()


class CopiesInConstructor(PerParameter):
    """Keeps lists of blocks on itself, and deep copies of parameters to make them, as Distributed Shampoo does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        everyone = [p for group in self.param_groups for p in group["params"]]
        half = torch.tensor(0.5)  # a constant, whose storage the mode of fake tensors remembers
        self.moments = {p: torch.zeros_like(copy.deepcopy(p)) * half for p in everyone}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        moment = self.moments[param].lerp_(grad, 0.5)
        param.add_(cube(moment), alpha=-group["lr"])


class CopiesInStep(PerParameter):
    """Deep copies of parameter and gradient in the step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        half = torch.tensor(0.5)
        state.setdefault("last", torch.zeros_like(param)).copy_(copy.deepcopy(grad) * half)
        param.add_(cube(state["last"]) + copy.deepcopy(param.detach()), alpha=-group["lr"])


@pytest.mark.parametrize("kind", [CopiesInConstructor, CopiesInStep])
def test_code_that_copies_fake_tensors_frees_no_handle_twice(kind: type[Optimizer], freed: FreedHandles) -> None:
    pair = Pair(lambda params: kind(params), SHAPES)
    for step in range(3):
        for optimizer in pair.both:
            feed(optimizer, step)
            optimizer.step()
    same = [same_bits(a, b) for a, b in zip(*map(params_of, pair.both), strict=True)]
    del pair, optimizer
    gc.collect()
    assert all(same)
    assert freed.too_often == 0
    assert freed.count > 0
