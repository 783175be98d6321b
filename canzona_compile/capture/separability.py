"""See whether a step at real sizes lets a value of one parameter reach another, which small ones may not show.

Parameters have no values, and memory has labels: the parameters behind what it holds. Code that reads a number on the
host gets one that is made up. What such a number leads to has no labels, so then the step is taken again with other
numbers of one parameter, and the calls for the others have to be the same.

The memory of a stack of matrices has labels for each entry, as far as `capture.batch_dim` can follow the stack's
dimension. A miniature that steps with other gradients would not do instead: a step may batch matrices of any size, and
clip only large ones together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.batch_dim import follow
from canzona_compile.capture.fake_twin import FakeTwin
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import FakeTensor, pytree
from canzona_compile.errors import UnsupportedOptimizer, some
from canzona_compile.rehearsal.batching import dependent_places
from canzona_compile.rehearsal.diagnosis import TOGETHER, broken
from canzona_compile.rehearsal.scenario import OTHER, Scenario
from canzona_compile.rehearsal.trial import take
from canzona_compile.replica.copies import CachedCalls
from canzona_compile.replica.external_counters import Counter
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.miniature import divisors_of, small_sizes
from canzona_compile.replica.outside import Outside
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.replica.raised import NoCollectives, Untraceable, name_of
from canzona_compile.replica.watch import by_identity
from canzona_compile.tensors import given_to, storage_of

MOST_ELEMENTS = 2**29  # of parameters that step with values at their real sizes: 2 GB in float32, and their state
MOST_PARAMETERS = 8
MOST_READS = 1000  # numbers on the host; code that waits for them to converge might not end
LIKELY = {"all", "isfinite"}  # operators that give True for most values
Parts = tuple[frozenset[int], ...]  # the labels of equal parts of a memory, one after the other
NO_LABELS: Parts = (frozenset(),)
aten = torch.ops.aten


def check_separable(optimizer: Optimizer, like: ParamExample, counters: Collection[Counter] | None = None) -> bool:
    """Step parameters that have no values, and check that no value of one reaches another.

    This takes no capture: values are labelled while the step runs as written. It is the step after the first one, as
    what creates state may look at all parameters, to see how many there are.

    Args:
        like: one of the parameters. There is another one like it, and others of its group.
        counters: what a rehearsal saw the step count outside of the state of parameters; None without a rehearsal.

    Returns:
        Whether the step could be followed. If not, only a rehearsal shows whether parameters are independent.
    """
    kind = plain_class(optimizer).__name__
    specs = sorted([like.spec, like.spec, *others_of(optimizer, like)], key=lambda spec: -math.prod(spec.shape))
    with Outside(optimizer, lambda v: "the optimizer" if v is optimizer else by_identity(v), (), CachedCalls()) as own:
        found = labelled(optimizer, like, specs)
        if found is None:
            return False
        twin, labels = found
        if places := own.changed():
            raise UnsupportedOptimizer(
                f"{kind}.step changes {some(places)}, outside of the optimizer, with parameters of the real sizes",
                hint=f"{broken(1)}: keep per-parameter data in self.state[param], and counters in attributes of the "
                "optimizer",
            )
        mixed = labels.mixed(twin)
        if mixed and (labels.reads or mixing(optimizer, like, [like.spec] * 2) is False):
            # Some stack parameters, or have scratch memory for all. A rehearsal has compared the bits of small ones.
            sizes = small_sizes((spec.shape for spec in specs), divisors_of(optimizer))
            small = [replace(spec, shape=tuple(sizes[n] for n in spec.shape)) for spec in specs]
            mixed = mixing(optimizer, like, small) is False
        mixed = mixed and reaches_others(optimizer, like)
        for source in (0, len(specs) - 1) if labels.reads else ():  # the largest one and the smallest one
            other = labelled(optimizer, like, specs, source)
            mixed |= other is not None and other[1].calls_without(source) != labels.calls_without(source)
    late = twin.counts.keys() - {*counters} if counters is not None else ()
    if mixed or late:
        reads = f", or on {some(map(str, late))}, which it changes for large ones only" if late else ""
        raise UnsupportedOptimizer(
            f"{kind} updates parameters together: the update of one depends on others{reads}",
            at=like.name,
            hint=f"{broken(2)}; {TOGETHER}",
        )
    return not labels.reads


def others_of(optimizer: Optimizer, like: ParamExample) -> list[ParameterSpec]:
    """The largest other kinds of parameters, with as many dims as one; two of each, if they are few."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.ndim == len(like.spec.shape)]
    params.sort(key=Tensor.numel, reverse=True)
    specs = dict.fromkeys(replace(ParameterSpec.of(p), device=like.spec.device) for p in params)
    return [spec for spec in [*specs] * 2 if spec != like.spec][: MOST_PARAMETERS - 2]


