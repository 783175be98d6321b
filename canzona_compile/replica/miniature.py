"""A miniature of an optimizer: a deep copy in which every parameter is a tensor of a few elements.

Its step is the optimizer's own step on all parameters together, which costs little and changes nothing that is real.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import class_as_written, plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Leaf
from canzona_compile.replica.copies import Copies
from canzona_compile.replica.homes import HOOKS, copied_attributes, homes_of, hypers, odd_state
from canzona_compile.replica.snapshot import Snapshot, parameter_label
from canzona_compile.tensors import MARKS, local_part, made_of, user_attributes

BLOCKS = (8, 16, 32, 64)  # numbers that code may divide sizes by without holding them
LARGEST = 4096  # elements of tensors beside parameters that are copied as they are
LARGEST_NUMBER = 2**31  # of those that are no ids and no addresses
PLAIN = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device)
Chosen = Sequence[Sequence[int]]  # for each parameter group, the positions of some of its parameters


class Miniature:
    """A small copy of an optimizer.

    Sizes keep their order, and equal ones stay equal. Hyperparameters that are floats differ from group to group, so
    that code which reads those of another group does not give the same result by chance.

    Args:
        chosen: which of its parameters the copy holds. Groups of which it holds none are left out. Others are made
            small, too, where something that the optimizer holds may lead to them.
        stateful: whether they have state: small copies of that of the real ones. If not, they have none.
        counts: numbers that divide small sizes, see `small_sizes`.

    Attributes:
        optimizer: the copy, an object of the class that the user wrote.
        kept: objects of the real optimizer that it holds, too, see `copies`.
        calls: knows of the calls of cached functions that it holds.
        label: names its parameters and their ids, and the copy, for a `Snapshot`.
    """

    def __init__(
        self, optimizer: Optimizer, chosen: Chosen, stateful: bool = False, counts: Collection[int] = ()
    ) -> None:
        own, odd, groups = copied_attributes(optimizer), odd_state(optimizer), list(map(hypers, optimizer.param_groups))
        self.optimizer: Optimizer = object.__new__(class_as_written(plain_class(optimizer)))
        real = [p for group in optimizer.param_groups for p in group["params"]]
        sizes, on_params = small_sizes((p.shape for p in real), counts), [public(p) for p in real]
        own_params = [optimizer.param_groups[g]["params"][i] for g, places in enumerate(chosen) for i in places]
        if not stateful and not may_lead_to_tensors([own, groups, on_params, odd]):
            real = own_params
        stepping = set(map(id, own_params if counts else real))  # others need no memory; they may be large with counts
        small_of = {id(p): small(p, sizes, p.device if id(p) in stepping else "meta") for p in real}
        large = [*large_tensors(own), *(t for p in real for t in tensors_on(p))]
        blanks = [(tensor, blank(tensor, sizes)) for tensor in large]
        known = {id(p): id(small_of[id(p)]) for p in real}
        for param in real:
            known |= dict.fromkeys(addresses(param), small_of[id(param)].data_ptr())
        given = [(optimizer, self.optimizer), *((p, small_of[id(p)]) for p in real), *blanks]
        copies = Copies(given, known)  # with the optimizer, as methods kept as attributes step the copy
        for param in real:
            vars(small_of[id(param)]).update(copies.of(public(param)))
        vars(self.optimizer).update(copies.of(own))
        vars(self.optimizer).update({name: OrderedDict() for name in HOOKS})
        self.optimizer.param_groups = []
        self.params: list[nn.Parameter] = []
        scaled: dict[int, Tensor] = {}
        for g, (group, places) in enumerate(zip(optimizer.param_groups, chosen, strict=True)):
            if group["params"] and not places:
                continue  # code may take it for granted that a group has parameters
            params = [small_of[id(group["params"][i])] for i in places]
            hypers_of_group = {k: distinct(v, g, scaled) for k, v in copies.of(groups[g]).items()}
            if group.get("param_names"):
                hypers_of_group["param_names"] = [group["param_names"][i] for i in places]
            self.optimizer.param_groups.append({**hypers_of_group, "params": params})
            self.params += params
        state: defaultdict[Any, Any] = defaultdict(dict, copies.of(odd))
        self.optimizer.state = state
        for param in (p for p in real if stateful and id(p) in stepping):
            if own_state := optimizer.state.get(param):
                state[small_of[id(param)]] = small_state(own_state, sizes, copies)
        self.kept, self.calls = copies.kept, copies.calls
        self.label = parameter_label(self.optimizer)


def may_lead_to_tensors(value: Any) -> bool:
    """Tell whether a value may hold tensors, or tell them apart: whether it is more than containers of plain values."""
    if type(value) is int:
        return abs(value) > LARGEST_NUMBER
    if type(value) is dict:
        return any(may_lead_to_tensors(key) or may_lead_to_tensors(entry) for key, entry in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return any(map(may_lead_to_tensors, value))
    return type(value) not in PLAIN


def small_sizes(shapes: Iterable[Shape], counts: Collection[int] = ()) -> dict[int, int]:
    """Map all sizes to small ones: in the same order, different ones to different ones, 1 to 1.

    Args:
        counts: those of them that divide a size divide the small one, too, at least twice if they are not the size.
    """
    found: dict[int, int] = {0: 0, 1: 1}
    last = 1
    for k, size in enumerate(sorted({n for shape in shapes for n in shape if n > 1})):
        unit = math.lcm(*(n for n in counts if n > 0 and size % n == 0))
        least = max(4 + 2 * k, last + 1, 2 * unit if unit > 1 else 0)
        last = found[size] = min(size, -(-least // unit) * unit)
    return found


def divisors_of(optimizer: Optimizer) -> frozenset[int]:
    """Numbers that the code of an optimizer may divide sizes by.

    They are the integers that it holds, such as that of heads, the sum of each list or dict of them, such as the sizes
    of parts, and `BLOCKS`.
    """
    walk, sums = Snapshot(lambda value: "a tensor" if isinstance(value, Tensor) else None), defaultdict[str, int](int)
    for home, entries in homes_of(optimizer).items():
        walk.add_home(home, entries)
    walk.add("of parameters", [public(p) for group in optimizer.param_groups for p in group["params"]])
    numbers = {place: found[1] for place, found in walk.found.items() if found[0] == "int"}
    for place, number in numbers.items():
        if holder := place.rpartition("[")[0]:
            sums[holder] += number
    return frozenset((*numbers.values(), *sums.values(), *BLOCKS))


def small(param: Tensor, sizes: Mapping[int, int], device: torch.device | str) -> nn.Parameter:
    """Make a small parameter with the dtype and order of strides of a parameter."""
    shape = [sizes[n] for n in param.shape]
    made = torch.ones(shape, dtype=param.dtype, device=device)
    if not isinstance(param, DTensor) and not param.is_contiguous() and made.numel():
        strides = param.stride()
        order = sorted(range(param.ndim), key=lambda d: -strides[d])
        made = made.permute(order).contiguous().permute([order.index(d) for d in range(param.ndim)])
    own = nn.Parameter(made, requires_grad=param.requires_grad)
    if param.grad is not None and param.grad.dtype != param.dtype:
        own.grad_dtype = param.grad.dtype
    return own


def blank(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Make a small tensor for one that belongs to no parameter; sizes that no parameter has become small ones too."""
    made = torch.zeros([sizes.get(n, min(n, 4)) for n in tensor.shape], dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def small_state(state: Mapping[str, Any], sizes: Mapping[int, int], copies: Copies) -> dict[str, Any]:
    """Copy the state of a parameter: corners of its tensors, or zeros where this rank holds none.

    A `Leaf` in place of a tensor becomes random numbers between 0 and 1.
    """

    def small_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Leaf):
            return torch.rand([sizes.get(n, min(n, 4)) for n in leaf.shape or ()], device="cpu").to(leaf.dtype)
        if not isinstance(leaf, Tensor):
            return copies.of(leaf)
        shape = [sizes.get(n, min(n, 4)) for n in leaf.shape]
        part = local_part(leaf).detach()
        if any(n < m for n, m in zip(part.shape, shape, strict=True)):
            return torch.zeros(shape, dtype=leaf.dtype, device=part.device)
        return part[tuple(slice(n) for n in shape)].clone()

    made: dict[str, Any] = pytree.tree_map(small_leaf, dict(state))
    return made


