"""Capture by dispatch: the eager step of a fake twin, recorded operator by operator.

This sees through all that stops Dynamo: decorated nested functions, context managers that set precision, objects that
hold the preconditioners, `functools.partial`, dispatch by `isinstance`, compiled helpers. It gives the graph of one
concrete path, and the guard is to take the step again (`recording`). Numbers that ever differ become inputs of graphs.
So that this happens before the first plan, the step is also taken with other hyperparameters.

Branches on the values of tensors cannot be captured; neither can steps that catch the errors of operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from canzona_compile.capture.dynamo import eagerly, outside_modes
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.functional import functional
from canzona_compile.capture.oracle import MOST_CONSTANTS, Oracle, TwinMoment, matches, unlike
from canzona_compile.capture.recording import (
    CallPath,
    CallRecorder,
    RecordedCall,
    Unrecordable,
    is_constant,
    number_in,
    reads_precision,
)
from canzona_compile.capture.twin import hypers, step_plainly
from canzona_compile.capture.variant import Answer, Source, Untraceable, Variant
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.product_at import ProductAt

MOST_PATHS = 64  # the most paths of one kind; code that never repeats itself is not worth a plan per step
PERTURBATION = 1 - 2.0**-7  # towards zero, because many hyperparameters must stay below one

NumberPlace = tuple[int, int]  # the index of a call in a path, and of a number among its numbers
PathKey = tuple[int, tuple[tuple[int, str, int], ...]]


@dataclass(eq=False, slots=True)
class TracedPath:
    """The graphs of one path through the step.

    Attributes:
        calls: its calls.
        inputs: the numbers that are inputs of its graphs, by place.
        names: their names.
        variants: its graphs, which differ in constants.
        returned: the tensors that the step puts in the place of others.
        tensors: how many tensors of the twin its calls read. In graphs they come before the numbers.
    """

    calls: list[RecordedCall]
    inputs: list[NumberPlace]
    names: list[str]
    variants: list[Variant]
    returned: tuple[Tensor, ...]
    tensors: int = 0

    def at_positions(self, numbers: list[Any]) -> dict[int, Any]:
        """Return numbers by the position of the input that they are."""
        return {self.tensors + i: value for i, value in enumerate(numbers)}

    def variant_for(self, numbers: list[Any]) -> Variant | None:
        """Return the graph whose constants are these numbers; None if there is none yet."""
        values = self.at_positions(numbers)
        return next((variant for variant in self.variants if matches(variant, values)), None)

    @property
    def stale(self) -> bool:
        """Whether numbers have differed that are constants of the graphs."""
        return len(self.inputs) != sum(len(call.varying) for call in self.calls)


class DispatchOracle(Oracle):
    """Captures by dispatch. The attributes are those of `Oracle`."""

    way: ClassVar[str] = "dispatch"
    reads_counters: ClassVar[bool] = False

    def prepare(self) -> None:
        """Begin with a tree without calls."""
        self._root, self._known = RecordedCall(), dict[PathKey, TracedPath]()

    def ask(self) -> Answer:
        """Take the step again, and find the path that it takes."""
        before = self.moment()
        walk = self._walk()
        replaced = self.replaced(before.leaves)
        key: PathKey = (id(walk.calls[-1]) if walk.calls else 0), tuple((i, n, id(new)) for i, n, _, new in replaced)
        path = self._known.get(key)
        if path is None:
            if len(self._known) == MOST_PATHS:
                raise Untraceable(f"its step takes more than {MOST_PATHS} paths")
            self._vary(before)
        if path is None or path.stale:
            old = () if path is None else path.variants
            self.variants = [variant for variant in self.variants if variant not in old]
            path = self._known[key] = self._path(walk, tuple(new for *_, new in replaced))
        numbers = [walk.numbers[i][place] for i, place in path.inputs]
        variant = path.variant_for(numbers)
        if variant is None:
            now = self.moment()
            self.restore(before)  # so that inputs can be found by identity
            variant = self._trace(path, numbers)
            self.restore(now)
        return Answer(variant, dict(zip(path.names, numbers, strict=True)), path.returned)

    # -- walks -------------------------------------------------------------------------------

    def _walk(self) -> CallPath:
        """Let the twin step, and record what it calls."""
        held = [(tensor, storage(tensor)) for tensor, _ in self.tensors()]
        grads = [(param, param.grad) for param in self._params]
        recorder = CallRecorder(self._root)
        try:
            with outside_modes(), eagerly(), self._mode, recorder:
                step_plainly(self.twin)
        except CanzonaError:
            raise
        except Unrecordable as error:
            raise Untraceable(f"{error}{blamed(error)}") from error
        except Exception as error:
            raise Untraceable(f"its step needs tensor values: {first_line(error)}{blamed(error)}") from error
        finally:
            replaced = any(param.grad is not grad for param, grad in grads)
            for param, grad in grads:
                param.grad = grad
        if replaced or any(storage(tensor) != place for tensor, place in held):
            raise Untraceable("its step replaces the gradient, or the memory of a tensor")
        recorder.walk.note_varying()
        return recorder.walk

    def _vary(self, before: TwinMoment) -> None:
        """Find out which numbers depend on hyperparameters, by the same step with others."""
        now = self.moment()
        self.restore(before._replace(group=pytree.tree_map(perturbed, before.group)))
        with contextlib.suppress(Untraceable):  # the step may refuse such hyperparameters
            self._walk()
        self.restore(now)

    # -- graphs ------------------------------------------------------------------------------

    def _path(self, walk: CallPath, returned: tuple[Tensor, ...]) -> TracedPath:
        inputs = [(i, place) for i, call in enumerate(walk.calls) for place in sorted(call.varying)]
        return TracedPath(walk.calls, inputs, list(self._names(walk, inputs)), [], returned)

    def _names(self, walk: CallPath, inputs: list[NumberPlace]) -> Iterator[str]:
        """Name the numbers by the line that reads them, and by the hyperparameter of equal value if there is one."""
        tensors, taken = self.names_of_tensors(), set[str]()
        own = {key: v for key, v in hypers(self.twin.param_groups[0]).items() if isinstance(v, float | int)}
        for i, place in inputs:
            value = walk.numbers[i][place]
            known = next((key for key, v in own.items() if v == value and key.isidentifier()), None)
            name = base = unlike(f"{known or 'number'}_at_{walk.calls[i].line}", tensors)
            same = 1
            while name in taken:
                same += 1
                name = f"{base}_{same}"
            taken.add(name)
            yield name

    def _trace(self, path: TracedPath, numbers: list[Any]) -> Variant:
        """Make the functional graph of a path. Its inputs are the tensors that it reads, then its numbers."""
        if len(path.variants) == MOST_CONSTANTS:
            constants = ", ".join(sorted(self.bake))
            raise Untraceable(f"an operator asks for the value of {constants} at capture, and that changes")
        read = {id(leaf) for call in path.calls for leaf in call.leaves}
        tensors = list({id(tensor): tensor for tensor, _ in self.tensors() if id(tensor) in read}.values())
        path.tensors = len(tensors)
        values = path.at_positions(numbers)
        names = [f"t{i}" for i in range(len(tensors))] + path.names
        examples = [*tensors, *(torch.empty((), dtype=torch.float64) for _ in path.names)]
        module = recorded_module(path, tensors)
        known = [i for i, name in enumerate(names) if name in self.bake]
        graph, baked = functional(module, {}, examples, values, known)
        if any(n.op == "get_attr" for n in graph.nodes):
            raise Untraceable("its step makes tensors of several Python numbers")
        self.bake.update(names[i] for i in baked)
        sources: list[Source] = [self.source(t, "") for t in tensors]
        sources += [("scalar", name) for name in path.names]
        offset = len(path.returned)
        results = {source: offset + i for i, source in enumerate(sources)}
        variant = Variant(graph, tuple(sources), results, baked, give_precisions(graph, path.calls))
        path.variants.append(variant)
        self.variants.append(variant)
        return variant


def recorded_module(path: TracedPath, tensors: list[Tensor]) -> fx.GraphModule:
    """Write the calls of a path as a graph, in order and with their writes."""
    graph = fx.Graph()
    nodes: dict[int, Any] = {}
    for i, tensor in enumerate(tensors):
        nodes[id(tensor)] = graph.placeholder(f"t{i}")
        nodes[id(tensor)].meta["example_value"] = tensor
    numbers = {place: graph.placeholder(name) for place, name in zip(path.inputs, path.names, strict=True)}
    numbers = {place: graph.call_method("item", (node,)) for place, node in numbers.items()}

    def as_argument(index: int, leaf: Any, at: int) -> Any:
        call = path.calls[index]
        if at in call.numbers and (place := (index, call.numbers.index(at))) in numbers:
            return numbers[place]
        if isinstance(leaf, Tensor):
            if id(leaf) not in nodes:
                raise Untraceable("its step reads a tensor that is neither parameter, gradient nor state")
            return nodes[id(leaf)]
        return leaf

    for index, call in enumerate(path.calls):
        if call.func is torch.ops.aten.lift_fresh.default and is_constant(call.leaves[0]):
            constant = call.leaves[0]
            number = numbers.get((index, 0), number_in(constant))
            options = {"dtype": constant.dtype, "device": call.result.device}
            node = graph.call_function(torch.ops.aten.full.default, ([], number), options)
        else:
            at = -1

            def argument(value: Any, index: int = index) -> Any:
                nonlocal at
                at += 1
                if not isinstance(value, list | tuple):
                    return as_argument(index, value, at)
                entries = []
                for entry in value:
                    at += 1
                    entries.append(as_argument(index, entry, at))
                return entries

            args = tuple(argument(value) for value in call.args)
            kwargs = {name: argument(value) for name, value in call.kwargs.items()}
            node = graph.call_function(call.func, args, kwargs)
        name_results(graph, node, call.result, nodes)
    graph.output(tuple(returned_node(tensor, nodes) for tensor in path.returned))
    return fx.GraphModule({}, graph)


def name_results(graph: fx.Graph, node: fx.Node, result: Any, nodes: dict[int, Any]) -> None:
    """Remember which node gives which tensor. What writes to its operand gives that operand, which has a node."""
    if isinstance(result, Tensor):
        node.meta["example_value"] = result
        nodes.setdefault(id(result), node)
    elif isinstance(result, list | tuple):
        for i, entry in enumerate(result):
            item = graph.call_function(lambda values, i: values[i], (node, i))
            name_results(graph, item, entry, nodes)


def returned_node(tensor: Tensor, nodes: Mapping[int, Any]) -> Any:
    if id(tensor) not in nodes:
        raise Untraceable("its step puts something in its state that no operator computes")
    return nodes[id(tensor)]


def give_precisions(graph: fx.Graph, calls: list[RecordedCall]) -> str:
    """Make the products of a graph compute in the float32 matmul precisions that the step sets for them.

    Returns:
        The precision, if it is one for all; the graph then stays as it is. Empty if the step sets none or several.
    """
    wanted = [call.precision for call in calls if reads_precision(call.func)]
    if len(set(wanted)) < 2:
        return next(iter(wanted), "")
    products = [node for node in graph.nodes if node.op == "call_function" and reads_precision(node.target)]
    if len(products) != len(wanted):
        raise Untraceable("its step computes products in several float32 matmul precisions")
    for node, precision in zip(products, wanted, strict=True):
        if precision:
            node.target = ProductAt(node.target, precision)
    return ""


def perturbed(value: Any) -> Any:
    """Return another number in the place of a float."""
    return value * PERTURBATION if isinstance(value, float) else value


def storage(tensor: Tensor) -> int:
    """Return what tells apart the memory of two tensors."""
    return int(tensor.untyped_storage()._cdata)
