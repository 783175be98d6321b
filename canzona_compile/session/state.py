"""Where optimizer state is kept: fragments next to their parameters, whole tensors on owners, and moves of both.

`optimizer.state` remains the only place of state. The plan makes some leaves resident: the owner rank holds the whole
tensor of such a leaf, and the other ranks hold None in its place. *Portable* state is what the unwrapped optimizer
would hold: its leaves are laid out like the parameter. A plan begins and ends with portable state, and `state_dict`
and `load_state_dict` use it as well.

Programs and eager steps ask the store for every tensor of a task: fragments, whole tensors on owners, and the
temporary state of first steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import HeldOptimizer
from canzona_compile.compat.torch_private import pytree
from canzona_compile.eager.own_object import portable_of
from canzona_compile.errors import CanzonaError, some
from canzona_compile.ir.layout import Box, Layout, Shape, dtensor_layout, laid_out_by_entries, laid_out_like
from canzona_compile.ir.program_ops import Watch
from canzona_compile.ir.step import Leaf, Role, Task
from canzona_compile.ir.storage import Stored, opened
from canzona_compile.replica.leaves import (
    empty_containers,
    keys_of,
    leaves_with_paths,
    paths_of,
    read,
    storable_leaves,
    structure_of,
    write,
)
from canzona_compile.replica.raised import first_line
from canzona_compile.runtime.process_groups import Groups
from canzona_compile.runtime.send_values import send_values
from canzona_compile.session.gradients import StepGradients
from canzona_compile.session.plan import BoundParam, Plan
from canzona_compile.tensors import inner_tensors, local_part, unwrapped
from canzona_compile.views.view import held_part


class StateStore:
    """The tensors of a plan's tasks on this rank. Implements `runtime.executor.Tensors`.

    Attributes:
        fragments: this rank's fragments of state leaves that are not resident, by (task, leaf).
        residents: the whole state tensors that this rank holds as owner, by (task, leaf).
    """

    optimizer = HeldOptimizer()

    def __init__(
        self, optimizer: Optimizer, plan: Plan, gradients: StepGradients, groups: Groups, rank: int, watch: Watch
    ) -> None:
        self.optimizer, self.plan, self.gradients = optimizer, plan, gradients
        self.groups, self.rank, self.watch = groups, rank, watch
        self.params: dict[str, Tensor] = {t.name: plan.bound[t.name].param for t in plan.owned.tasks}
        self.fragments: dict[tuple[str, str], Tensor | Stored] = {}
        self.residents: dict[tuple[str, str], Tensor | Stored] = {}
        self.initialised: set[str] = set()

    # -- lookups of programs and eager steps ---------------------------------------------------------

    def fragment(self, role: Role, leaf: str, task: str) -> Tensor | Stored:
        """Return this rank's fragment of a task's parameter, gradient or state leaf."""
        if role is Role.STATE:
            return self.fragments[task, leaf]
        if role is Role.GRAD:
            return self.gradients.found[task]
        param = self.params[task]
        return unwrapped(param._local_tensor if isinstance(param, DTensor) else param)

    def resident(self, leaf: str, task: str) -> Tensor | Stored:
        """Return a whole state tensor of a task that this rank owns."""
        return self.residents[task, leaf]

    def eager_state(self, task: str) -> dict[str, Any]:
        """Return the state that an eager step of a task reads and writes.

        Returns:
            A new dict for the first step of a compiled task; the task's own state if every step is eager.
        """
        bound = self.plan.bound[task]
        return self.optimizer.state[bound.param] if bound.kind.recorder is None else {}

    # -- creation ------------------------------------------------------------------------------------

    def leaves(self, task: str) -> tuple[Leaf, ...]:
        """Return the tensor leaves of a task's state."""
        return self.plan.leaves(task)

    def is_resident(self, leaf: Leaf, task: str) -> bool:
        """Tell whether the owner of a task holds the whole tensor of a leaf."""
        return leaf.name in self.plan.placed(task).resident

    def owns(self, task: Task) -> bool:
        """Tell whether this rank computes a task."""
        return task.computes_on(task.layout.grid.find(self.rank))

    @contextlib.contextmanager
    def first_steps(self, names: Sequence[str]) -> Iterator[None]:
        """Run the first step of some tasks inside this context; on exit put their state into `optimizer.state`."""
        for name in names:
            self.allocate(name)
        yield
        for name in names:
            self.install(name)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the state of tasks, which their next step creates again."""
        gone = set(names)
        self.initialised -= gone
        self.fragments = {key: value for key, value in self.fragments.items() if key[0] not in gone}
        self.residents = {key: value for key, value in self.residents.items() if key[0] not in gone}

    def allocate(self, name: str) -> None:
        """Allocate the tensors that hold a task's state after its first step."""
        task, param = self.plan.owned.task(name), self.params[name]
        for leaf in self.leaves(name):
            if not self.is_resident(leaf, name):
                shape = self._fragment_shape(task, leaf)
                part = leaf if shape == leaf.shape else replace(leaf, shape=shape, stride=None)
                self.fragments[name, leaf.name] = kept(leaf, part.blank(param.device))
            elif self.owns(task):
                self.residents[name, leaf.name] = kept(leaf, leaf.blank(param.device))

    def _box(self, task: Task) -> Box:
        """The region of a task's matrix that this rank holds."""
        return task.layout.boxes[task.layout.grid.find(self.rank)[1]]

    def _fragment_shape(self, task: Task, leaf: Leaf) -> Shape:
        return self._box(task).size if leaf.shape == task.shape else leaf.shape

    def install(self, name: str) -> None:
        """Put a task's state into `optimizer.state`, in the containers that the plain optimizer uses."""
        bound = self.plan.bound[name]
        kind, state = bound.kind, self.optimizer.state[bound.param]
        found: dict[str, Any] = dict(kind.python_state)
        for leaf in self.leaves(name):
            if (name, leaf.name) in self.fragments:
                found[leaf.name] = shown(self.fragments[name, leaf.name], bound, leaf)
            elif (name, leaf.name) in self.residents:
                found[leaf.name] = self.residents[name, leaf.name]
            else:
                found[leaf.name] = None
        state.update(empty_containers(kind.structure))
        for leaf_name, path in kind.paths.items():
            if leaf_name in found:
                write(state, path, found[leaf_name], kind.structure)
        self.initialised.add(name)

    def interpreted(self, names: Iterable[str]) -> None:
        """Note that tasks have stepped. Those that are interpreted have state now; every rank must know that."""
        for name in names:
            bound = self.plan.bound[name]
            if bound.kind.recorder is None:
                self.initialised.add(name)
                self.optimizer.state.setdefault(bound.param, {})

    def symmetric(self) -> frozenset[tuple[str, str]]:
        """Find the resident state that is symmetric now, bit by bit, in all tasks that this rank owns.

        This reads values and makes the host wait, so call it when programs are made and not on every step.
        """
        equal: dict[tuple[str, str], bool] = {}
        for (name, leaf), held in self.residents.items():
            value = opened(held)
            template = self.plan.placed(name).template
            key = template.family or template.name, leaf
            square = value.ndim >= 2 and value.shape[-1] == value.shape[-2]
            equal[key] = equal.get(key, True) and square and torch.equal(value, value.mT)
        return frozenset(key for key, always in equal.items() if always)

    # -- portable state ------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take over portable state from `optimizer.state`. A plain optimizer, a checkpoint or an old plan left it.

        This is a collective if leaves are resident. Every rank must hold the same leaves.
        """
        self._take_apart()
        for task in self.plan.owned.tasks:
            param = self.params[task.name]
            if param not in self.optimizer.state or not self.optimizer.state[param]:
                continue
            self.initialised.add(task.name)
            if self.plan.bound[task.name].kind.recorder is None:
                self._adopt_objects(task, self.optimizer.state[param])
                self.optimizer.state[param] = self.stored(task.name, self.optimizer.state[param])
                continue
            for leaf in self.leaves(task.name):
                self._adopt(task, leaf, self.optimizer.state[param])
        for bound in self.plan.elementwise:
            if isinstance(bound.param, DTensor):
                self._adopt_elementwise(bound)
            if state := self.optimizer.state.get(bound.param):
                self.optimizer.state[bound.param] = self.stored(bound.task.name, state)

    def _adopt_elementwise(self, bound: BoundParam) -> None:
        """Turn whole tensors in the state of a DTensor into DTensors, as the optimizer's own step needs them."""
        param, state = bound.param, self.optimizer.state.get(bound.param) or {}
        structure = structure_of(state)
        for path in paths_of(state).values():
            value = read(state, path)
            if isinstance(value, Tensor) and value.shape == param.shape != () and not isinstance(value, DTensor):
                own = held_part(value, param, self._box(bound.task))
                write(state, path, laid_out_like(own, param), structure)

    def _adopt_objects(self, task: Task, state: dict[str, Any]) -> None:
        """Gather the leaves that are DTensors, because the owner's eager step takes whole tensors."""
        structure = structure_of(state)
        for name, path in paths_of(state).items():
            value = read(state, path)
            if not isinstance(value, DTensor):
                continue
            whole = self.whole(task, name, value)
            if self.owns(task):
                write(state, path, whole, structure)
        if not self.owns(task):
            state.update(structure)

    def _adopt(self, task: Task, leaf: Leaf, state: dict[str, Any]) -> None:
        path, structure = self.plan.bound[task.name].kind.paths[leaf.name], self.plan.bound[task.name].kind.structure
        value = read(state, path)
        if value is None:
            raise CanzonaError(
                f"the state of the parameter lacks {leaf.name!r}",
                at=task.name,
                hint="load a checkpoint of this optimizer",
            )
        param, key = self.params[task.name], (task.name, leaf.name)
        value = self._own_entries(self.plan.bound[task.name], leaf, value)
        if not self.is_resident(leaf, task.name):
            local = self._own_fragment(task, leaf, value, param)
            held = self.fragments[key] = kept(leaf, local)
            write(state, path, shown(held, self.plan.bound[task.name], leaf), structure)
            return
        whole = strided_like(leaf, self.whole(task, leaf.name, value, leaf.shape))
        if self.owns(task):
            held = self.residents[key] = kept(leaf, whole)
            write(state, path, held, structure)
        else:
            write(state, path, None, structure)

    def _own_entries(self, bound: BoundParam, leaf: Leaf, value: Tensor) -> Tensor:
        """What this rank's entries of a stack have of a whole leaf, as an unwrapped optimizer has it."""
        stack = bound.param if bound.division is None else bound.division.source
        entries = bound.stacked and bound.spec.part and value.shape[:1] == stack.shape[:1] != leaf.shape[:1]
        if not entries or isinstance(value, DTensor) or not isinstance(stack, DTensor):
            return value
        layout = dtensor_layout(stack, self.rank)
        first = layout.boxes[layout.grid.find(self.rank)[1]].start[0]
        return value[first : first + leaf.shape[0]].clone(memory_format=torch.preserve_format)

    def _own_fragment(self, task: Task, leaf: Leaf, value: Tensor, param: Tensor) -> Tensor:
        expected = self._fragment_shape(task, leaf)
        whole = bool(leaf.shape) and tuple(value.shape) == task.shape == leaf.shape
        if isinstance(value, DTensor) and leaf.shape != task.shape:  # what each entry of a stack has
            value = local_part(value)
        elif isinstance(param, DTensor) and (whole or isinstance(value, DTensor)):
            value = held_part(value, param, self._box(task))
        if tuple(value.shape) != expected:
            raise CanzonaError(
                f"state {leaf.name!r} has shape {list(value.shape)}, but this rank's shard has {list(expected)}",
                at=task.name,
                hint="load a checkpoint with the same sharding, or load with torch.distributed.checkpoint",
            )
        return value.to(leaf.dtype)

    def whole(self, task: Task, leaf: str, value: Tensor, shape: Shape | None = None) -> Tensor:
        """Gather the whole tensor of a leaf from portable state, on every rank of this rank's replica."""
        return whole_leaf(task, leaf, value, self.groups, self.rank, self.watch, shape)

    def portable(self, task: Task) -> dict[str, Any]:
        """Return a task's state as the unwrapped optimizer would hold it. A collective if leaves are resident."""
        bound = self.plan.bound[task.name]
        state: dict[str, Any] = self.optimizer.state.get(bound.param, {})
        if bound.kind.recorder is None:
            return self._from_owner(task, state)
        kind = bound.kind
        merged: dict[str, Any] = {}
        resident = {leaf.name: leaf for leaf in self.leaves(task.name) if self.is_resident(leaf, task.name)}
        for name, path in kind.paths.items():
            if name in resident and task.name in self.initialised:
                write(merged, path, self._distribute(task, resident[name], bound), kind.structure)
            elif isinstance(value := read(state, path), Stored):
                (leaf,) = (own for own in self.leaves(task.name) if own.name == name)
                write(merged, path, like_param(value.open(), bound, leaf), kind.structure)
            elif value is not None or name in kind.python_state:
                write(merged, path, value, kind.structure)
        return {**merged, **{k: v for k, v in state.items() if k not in merged}}

    def _distribute(self, task: Task, leaf: Leaf, bound: BoundParam) -> Tensor:
        grid = task.layout.grid
        held = self.residents.get((task.name, leaf.name))
        whole = None if held is None else opened(held)
        if grid.size > 1 and task.owner is not None:
            if whole is None:
                whole = leaf.blank(bound.param.device)
            source = grid.ranks[task.owner[0]][task.owner[1]]
            self.watch.wait(dist.broadcast(whole, source, group=self.groups.of(grid.members()), async_op=True))
        assert whole is not None
        if not isinstance(bound.param, DTensor) or leaf.shape != task.shape:
            return like_param(whole.clone(), bound, leaf)
        part = whole[self._box(task).slices()]  # cloned below: a view would keep the whole tensor alive
        return like_param(part.clone(memory_format=torch.contiguous_format), bound, leaf)

    def _from_owner(self, task: Task, state: dict[str, Any]) -> dict[str, Any]:
        """Broadcast the state of an interpreted task from its owner. The state may hold any Python object."""
        grid = task.layout.grid
        if grid.size == 1 or task.owner is None:
            return portable_of(self.unstored(task.name, state))
        refused: CanzonaError | None = None
        known = state
        try:
            state = portable_of(self.unstored(task.name, state))
        except CanzonaError as error:  # the others wait for what is sent, so they get the error in its place
            refused = error
        source = grid.ranks[task.owner[0]][task.owner[1]]
        group, device = self.groups.of(grid.members()), self.params[task.name].device
        given = (refused.problem, refused.at, refused.hint) if refused is not None else state
        found: tuple[str, str, str] | dict[str, Any] = send_values(given, source, group, device, self.watch)
        if isinstance(found, tuple):
            problem, at, hint = found
            raise CanzonaError(problem, at=at, hint=hint) from refused
        if not self.owns(task):
            known.update(structure_of(found))  # the load of a checkpoint looks here for its keys
        return found

    def cleared(self, task: Task) -> bool:
        """Tell whether a user cleared the state of a task, which the next step will find."""
        bound = self.plan.bound[task.name]
        return bound.kind.recorder is not None and not self.optimizer.state.get(bound.param)

    def release(self) -> None:
        """Put portable state into `optimizer.state`, for the next plan. A collective if leaves are resident."""
        for task in self.plan.owned.tasks:
            if task.name in self.initialised and not self.cleared(task) and (state := self.portable(task)):
                self.optimizer.state[self.params[task.name]] = state
        for bound in self.plan.elementwise:
            if own := self.optimizer.state.get(bound.param):
                self.optimizer.state[bound.param] = self.unstored(bound.task.name, own)
        self._put_together()

    # -- in another dtype, or in host memory ---------------------------------------------------------

    def stored(self, task: str, state: dict[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return state that no program works on, as it is stored between steps.

        Args:
            before: what it was before the step, whose memory serves again.
        """
        if self.plan.rules is None:
            return state
        storage_of = self.plan.storages(task)
        known = {} if before is None else {keys_of(path): own for path, own in leaves_with_paths(before)}
        leaves = storable_leaves(state)

        def held(path: Any, value: Any) -> Any:
            if (own := leaves.get(keys_of(path))) is None:
                return value
            name, local = own
            old = known.get(keys_of(path))
            if isinstance(old, Stored) and (old.shape, old.dtype) == (tuple(local.shape), local.dtype):
                old.close(local)
                return old
            storage = storage_of(name, local.dtype)
            return value if storage is None else Stored(storage, local, isinstance(value, DTensor))

        found: dict[str, Any] = pytree.tree_map_with_path(held, dict(state))
        return found

    def unstored(self, task: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state that a step sees: its leaves have their own dtype and device."""
        if self.plan.rules is None:
            return state
        param = self.plan.bound[task].param

        def seen(value: Any) -> Any:
            if not isinstance(value, Stored):
                return value
            return laid_out_like(value.open(), param) if value.laid else value.open()

        found: dict[str, Any] = pytree.tree_map(seen, dict(state))
        return found

    # -- through views -------------------------------------------------------------------------------

    def _take_apart(self) -> None:
        """Put the state of sources under what views show of them."""
        states = self.optimizer.state
        for view in self.plan.views:
            if state := states.pop(view.source, None):
                states.update(zip(view.params, view.state_in(state), strict=True))

    def _put_together(self) -> None:
        """Put the state of what views show under their sources. This is a collective if leaves are gathered."""

        def whole_of(task: str, leaf: str, value: DTensor) -> Tensor:
            return self.whole(self.plan.owned.task(task), leaf, value)

        for view in reversed(self.plan.views):
            states = [self.optimizer.state.pop(param, {}) for param in view.params]
            if any(states):
                self.optimizer.state[view.source] = view.state_out(states, whole_of)


@contextlib.contextmanager
def restoring(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer, on exit, the entries of `state` that it has now."""
    own = dict(optimizer.state)
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(own)


def put(held: dict[str, Any], new: dict[str, Any]) -> None:
    """Give a dict of the state, which users may hold, new content."""
    held.clear()
    held.update(new)


def kept(leaf: Leaf, value: Tensor) -> Tensor | Stored:
    """Return a leaf as it is stored between steps."""
    return value if leaf.stored is None else Stored(leaf.stored, value)


def shown(held: Tensor | Stored, bound: BoundParam, leaf: Leaf) -> Tensor | Stored:
    """Return what `optimizer.state` shows of a fragment."""
    return held if isinstance(held, Stored) else like_param(held, bound, leaf)


def strided_like(leaf: Leaf, whole: Tensor) -> Tensor:
    """Return a whole tensor with the strides of a leaf, which the ranks that receive it from its owner expect."""
    same = whole.is_contiguous() if leaf.stride is None else whole.stride() == leaf.stride
    return whole if same else leaf.blank(whole.device).copy_(whole)


def like_param(local: Tensor, bound: BoundParam, leaf: Leaf) -> Tensor:
    """Return what this rank has of a leaf of a parameter's state, as a DTensor where the parameter is one.

    If the leaf has another shape, it is one only where the parameter is a stack whose entries ranks hold: it is cut
    along the entries as well.
    """
    param, task = bound.param, bound.task
    if leaf.shape == task.shape or not isinstance(param, DTensor):
        return laid_out_like(local, param, stride=leaf.stride) if leaf.shape else local
    entries = bound.stacked and bound.spec.part and leaf.name not in (bound.kind.shared or ())
    return laid_out_by_entries(local, param) if entries and leaf.shape[:1] == task.shape[:1] else local


def whole_leaf(
    task: Task, leaf: str, value: Tensor, groups: Groups, rank: int, watch: Watch, shape: Shape | None = None
) -> Tensor:
    """Gather the whole tensor of a leaf from portable state, on every rank of this rank's replica.

    This is a collective if the leaf is a DTensor and the replica has several ranks. A class that is made of several
    tensors, such as codes and scales of low-bit state, puts its fragments together itself, as `full_tensor` asks it to:
    only it knows which elements belong to which scale.

    Args:
        task: the task whose state it belongs to; its layout says where the fragments lie.
        shape: of the whole tensor; None for that of `value`.
    """
    shape = tuple(value.shape) if shape is None else shape
    if not isinstance(value, DTensor):
        if tuple(value.shape) != shape:
            raise CanzonaError(f"state {leaf!r} is {list(value.shape)}, expected {list(shape)}", at=task.name)
        return unwrapped(value)
    grid, layout = task.layout.grid, task.layout
    if tuple(value._local_tensor.shape) == shape != layout.shape:  # what each entry of a stack has
        return local_part(value)
    if len(shape) > 2 and shape == tuple(value.shape) and shape[1:] == layout.shape[1:]:  # some entries of a stack
        shape = layout.shape
    r, _ = grid.find(rank)
    peers = grid.shard_peers(r)
    local = local_part(value).contiguous()
    if len(peers) == 1:
        return local.reshape(shape)
    boxes = [layout.boxes[s].of(shape) for s in peers]
    if inner_tensors(local):
        return put_together(value, leaf, task)
    group = groups.of(tuple(grid.ranks[r][s] for s in peers))
    received = torch.empty(sum(b.numel for b in boxes), dtype=local.dtype, device=local.device)
    sent = local.flatten().repeat(len(peers))
    sizes = [b.numel for b in boxes]
    sent_sizes = [local.numel()] * len(peers)
    watch.wait(dist.all_to_all_single(received, sent, sizes, sent_sizes, group=group, async_op=True))
    whole = torch.empty(shape, dtype=local.dtype, device=local.device)
    for box, part in zip(boxes, received.split(sizes), strict=True):
        whole[box.slices()] = part.view(box.size)
    return whole


def put_together(value: DTensor, leaf: str, task: Task) -> Tensor:
    """Gather a leaf whose fragments are made of several tensors."""
    try:
        whole = value.full_tensor()
        for name in inner_tensors(whole):
            # This waits for the collective and makes the inner tensors plain.
            setattr(whole, name, getattr(whole, name).clone())
    except Exception as error:  # whatever the class raises, on all ranks, as they hold equal shapes
        raise apart(leaf, value, first_line(error), task.name) from error
    return whole


def check_gathers(layout: Layout, state: Mapping[str, Any]) -> None:
    """Refuse state that ranks could not put together, before a rank waits for the others."""
    shapes = dict.fromkeys(str(list(box.size)) for box in layout.boxes)
    for name, value in state.items():
        if len(shapes) > 1 and isinstance(value, DTensor) and hasattr(value._local_tensor, "__tensor_flatten__"):
            raise apart(name, value, f"their shapes differ: {some(shapes)}")


def apart(leaf: str, value: DTensor, why: str, at: str | None = None) -> CanzonaError:
    """Make the error for fragments of a leaf that cannot be put together."""
    kind = type(value._local_tensor).__name__
    return CanzonaError(
        f"the fragments of state {leaf!r}, of class {kind}, cannot be put together: {why}",
        at=at,
        hint="call wrap before the first step, so that owners create this state whole",
    )