def large_tensors(attributes: Mapping[str, Any]) -> list[Tensor]:
    """The large tensors and the DTensors that an optimizer holds in its attributes, also in modules."""
    leaves = pytree.tree_leaves(attributes)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    inside = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    found = [t for t in (*leaves, *inside) if isinstance(t, Tensor)]
    return [t for t in found if t.numel() > LARGEST or isinstance(t, DTensor)]


def tensors_on(param: Tensor) -> list[Tensor]:
    """The tensors that users attached to a parameter, such as `main_grad`."""
    return [t for t in pytree.tree_leaves(public(param)) if isinstance(t, Tensor)]


def public(param: Tensor) -> dict[str, Any]:
    """The attributes of a parameter that steps may read, without the objects of frameworks (names with underscores)."""
    hidden = {name: v for name, v in vars(param).items() if name.startswith("_") and isinstance(v, MARKS)}
    return hidden | user_attributes(param)


def addresses(param: Tensor) -> set[int]:
    """Where a parameter lies in memory, as its users may ask; 0 tells nothing."""
    found = {address for own in made_of(param) for address in (own.data_ptr(), own.untyped_storage().data_ptr())}
    with contextlib.suppress(RuntimeError):
        found.add(param.data_ptr())
    return found - {0}


def distinct(value: Any, group: int, scaled: dict[int, Tensor]) -> Any:
    """A hyperparameter of a group, a little different from that of other groups if it is a float.

    A tensor that several groups have stays one, and in attributes too.
    """
    if isinstance(value, float) and math.isfinite(value):
        return value / (1.0 + 0.03 * group)
    if isinstance(value, Tensor) and value.is_floating_point():
        return scaled.setdefault(id(value), value / (1.0 + 0.03 * group) if group else value)
    return value
