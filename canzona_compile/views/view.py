"""A view: parameters that stand for elements of another one, with their values, their gradient and their state.

The optimizer has a *source*; steps see *parts* of it, each as a parameter of its own. A source may be what another view
shows, so views compose: a plain fragment is shown as a DTensor, whose pieces are shown in turn. What all views have in
common is here. A kind of view says which parts there are, and which leaves of the state belong to which of them.

While a plan is in use, `optimizer.state` holds the state of a part under the parameter that is shown. Portable state is
held under the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Box, Shape, laid_out_like
from canzona_compile.replica.leaves import LeafPath, empty_containers, keys_of, paths_of, read, structure_of, write
from canzona_compile.tensors import local_part


@dataclass(frozen=True, eq=False, slots=True)
class Elements:
    """Some elements of a fragment, which is a tensor that one rank holds.

    Attributes:
        dim: the dimension that is cut; None if that is the flattened fragment, which must be contiguous then.
        entries: the entries as indices (int64); None if they are consecutive.
        inside: the first entry and the number of entries along dim 0 that are cut; None for all.
    """

    dim: int | None
    first: int
    length: int
    entries: Tensor | None = None
    inside: tuple[int, int] | None = None

    @classmethod
    def at(cls, dim: int, entries: Tensor, device: torch.device) -> Elements:
        """The entries at these indices along a dim, of fragments on a device."""
        first = int(entries[0]) if len(entries) else 0
        consecutive = torch.equal(entries, torch.arange(first, first + len(entries), device="cpu"))
        return cls(dim, first, len(entries), None if consecutive else entries.to(device))

    def of(self, values: Tensor) -> Tensor:
        """These elements of a fragment: as a view if that view is contiguous, else as a copy."""
        line, dim = self._line(values)
        if self.entries is not None:
            return line.index_select(dim, self.entries)
        return line.narrow(dim, self.first, self.length).contiguous()

    def place(self, values: Tensor) -> Tensor | None:
        """Where these elements are in a fragment, as a view of it; None if no view shows them."""
        if self.entries is not None:
            return None
        line, dim = self._line(values)
        return line.narrow(dim, self.first, self.length)

    def put(self, values: Tensor, own: Tensor) -> None:
        """Write these elements into a fragment, unless `own` is a view of that fragment.

        Args:
            own: the elements, in any shape.
        """
        if not own.numel() or shares_memory(own, values):
            return
        place = self.place(values)
        if place is not None:
            place.copy_(own.reshape(place.shape))
        elif self.entries is not None:
            line, dim = self._line(values)
            line.index_copy_(dim, self.entries, own.reshape(*line.shape[:dim], self.length, *line.shape[dim + 1 :]))

    def _line(self, values: Tensor) -> tuple[Tensor, int]:
        """A fragment, as far as it has to be flat, and the dim along which it is cut."""
        if self.inside is not None:
            values = values.narrow(0, *self.inside)
        return (values.view(-1), 0) if self.dim is None else (values, self.dim)


def shares_memory(part: Tensor, whole: Tensor) -> bool:
    """Tell whether two tensors have the same storage."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


State = dict[str, Any]
WholeOf = Callable[[str, str, DTensor], Tensor]  # takes the name of a part, of a leaf, and the leaf; gathers the leaf


@dataclass(frozen=True, eq=False, slots=True)
class ViewPart:
    """What a view shows as one parameter.

    Attributes:
        name: such as "layers.0.qkv.weight[q]".
        shape: of the whole tensor that the parameter stands for.
        elements: those of the source's fragment that this rank holds; None if that is all of them.
        key: begins the keys of the state that this part alone has; empty if there is no such state.
    """

    name: str
    shape: Shape
    elements: Elements | None = None
    key: str = ""

    def of(self, values: Tensor) -> Tensor:
        """Its elements of a fragment: as a view if that view is contiguous, else as a copy."""
        return values if self.elements is None else self.elements.of(values)

    def place(self, values: Tensor) -> Tensor | None:
        """Where its elements are in a fragment, as a view of it; None if no view shows them."""
        return values if self.elements is None else self.elements.place(values)

    def put(self, values: Tensor, own: Tensor) -> None:
        """Write its elements, in any shape, into a fragment, unless they are a view of that fragment."""
        if self.elements is not None:
            self.elements.put(values, own)
        elif not shares_memory(own, values):
            values.copy_(own.view(values.shape))