def labelled(
    optimizer: Optimizer, like: ParamExample, specs: Sequence[ParameterSpec], source: int | None = None
) -> tuple[FakeTwin, Labels] | None:
    """Take two steps of such parameters, the second one with labels. None if they need values.

    Args:
        source: the one of which other numbers are read than of the rest; None for none.
    """
    labels = Labels(source)
    with warnings.catch_warnings():  # nobody hears those of trials
        warnings.simplefilter("ignore")
        try:
            twin = FakeTwin(optimizer, like, with_numbers=False, specs=specs, mode=labels)
            for i, param in enumerate(twin.params):
                for tensor in held_by(twin, param):
                    labels.label(tensor, frozenset({i}))
            twin.attempt(lambda: twin.step_eagerly(labels))
        except Untraceable:
            return None
    return twin, labels


def mixing(optimizer: Optimizer, like: ParamExample, specs: Sequence[ParameterSpec]) -> bool | None:
    """Tell whether a value of one of these parameters reaches another. None if they need values."""
    found = labelled(optimizer, like, specs)
    return None if found is None else found[1].mixed(found[0])


def reaches_others(optimizer: Optimizer, like: ParamExample) -> bool:
    """Tell whether a gradient reaches another parameter among a few of real sizes, which step with values.

    Labels cannot be followed through everything that code does with stacks. There are up to three parameters of each
    shape that labels have seen, in several groups if they have it. If they are too large to try, the answer is yes.
    """
    shapes = list(dict.fromkeys(spec.shape for spec in (like.spec, *others_of(optimizer, like))))
    places = [(g, i, p) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])]
    alike = [[place for place in places if place[2].shape == shape] for shape in shapes]
    own = [place for found in alike for place in (*found[:2], *found[2:][-1:])]
    if not own or any(p.is_meta for *_, p in own) or sum(p.numel() for *_, p in own) > MOST_ELEMENTS:
        return True
    chosen = [sorted(i for g, i, _ in own if g == other) for other in range(len(optimizer.param_groups))]
    sizes = frozenset(n for shape in shapes for n in shape)
    for stateful in (False, True):
        scenario = Scenario(chosen, len(OTHER), counts=sizes, stateful=stateful)
        if len((plain := take(optimizer, scenario)).after) == scenario.steps:
            return bool(dependent_places(optimizer, scenario, plain))
    return True


def held_by(twin: FakeTwin, param: Tensor) -> Iterator[Tensor]:
    """Yield a parameter of a twin, its gradient and the tensors of its state."""
    leaves = (leaf for _, leaf in state_leaves(twin.twin.state.get(param, {})))
    yield from (value for value in (param, param.grad, *leaves) if isinstance(value, Tensor))


