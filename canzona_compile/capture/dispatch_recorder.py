"""Capture by dispatch: the eager step of a fake twin, recorded operator by operator.

This sees through all that stops Dynamo: decorated nested functions, context managers that set precision, objects that
hold the preconditioners, `functools.partial`, dispatch by `isinstance`, compiled helpers. It gives the graph of one
concrete path, and the guard is to take the step again (`recording`). Numbers that ever differ become inputs of graphs.
So that this happens before the first plan, the step is also taken with other hyperparameters.

Branches on the values of tensors cannot be captured; neither can steps that catch the errors of operators.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from canzona_compile.capture.compiled_calls import (
    CompiledCallRecorder,
    CompiledEntry,
    CompiledPart,
    compiled_calls,
    own_calls,
    part_at,
    with_compiled_calls,
)
from canzona_compile.capture.graphs import RecordedGraph
from canzona_compile.capture.recorder import StepRecorder
from canzona_compile.capture.recording import CallPath, CallRecorder, RecordedCall, reads_precision
from canzona_compile.capture.variant import Answer, StepInputs, Variant
from canzona_compile.compat.torch_private import OpOverload, pytree
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.compiled_call import CompiledCall
from canzona_compile.ir.program_ops import ProductAt
from canzona_compile.rehearsal.operators import FILLS
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.raised import Untraceable, name_of
from canzona_compile.replica.twin import scratch_of
from canzona_compile.tensors import storage_of

MOST_PATHS = 64  # the most paths of one kind; code that never repeats itself is not worth a plan per step
PERTURBATION = 1 - 2.0**-7  # towards zero, because many hyperparameters must stay below one

NumberPlace = tuple[int, int]  # the index of a call in a path, and of a number among its numbers
PathKey = tuple[int, tuple[tuple[str, int], ...]]


@dataclass(eq=False, slots=True)
class TracedPath:
    """The graphs of one path through the step. Their inputs are the tensors that it reads, then its numbers.

    Attributes:
        inputs: the numbers that are inputs of its graphs, by place.
        returned: the tensors that the step puts in the place of others.
        own: the indices of the calls that the step itself makes, see `own_calls`.
    """

    calls: list[RecordedCall]
    inputs: list[NumberPlace]
    names: list[str]
    returned: tuple[Tensor, ...]
    tensors: list[Tensor] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    own: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.own = list(own_calls(self.calls))

    def find_inputs(self, known: Iterable[Tensor]) -> None:
        """Set `tensors`, given all of the twin's."""
        read = {id(leaf) for i in self.own for leaf in self.calls[i].leaves}
        self.tensors = list({id(tensor): tensor for tensor in known if id(tensor) in read}.values())

    @property
    def stale(self) -> bool:
        """Whether numbers have differed that are constants of the graphs."""
        return len(self.inputs) != sum(len(self.calls[i].varying) for i in self.own)


