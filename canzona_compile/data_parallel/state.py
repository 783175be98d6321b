"""The state of an optimizer under ZeRO-1: whole on every rank for checkpoints, in parts on owners for steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.torch_private import pytree
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.data_parallel.fragment import Fragment
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import BucketSlice
from canzona_compile.ir.layout import laid_out_by_entries
from canzona_compile.ir.program_ops import Watch
from canzona_compile.runtime.send_values import send_values
from canzona_compile.tensors import local_part
from canzona_compile.views.entries import cut_along_experts
from canzona_compile.views.view import State, WholeOf


class Unlaid(NamedTuple):
    """What a rank holds of a DTensor in the state. The DTensor itself belongs to the mesh of its rank.

    Attributes:
        alike: whether it is laid out like its part, and not along the entries of a stack alone.
    """

    local: Tensor
    alike: bool


class Removed(dict[Any, Any]):
    """What users get of state that they remove: this rank may hold none of it."""

    def __missing__(self, key: Any) -> Any:
        raise CanzonaError(
            "state that was removed cannot be read here, because owners held it",
            hint="call optimizer.state_dict() on all ranks before that",
        )


class OwnedState(defaultdict[Any, Any]):
    """`optimizer.state` while a plan is in use: it holds the state of the doubles.

    Users may remove the state of a parameter, but not read it, because only its owners hold it.

    Attributes:
        with_user: whether users have it now, and no step and no checkpoint.
        removed: the names of the parameters whose state users removed.
    """

    def __init__(self, own: Mapping[Any, Any], names: Mapping[int, str]) -> None:
        super().__init__(dict, own)
        self._names, self.with_user, self.removed = names, False, set[str]()

    def changed(self) -> set[str]:
        """The names of the parameters whose state users removed. Raises if they replaced the state of one."""
        put = {self._names[i]: value for i, value in zip(map(id, self), self.values(), strict=True) if i in self._names}
        if replaced := [name for name, value in put.items() if value]:
            raise CanzonaError(
                "the state of the parameter was replaced, but its owners hold it",
                at=replaced[0],
                hint="change it in a state_dict(), and load that with load_state_dict() on all ranks",
            )
        return self.removed | put.keys()

    def __contains__(self, key: object) -> bool:
        elsewhere = self.with_user and id(key) in self._names and self._names[id(key)] not in self.removed
        return elsewhere or super().__contains__(key)

    def __missing__(self, key: Any) -> Any:
        if key in self:
            raise CanzonaError(
                "the state of the parameter cannot be read here, because its owners hold it",
                at=self._names[id(key)],
                hint="call optimizer.state_dict() on all ranks; optimizer.state.pop(param) on all ranks removes it",
            )
        return super().__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is get

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        if self.with_user and id(key) in self._names and key in self:
            self.removed.add(self._names[id(key)])
            default = (Removed(),)
        return super().pop(key, *default)

    __delitem__ = pop

    def popitem(self) -> Any:
        raise CanzonaError(
            "popitem() would remove the state of another parameter on each rank", hint="call optimizer.state.pop(param)"
        )

    def clear(self) -> None:
        self.removed |= {*self._names.values()} if self.with_user else set()
        super().clear()

    def __bool__(self) -> bool:
        return len(self) > 0 or (self.with_user and len(self.removed) < len(self._names))

    def __reduce__(self) -> Any:  # a copy is a dict like any other
        return defaultdict, (dict, dict(self))

    def copy(self) -> Any:
        return defaultdict(dict, self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other


def take_apart(optimizer: Optimizer, fragments: Sequence[Fragment]) -> None:
    """Replace portable state by the state of what this rank owns, under the doubles."""
    for fragment in fragments:
        state = optimizer.state.pop(fragment.param, None)
        if not state:
            continue
        division, stand_in = fragment.division, fragment.stand_in
        if division is not None and stand_in is not None:
            stand_in.whole_leaves = division.own_leaves(stand_in.lookalikes(state))
            (state,) = stand_in.state_in(state)
        optimizer.state.update(zip(fragment.doubles, fragment.view.state_in(state), strict=True))


def put_together(
    optimizer: Optimizer, fragments: Sequence[Fragment], group: DataParallelGroup, whole_of: WholeOf, watch: Watch
) -> None:
    """Replace the state of what this rank owns by the whole state of all parameters. This is a collective.

    `whole_of` gathers a leaf of a piece from the ranks that hold its fragments, see `ParamView.state_out`.
    """
    for fragment in fragments:
        own = {
            part: optimizer.state.pop(double, {}) for part, double in zip(fragment.owned, fragment.doubles, strict=True)
        }
        parts = [sent(own.get(part, {}), fragment, part, group, watch) for part in fragment.slices]
        if not any(parts):
            continue
        state = fragment.view.state_out(parts, whole_of)
        if fragment.division is not None and fragment.stand_in is not None:
            state = fragment.stand_in.state_out([state], whole_of)
        optimizer.state[fragment.param] = state


def sent(state: State, fragment: Fragment, part: BucketSlice, group: DataParallelGroup, watch: Watch) -> State:
    """Send a copy of the state of a slice from its owner to all ranks. This is a collective."""

    shown = fragment.parts[part.key]

    def bare(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = local_part(value).clone()
        alike = tuple(value.shape) == shown.shape or not cut_along_experts(fragment.view.source)
        return Unlaid(local, alike) if isinstance(value, DTensor) else local

    def laid(value: Any) -> Any:
        if not isinstance(value, Unlaid):
            return value
        if not value.alike:
            return laid_out_by_entries(value.local, fragment.view.source)
        return fragment.view.labelled(value.local, shown)

    found: Any = pytree.tree_map(bare, dict(state))
    if group.shard is not None:
        source = dist.get_process_group_ranks(group.shard)[part.owner]
        found = send_values(found, source, group.shard, fragment.param.device, watch)
    made: State = pytree.tree_map(laid, found, is_leaf=lambda value: isinstance(value, Unlaid))
    return made