class Labels(NoCollectives):
    """Inside this mode, and a mode of fake tensors around it, memory has labels: the parameters behind its values.

    Args:
        source: the parameter of which other numbers are read than of the rest; None for none.

    Attributes:
        reads: how many numbers were read on the host that are not known.
        calls: the operators that were called for parameters, with the labels and the numbers that they were given.
    """

    def __init__(self, source: int | None) -> None:
        super().__init__()
        self.source, self.reads = source, 0
        self.calls: list[tuple[frozenset[int], str, list[Any]]] = []
        self._labels: dict[int, Parts] = {}  # by memory
        self._alive: list[Tensor] = []  # so that no other memory gets the address of a known one
        self._makers: dict[int, str] = {}  # by memory, the operator that wrote it last

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Return the labels of a tensor."""
        parts = self._labels.get(storage_of(tensor), NO_LABELS)
        return frozenset().union(*parts[reached(tensor, len(parts))])

    def label(self, tensor: Tensor, labels: frozenset[int], maker: str = "") -> None:
        """Label a tensor."""
        parts = [*self._labels.get(storage_of(tensor), NO_LABELS)]
        own = reached(tensor, len(parts))
        parts[own] = [labels] * len(parts[own])
        self._label_memory(tensor, tuple(parts), maker)

    def _label_memory(self, tensor: Tensor, parts: Parts, maker: str) -> None:
        self._labels[storage_of(tensor)], self._makers[storage_of(tensor)] = parts, maker
        self._alive.append(tensor)

    def mixed(self, twin: FakeTwin) -> bool:
        """Tell whether a value of one parameter reached another one."""
        return any(len(self.of(tensor)) > 1 for param in twin.params for tensor in held_by(twin, param))

    def calls_without(self, source: int) -> list[tuple[frozenset[int], str, list[Any]]]:
        """The calls for parameters but one."""
        return [call for call in self.calls if source not in call[0]]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check(func)
        name = name_of(func)
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._number(args[0])
        found = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        behind = frozenset[int]().union(*(self.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        if behind:
            self.calls.append((behind, name, [leaf for leaf in leaves if type(leaf) in (int, float)]))
        declared, given = func._schema.arguments, given_to(func, args, kwargs or {})
        fresh = [given.pop(a.name) for a in declared if a.is_out and fills_memory(given.get(a.name))]
        written = [given.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write]
        # Entry i of what a `_foreach_` operator gives depends on entries i alone.
        by_entry = "_foreach_" in str(func)
        count = max((len(v) for v in given.values() if by_entry and isinstance(v, list | tuple)), default=1)
        stack = self._stack(func, args, kwargs or {}, found) if len(behind) > 1 and not by_entry else None
        if stack is not None:
            self._label_memory(found, stack, name)
            return found
        if func.is_view:  # it has the labels of the memory that it shows
            return found
        for i in range(count):
            own = [self.of(tensor) for value in given.values() for tensor in entries(value, i, count)]
            for value in (found, *fresh, *written):
                for tensor in entries(value, i, count):
                    self.label(tensor, frozenset().union(*own), name)
        return found

    def _stack(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Parts | None:
        """The labels of each entry of a stack that an operator makes or writes; None if that does not hold entries."""
        if not isinstance(found, Tensor) or func.is_view:
            return None
        if func in (aten.stack.default, aten.cat.default):
            parts, dim = tuple(map(self.of, args[0])), (*args[1:], kwargs.get("dim", 0))[0]
            alike = len({one.shape for one in args[0]}) == 1
            return parts if alike and dim % found.ndim == 0 and found.is_contiguous() and fills_memory(found) else None
        graph, places = fx.Graph(), dict[fx.Node, int | None]()

        def operand(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            node = graph.placeholder("operand")
            node.meta["val"], places[node] = value, self._stacked_along(value)
            return node

        node = graph.call_function(func, *pytree.tree_map(operand, (args, kwargs)))
        node.meta["val"] = found
        if all(place is None for place in places.values()) or (dim := follow(node, places)) is None:
            return None
        count = found.shape[dim]
        if found.stride(dim) * count * found.itemsize != found.untyped_storage().nbytes():
            return None  # entries are not one after the other
        of_all = [self.of(n.meta["val"]) for n, place in places.items() if place is None]
        by_entry = [self._labels[storage_of(n.meta["val"])] for n, place in places.items() if place is not None]
        return tuple(frozenset().union(*of_all, *(parts[e] for parts in by_entry)) for e in range(count))

    def _stacked_along(self, tensor: Tensor) -> int | None:
        """The dim of a tensor along which the parts of its memory lie that have labels each; None if it has none."""
        count = len(self._labels.get(storage_of(tensor), NO_LABELS))
        size = tensor.untyped_storage().nbytes() // count // tensor.itemsize
        dims = [d for d in range(tensor.ndim) if (tensor.shape[d], tensor.stride(d)) == (count, size)]
        inside = sum((tensor.shape[d] - 1) * tensor.stride(d) for d in range(tensor.ndim) if d not in dims)
        return dims[0] if count > 1 and len(dims) == 1 and tensor.storage_offset() + inside < size else None

    def _number(self, tensor: Tensor) -> Any:
        """Make up the number that code reads of a tensor."""
        self.reads += 1
        if self.reads > MOST_READS:
            raise Untraceable(f"it reads more than {MOST_READS} numbers on the host")
        if tensor.dtype is torch.bool:
            return self._makers.get(storage_of(tensor)) in LIKELY
        return (1.5 if self.source in self.of(tensor) else 1.0) if tensor.is_floating_point() else 1


def reached(tensor: Tensor, parts: int) -> slice:
    """Those of some equal parts of its memory that a tensor reaches into."""
    size = tensor.untyped_storage().nbytes() // parts
    if parts == 1 or not tensor.numel():
        return slice(parts)
    begin = tensor.storage_offset() * tensor.itemsize
    end = begin + (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
    return slice(begin // size, -(-end // size))


def fills_memory(value: Any) -> bool:
    """Tell whether nothing is left of the memory of a tensor once it is written whole."""
    return isinstance(value, Tensor) and value.numel() * value.itemsize == value.untyped_storage().nbytes()


def entries(value: Any, i: int, count: int) -> Iterator[Tensor]:
    """Yield the tensors of an operand or a result that concern entry i of some."""
    own = value if isinstance(value, list | tuple) else [value]
    yield from (entry for entry in (own[i : i + 1] if len(own) == count else own) if isinstance(entry, Tensor))
