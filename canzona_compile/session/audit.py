"""While training, look again: compute one matrix of each kind once more and compare the bits, and rehearse once more.

The first finds what capturing, planning and moving got wrong. The second finds what only several parameters together
show, and what begins later than the first rehearsal looked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.cell import step_alone, whole_copy
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.step import Task
from canzona_compile.ir.storage import opened
from canzona_compile.rehearsal.rehearsal import rehearse_as_now
from canzona_compile.replica.leaves import write
from canzona_compile.replica.randomness import draws
from canzona_compile.session.state import StateStore
from canzona_compile.tensors import local_part, plain_attributes


@dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """What a step has to give."""

    task: Task
    param: Tensor


class Audit:
    """Audits every so many steps of one plan. Each time another matrix of each kind is computed on all its ranks.

    Args:
        store: the tensors of the plan's tasks. What counts is the own eager step of its optimizer.
    """

    def __init__(self, every: int, store: StateStore) -> None:
        self.every, self.plan, self.store = every, store.plan, store
        self._steps = 0

    def before(self, names: Iterable[str]) -> list[Expected]:
        """Compute what this step has to give for some tasks; nothing if it is not audited. A collective if it is."""
        self._steps += 1
        if self._steps % self.every:
            return []
        if not any(bound.kind.maker for bound in self.plan.bound.values()):  # rehearsed differently
            rehearse_as_now(self.store.optimizer, self._states())
        turn = self._steps // self.every
        kinds: dict[int, list[str]] = {}
        for name in names:
            kind = self.plan.bound[name].kind
            if kind.recorder is not None and not any(draws(t.graph) for t in kind.templates.values()):
                kinds.setdefault(id(kind), []).append(name)
        return [self._expected(own[turn % len(own)]) for own in kinds.values()]

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """The state of every parameter, with the counters that it has now."""
        found = {
            key: pytree.tree_map(lambda leaf: leaf, dict(state))  # with its own containers
            for key, state in self.store.optimizer.state.items()
            if isinstance(key, Tensor) and state
        }
        for bound in self.plan.bound.values():
            state = found.pop(bound.param, None)
            if state is None:
                continue
            key = bound.param if bound.rehearsed is None else bound.rehearsed
            for leaf in bound.leaves:
                shape = tuple(key.shape) if leaf.shape == bound.task.shape else leaf.shape
                write(state, bound.kind.paths[leaf.name], replace(leaf, shape=shape), bound.kind.structure)
            found[key] = state
        return {key: pytree.tree_map(opened, state) for key, state in found.items()}

    def _expected(self, name: str) -> Expected:
        task, bound = self.plan.owned.task(name), self.plan.bound[name]
        assert bound.param.grad is not None
        values, grad = self._whole(task, "param", bound.param.detach()), self._whole(task, "grad", bound.param.grad)
        param = whole_copy(values, grad, plain_attributes(bound.origin), memory=torch.preserve_format)
        state = self.store.portable(task)
        whole = {key: pytree.tree_map(lambda leaf: self._whole_leaf(task, leaf), value) for key, value in state.items()}
        group = self.store.optimizer.param_groups[bound.task.param_group]
        return Expected(task, step_alone(self.store.optimizer, group, param, whole))

    def _whole(self, task: Task, leaf: str, value: Tensor) -> Tensor:
        return self.store.whole(task, leaf, value, task.shape).view(task.shape)

    def _whole_leaf(self, task: Task, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return self.store.whole(task, "leaf", leaf).clone()
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    def after(self, expected: Iterable[Expected]) -> None:
        """Compare what the step gave."""
        for one in expected:
            _, shard = one.task.layout.grid.find(self.store.rank)
            wanted = one.param[one.task.layout.boxes[shard].slices()]
            found = local_part(self.plan.bound[one.task.name].param).detach().view(wanted.shape)
            same = (found == wanted) | (found.isnan() & wanted.isnan())
            if bool(same.all()):
                continue
            off = (found.double() - wanted.double()).abs().max()
            raise CanzonaError(
                f"audit: after this step {int((~same).sum())} of {same.numel()} elements differ from the plain "
                f"optimizer's, by {float(off):.3g} at most",
                at=one.task.name,
                hint="its step depends on something that canzona_compile did not detect. Please report it, go back "
                "to a checkpoint and train with the plain optimizer",
            )