class DispatchRecorder(StepRecorder):
    """Captures by dispatch. The attributes are those of `StepRecorder`."""

    way: ClassVar[str] = "dispatch"
    with_numbers: ClassVar[bool] = False
    reads_counters: ClassVar[bool] = False

    def prepare(self) -> None:
        """Begin with a tree without calls."""
        self._root, self._paths = RecordedCall(), dict[PathKey, TracedPath]()

    def ask(self) -> Answer:
        """Take the step again, and find the path that it takes."""
        before = self.moment()
        walk = self._walk()
        replaced = self.replaced(before.leaves)
        key: PathKey = (id(walk.calls[-1]) if walk.calls else 0), tuple((n, id(new)) for n, _, new in replaced)
        path = self._paths.get(key)
        if path is None:
            if len(self._paths) == MOST_PATHS:
                raise Untraceable(f"its step takes more than {MOST_PATHS} paths")
            if not self.calls_compiled and self._begins_to_compile(before):
                return self.ask()
            self._vary(before)
        if path is None or path.stale:
            old = () if path is None else path.variants
            self.variants = [variant for variant in self.variants if variant not in old]
            path = self._paths[key] = self._path(walk, tuple(new for *_, new in replaced))
            now = self.moment()
            self.restore(before)  # so that inputs can be found by identity
            path.find_inputs(tensor for tensor, _ in self.tensors())
            self.restore(now)
        numbers = [walk.numbers[i][place] for i, place in path.inputs]
        values = {len(path.tensors) + i: value for i, value in enumerate(numbers)}

        def make() -> Variant:
            now = self.moment()
            self.restore(before)
            variant = self._trace(path, values)
            self.restore(now)
            return variant

        variant = self.variant_for(path.variants, values, make)
        return variant, dict(zip(path.names, numbers, strict=True)), path.returned

    # -- walks -------------------------------------------------------------------------------

    def _walk(self) -> CallPath:
        """Let the twin step, and record what it calls."""
        held = [(tensor, storage_of(tensor)) for tensor, _ in self.tensors()]
        grad = self.param.grad
        # Python's profiler, which sees calls of compiled functions, slows down code that makes none.
        recorder = (CompiledCallRecorder if self.calls_compiled else CallRecorder)(self._root, self.note)
        try:
            self.attempt(lambda: self.step_eagerly(recorder))
        finally:
            replaced, self.param.grad = self.param.grad is not grad, grad
        if replaced or any(storage_of(tensor) != place for tensor, place in held):
            raise Untraceable("its step replaces the gradient, or the memory of a tensor")
        recorder.walk.note_varying()
        return recorder.walk

    def _begins_to_compile(self, before: StepInputs) -> bool:
        """Take the step once more, and see whether it calls compiled functions, although the first step did not.

        If it does, they will be seen from now on, and the twin is as it was before.
        """
        self.restore(before)
        with compiled_calls() as calls:
            self._walk()
        self.calls_compiled = bool(calls)
        if calls:
            self.restore(before)
        return self.calls_compiled

    def _vary(self, before: StepInputs) -> None:
        """Find out which numbers depend on hyperparameters, by the same step with others."""
        now = self.moment()
        self.restore(before._replace(group=pytree.tree_map(perturbed, before.group)))
        with contextlib.suppress(Untraceable):  # the step may refuse such hyperparameters
            self._walk()
        self.restore(now)

    # -- graphs ------------------------------------------------------------------------------

    def _path(self, walk: CallPath, returned: tuple[Tensor, ...]) -> TracedPath:
        inputs = [(i, place) for i in own_calls(walk.calls) for place in sorted(walk.calls[i].varying)]
        return TracedPath(walk.calls, inputs, list(self._names(walk, inputs)), returned)

    def _names(self, walk: CallPath, inputs: list[NumberPlace]) -> Iterator[str]:
        """Name the numbers by the line that reads them, and by the hyperparameter of equal value if there is one."""
        taken = set[str]()
        own = {key: v for key, v in hypers(self.twin.param_groups[0]).items() if isinstance(v, float | int)}
        for i, place in inputs:
            value = walk.numbers[i][place]
            known = next((key for key, v in own.items() if v == value and key.isidentifier()), None)
            name = base = self.own_name(f"{known or 'number'}_at_{walk.calls[i].line}")
            same = 1
            while name in taken:
                same += 1
                name = f"{base}_{same}"
            taken.add(name)
            yield name

    def _trace(self, path: TracedPath, values: Mapping[int, Any]) -> Variant:
        """Make the functional graph of a path for the numbers by position."""
        own = {i: path.calls[i] for i in path.own}
        names = [f"t{i}" for i in range(len(path.tensors))] + path.names
        parts = {i: part_at(path.calls, i) for i, call in own.items() if isinstance(call.func, CompiledEntry)}
        check_written_first(path, scratch_of(self.twin).values())
        examples = [*path.tensors, *(torch.empty((), dtype=torch.float64, device="cpu") for _ in path.names)]
        examples += [tensor for part in parts.values() for tensor in part.examples]
        graph, baked = self.traced(
            recorded_module(path, parts, scratch_of(self.twin).values()), {}, examples, values, names
        )
        graph = with_compiled_calls(graph, list(parts.values()), len(path.returned), len(names))
        products = [call for i, call in own.items() if in_precision(parts[i].target if i in parts else call.func)]
        sources = [self.source(tensor, "") for tensor in path.tensors] + [("scalar", name) for name in path.names]
        return Variant.of(graph, sources, len(path.returned), baked, give_precisions(graph, products))