class ParamView:
    """Shows one parameter, the source, as others.

    Args:
        source: the parameter whose elements are shown.

    Attributes:
        params: these parameters. Each shares the memory of the source, unless its elements are not a contiguous view of
            that: then it is a copy.
        reuses: whether a DTensor that is a gradient serves again on the next step, which spares the host the making of
            another. The optimizer may not hold on to gradients then.
    """

    def __init__(self, name: str, source: Tensor, parts: Sequence[ViewPart], box: Box) -> None:
        self.name, self.source, self.parts, self.box = name, source, tuple(parts), box
        self.sharded = isinstance(source, DTensor)
        self.shown: tuple[ViewPart, ...] = ()
        self.params: tuple[torch.nn.Parameter, ...] = ()
        self._copies: list[tuple[ViewPart, Tensor]] = []
        self._grads: list[DTensor | None] = []
        self.reuses = False
        self._taken = False  # whether copies have values that the source may lack

    def show(self, parts: Sequence[ViewPart] | None = None) -> None:
        """Make the parameters of some parts.

        Args:
            parts: the parts; None for all of them.
        """
        self.shown = self.parts if parts is None else tuple(parts)
        values, needs_grad = local_part(self.source), self.source.requires_grad
        locals_ = [part.of(values) for part in self.shown]
        labelled = [self.labelled(own, part) for own, part in zip(locals_, self.shown, strict=True)]
        pairs = zip(self.shown, locals_, strict=True)
        self._copies = [(part, own) for part, own in pairs if own.numel() and not shares_memory(own, values)]
        self.params = tuple(torch.nn.Parameter(own, requires_grad=needs_grad) for own in labelled)
        self._grads = [None] * len(self.params)

    def labelled(self, local: Tensor, part: ViewPart) -> Tensor:
        """This rank's elements of a tensor like a part, as the tensor that the part is."""
        return laid_out_like(local, self.source, part.shape) if self.sharded else local

    # -- around a step -----------------------------------------------------------------------------

    def take(self) -> None:
        """Give the parts the current values and the gradient of the source."""
        if self._copies:
            self.take_values()
        grad = self.source.grad
        if grad is not None:
            own = local_part(grad)
            self.lend([part.of(own) for part in self.shown])
        else:
            self.lend(None)

    def take_values(self) -> None:
        """Give parts that are copies the current values of the source."""
        self._taken = True
        for part, own in self._copies:
            own.copy_(part.of(local_part(self.source)))

    def lend(self, grads: Sequence[Tensor] | None) -> None:
        """Give the parts gradients.

        Args:
            grads: for each of `params` the elements that this rank holds, in any shape; None if there is no gradient.
        """
        if grads is None:
            for param in self.params:
                param.grad = None
            return
        for i, (param, own) in enumerate(zip(self.params, grads, strict=True)):
            if own.dtype != param.dtype:
                param.grad_dtype = own.dtype
            shape = param._local_tensor.shape if isinstance(param, DTensor) else param.shape
            own = own if own.shape == shape else own.view(shape)
            known: Any = self._grads[i]
            if known is not None and known.dtype == own.dtype:
                known._local_tensor = own
                param.grad = known
                continue
            param.grad = laid_out_like(own, param)
            if self.reuses and isinstance(param.grad, DTensor):
                self._grads[i] = param.grad

    def give_back(self) -> None:
        """Write parts that are copies back to the source, and take the gradients of all parts away."""
        for param in self.params:
            param.grad = None
        for part, own in self._copies if self._taken else ():
            part.put(local_part(self.source), own)
        self._taken = False
        for grad in self._grads:
            if grad is not None:  # it would keep the memory of the gradient
                grad._local_tensor = grad._local_tensor.new_empty(0)

    # -- state -------------------------------------------------------------------------------------

    def state_in(self, state: Mapping[str, Any]) -> list[State]:
        """Turn portable state of the source into that of each part that is shown."""
        return [self._state_of(state, part) for part in self.shown]

    def _state_of(self, state: Mapping[str, Any], part: ViewPart) -> State:
        return rewritten(state, partial(self._leaf_of, part))

    def _leaf_of(self, part: ViewPart, path: LeafPath, value: Any) -> Any:
        """A leaf of a part from that of the source: its elements if it is laid out like the source, else a copy."""
        if not isinstance(value, Tensor):
            return value
        if not value.ndim:
            return value.clone()
        if value.shape != self.source.shape:
            raise CanzonaError(
                f"state {'.'.join(map(str, path))!r} of shape {list(value.shape)} cannot be split like its parameter",
                at=self.name,
                hint="wrap before the first step, and load checkpoints that were made with the same split=",
            )
        local = held_part(value, self.source, self.box).contiguous()
        own = part.of(local)
        return self.labelled(own.clone() if shares_memory(own, local) else own, part)

    def state_out(self, states: Sequence[State], whole_of: WholeOf) -> State:
        """Turn the portable states of all parts into that of the source, the inverse of `state_in`."""
        made: State = {}
        for leaf, path in {n: p for state in states for n, p in paths_of(state).items()}.items():
            held = [(p, s, read(s, path)) for p, s in zip(self.parts, states, strict=True) if path[0] in s]
            if self._joins([(part, value) for part, _, value in held]):
                local = torch.zeros_like(local_part(self.source), dtype=held[0][2].dtype)
                for part, _, value in held:
                    part.put(local, local_part(value))
                write(made, path, laid_out_like(local, self.source), structure_of(held[0][1]))
                continue
            for label, state, value in self._apart(leaf, held, whole_of):
                key = f"{label}.{path[0]}" if label else path[0]
                write(made, (key, *path[1:]), value, {key: structure_of(state)[path[0]]})
        for state in states:
            made = empty_containers(structure_of(state)) | made
        return made

    def _apart(
        self, leaf: str, held: Sequence[tuple[ViewPart, State, Any]], whole_of: WholeOf
    ) -> Iterator[tuple[str, State, Any]]:
        """Yield the leaves of parts that make up no leaf like the source, each with the label that its key begins with.

        Args:
            held: the parts that have the leaf, their states, and the leaf in it.
        """
        for part, state, value in held:
            fragment = isinstance(value, DTensor) and tuple(value.shape) == part.shape
            yield part.key, state, whole_of(part.name, leaf, value) if fragment else value

    def _joins(self, leaves: Sequence[tuple[ViewPart, Any]]) -> bool:
        """Tell whether leaves of parts, with their parts, make up one leaf of the source."""
        complete = len(leaves) == len(self.parts) or not self.parts[0].key
        return complete and all(
            isinstance(v, Tensor) and tuple(v.shape) == part.shape and isinstance(v, DTensor) == self.sharded
            for part, v in leaves
        )


def rewritten(state: Mapping[str, Any], rule: Callable[[LeafPath, Any], Any]) -> State:
    """Copy the containers of a state, with another value for each leaf."""
    found: State = pytree.tree_map_with_path(lambda path, value: rule(keys_of(path), value), dict(state))
    return found


def held_part(value: Tensor, param: Tensor, box: Box) -> Tensor:
    """What this rank holds of a tensor that is laid out like a parameter, or whole, as an unwrapped optimizer has it.

    This is a collective if the tensor has other placements than the parameter.

    Args:
        value: the tensor; it has the parameter's shape.
    """
    if not isinstance(param, DTensor):
        return local_part(value)
    if not isinstance(value, DTensor):  # a view would keep the whole tensor alive
        return value[box.slices()].clone(memory_format=torch.contiguous_format)
    if value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    return local_part(value)