def recorded_module(
    path: TracedPath, parts: Mapping[int, CompiledPart], scratch: Iterable[Tensor] = ()
) -> fx.GraphModule:
    """Write the calls of a path as a graph, in order and with their writes.

    Args:
        parts: its calls of compiled functions, by index. What they give are the last inputs of the graph, and what they
            are given are its last outputs, see `with_compiled_calls`.
        scratch: of the twin. What is read of it was written before, in the path.
    """
    written = RecordedGraph("its step reads a tensor that is neither parameter, gradient nor state")
    for i, tensor in enumerate(path.tensors):
        written.stands_for(written.input(f"t{i}"), tensor)
    inputs = list(map(written.input, path.names))
    for index, part in parts.items():
        part.begin(written, index)
    read = {id(leaf) for i in path.own for leaf in path.calls[i].leaves}
    for tensor in (x for x in scratch if id(x) in read):
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        written.stands_for(written.graph.call_function(torch.ops.aten.full.default, ([], math.nan), options), tensor)
    numbers: dict[int, dict[int, fx.Node]] = defaultdict(dict)
    for (index, place), node in zip(path.inputs, inputs, strict=True):
        numbers[index][place] = written.graph.call_method("item", (node,))
    for index in own_calls(path.calls):
        call = path.calls[index]
        if index in parts:
            parts[index].write(written, call, numbers[index])
        else:
            written.call(call, numbers[index])
    if not all(map(written.knows, path.returned)):
        raise Untraceable("its step puts something in its state that no operator computes")
    given = [node for part in parts.values() for node in part.given.values()]
    written.graph.output((*map(written.node_of, path.returned), *given))
    return fx.GraphModule({}, written.graph)


def check_written_first(path: TracedPath, scratch: Iterable[Tensor]) -> None:
    """Refuse a path that reads scratch before it has written it: another parameter or an earlier step wrote that."""
    unwritten = {id(tensor) for tensor in scratch}
    for call in (path.calls[index] for index in own_calls(path.calls)):
        touched = [id(leaf) for leaf in call.leaves if id(leaf) in unwritten]
        fills = isinstance(call.func, OpOverload) and name_of(call.func) in FILLS
        if touched and not (fills and touched == [id(call.leaves[0])]):
            raise UnsupportedOptimizer(
                "its step reads a number that it keeps on itself before it writes it, so that one parameter or step "
                "may depend on another",
                hint="keep it in self.state[param], or write it before every use",
            )
        unwritten.difference_update(touched)


def give_precisions(graph: fx.Graph, calls: Iterable[RecordedCall]) -> str:
    """Make the products of a graph compute in the float32 matmul precisions that the step sets for them.

    Returns:
        The precision, if it is one for all; the graph then stays as it is. Empty if the step sets none or several.
    """
    wanted = [call.precision for call in calls]
    if len(set(wanted)) < 2:
        return next(iter(wanted), "")
    products = [node for node in graph.nodes if node.op == "call_function" and in_precision(node.target)]
    if len(products) != len(wanted):
        raise Untraceable("its step computes products in several float32 matmul precisions")
    for node, precision in zip(products, wanted, strict=True):
        if precision and isinstance(node.target, CompiledCall):
            node.target = replace(node.target, precision=precision)
        elif precision:
            node.target = ProductAt(node.target, precision)
    return ""


def in_precision(target: Any) -> bool:
    """Tell whether what a node calls reads the float32 matmul precision."""
    if isinstance(target, CompiledCall):
        return any(reads_precision(node.target) for node in target.body.nodes)
    return reads_precision(target)


def perturbed(value: Any) -> Any:
    """Return another number in the place of a float."""
    return value * PERTURBATION if isinstance(value, float) else value
