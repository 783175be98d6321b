"""Calls of functions that `torch.compile` returned: watched, recorded in a path, and put into its graph as nodes.

Such a function is a closure that holds the user's function and the settings of the compile. Python's profiler sees its
calls however code reaches it, also where it runs as written. In a path an entry and an exit enclose the operators that
it calls as written.

The graph is traced with inputs in the place of what these calls return, and with outputs for what they are given.
Then the calls are put between the two. So functionalization, which follows writes and views, never meets a compiled
function, and needs to know nothing of it.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.graphs import RecordedGraph
from canzona_compile.capture.recording import CallRecorder, RecordedCall, line_of, settings, surroundings
from canzona_compile.compat.optimizer_class import MADE_BY_TORCH
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.compiled_call import CompiledCall
from canzona_compile.ir.fx_utils import outputs, placeholders
from canzona_compile.replica.raised import WATCHES_STEPS, Note, Swallowed, Untraceable
from canzona_compile.tensors import given_to, storage_of
from canzona_compile.tensors import written_by as operands_written

USERS, SETTINGS = "fn", "self"  # what holds the user's function and the settings in it
CLONE = torch.ops.aten.clone.default
EXIT = "exit"  # stands in a path where a compiled function returns the tensors that are its arguments and results
# What a compiled function may be given beside tensors: what does not change, and prints the same on all ranks.
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


@contextlib.contextmanager
def compiled_calls() -> Iterator[list[CodeType]]:
    """List the calls of functions that `torch.compile` returned, other than by one another, also where they run as
    written."""
    found: list[CodeType] = []
    with watched_calls(lambda frame: found.append(frame.f_code), lambda _result, _returned: None):
        yield found


@contextlib.contextmanager
def watched_calls(begin: Callable[[FrameType], None], end: Callable[[Any, bool], None]) -> Iterator[None]:
    """Inside this context, learn of calls of functions that `torch.compile` returned. Both functions must not raise.

    Args:
        end: gets what that call returned, and whether it returned at all; if not, it raised.
    """
    before: Any = sys.getprofile()
    inside: FrameType | None = None

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal inside
        if event == "call" and inside is None and frame.f_code.co_qualname.startswith(MADE_BY_TORCH):
            inside = frame
            begin(frame)
        elif event == "return" and frame is inside:
            inside = None
            instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]  # a call that raises seems to return None
            end(argument, instruction.startswith("RETURN"))

    setattr(watch, WATCHES_STEPS, True)
    sys.setprofile(watch)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # a profiler in C, such as cProfile, which Python cannot call
            sys.setprofile(None)
            before.enable()


def compiled_function(frame: FrameType) -> tuple[str, Any] | None:
    """Find the function that was called in the module of the user's function, so that it can be called again.

    The frame of a call does not hold the function itself. A new one, of the same function, would compile apart from it.

    Returns:
        Its name and the function; None if the module has no name for it.
    """
    users = frame.f_locals[USERS]
    module, qualified = sys.modules.get(getattr(users, "__module__", "")), getattr(users, "__qualname__", "")
    own: Any = module
    for part in qualified.split("."):
        own = getattr(own, part, None)
    for name, value in ((qualified, own), *vars(module or object).items()):
        if is_called(value, frame):
            return f"{users.__module__}.{name}", value
    return None


def is_called(value: Any, frame: FrameType) -> bool:
    """Tell whether an object is the function whose call a frame is."""
    if not isinstance(value, FunctionType) or value.__code__ is not frame.f_code:
        return False
    held = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return all(held[name].cell_contents is frame.f_locals[name] for name in (USERS, SETTINGS))


# -- in a path -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledEntry:
    """Stands in a path where a compiled function is entered. Its arguments are the leaves of the function's arguments.

    Attributes:
        form: the containers of its positional and keyword arguments.
    """

    name: str
    function: Any
    form: pytree.TreeSpec


class CompiledCallRecorder(CallRecorder):
    """A `CallRecorder` in whose path calls of compiled functions get a beginning and an end."""

    def __init__(self, root: RecordedCall, note: Note) -> None:
        super().__init__(root, note)
        self._watch = watched_calls(self._begin, self._end)

    def __enter__(self) -> Any:
        self._around = surroundings()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._watch.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._watch.__exit__(None, None, None)
        super().__exit__(kind, error, trace)

    def _begin(self, frame: FrameType) -> None:
        """Record that a compiled function is entered; the operators that follow are those that it calls as written."""
        leaves, form = pytree.tree_flatten((frame.f_locals["args"], frame.f_locals["kwargs"]))
        called = compiled_function(frame)
        odd = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN]
        if owner := next((leaf for leaf in odd if isinstance(leaf, Optimizer)), None):
            return self.note.add(
                UnsupportedOptimizer(
                    f"{type(owner).__name__} compiles a function that takes the optimizer, so torch may compile it "
                    "again for copies of the optimizer, and that code may round differently",
                    hint="call a compiled method through self, or compile a function that takes only tensors and "
                    "numbers",
                )
            )
        if called is None:
            return self.note.add(Swallowed("its step calls a compiled function that its module does not name"))
        if odd:
            return self.note.add(Swallowed(f"its step gives a compiled function a {type(odd[0]).__name__}"))
        if settings() != self.ambient or surroundings() != self._around or torch.is_grad_enabled():
            return self.note.add(Swallowed("its step changes torch's settings for a compiled function"))
        func, precision = CompiledEntry(*called, form), self.own_precision()
        call = self.known(func, leaves, precision)
        if call is None:
            numbers = tuple(place for place, leaf in enumerate(leaves) if type(leaf) in (int, float))
            first, line = [leaves[place] for place in numbers], line_of(frame.f_back)
            call = RecordedCall(func, tuple(leaves), {}, leaves, numbers, first, set(), None, line, precision)
            self.here.next.append(call)
        return self.go(call, leaves)

    def _end(self, result: Any, returned: bool) -> None:
        """Record that the compiled function returns."""
        if not returned:
            self.note.add(Swallowed("its step catches the error of a compiled function"))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        call = self.known(EXIT, tensors, "")
        if call is None:
            call = RecordedCall(EXIT, tuple(tensors), {}, tensors, result=tuple(tensors))
            self.here.next.append(call)
        self.go(call, tensors)


# -- in a graph ----------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class CompiledPart:
    """The call of a compiled function in a path.

    Attributes:
        new: the tensors that it returns, as far as they are not among these.
        made: inputs of the graph that is traced, in the place of what the call gives.
        given: outputs of that graph, by the leaves that they are; leaves that are constants have none.
    """

    target: CompiledCall
    leaves: list[Any]
    tensors: list[Tensor]
    new: list[Tensor]
    made: list[fx.Node] = field(default_factory=list)
    given: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def examples(self) -> list[Tensor]:
        """Tensors like those that the call gives."""
        return [*(self.tensors[i] for i in self.target.written), *self.new]

    def begin(self, graph: RecordedGraph, number: int) -> None:
        """Add the inputs that stand for what the call gives; `number` is its number in the path."""
        self.made = [graph.input(f"made_{number}_{i}") for i in range(len(self.examples))]
        for node, tensor in zip(self.made[len(self.target.written) :], self.new, strict=True):
            graph.stands_for(node, tensor)

    def write(self, graph: RecordedGraph, call: RecordedCall, numbers: Mapping[int, fx.Node]) -> None:
        """Write copies of what the call is given, and what it writes."""
        copies = {id(tensor): graph.copy(tensor) for tensor in self.tensors}
        self.given = {i: copies[id(leaf)] for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        self.given |= {call.numbers[place]: node for place, node in numbers.items()}
        for i, node in zip(self.target.written, self.made, strict=False):
            graph.write(self.tensors[i], node)


def own_calls(calls: Sequence[RecordedCall]) -> Iterator[int]:
    """Yield the indices of the calls that the step itself makes; those of compiled functions are left to these."""
    inside = False
    for index, call in enumerate(calls):
        if call.func is EXIT:
            inside = False
        elif not inside:
            yield index
            inside = isinstance(call.func, CompiledEntry)


def part_at(calls: Sequence[RecordedCall], begin: int) -> CompiledPart:
    """Describe the call of a compiled function."""
    entry = calls[begin]
    end = next(i for i in range(begin, len(calls)) if calls[i].func is EXIT)
    inner, returned, name = calls[begin + 1 : end], calls[end].leaves, entry.func.name
    tensors = list({id(leaf): leaf for leaf in entry.leaves if isinstance(leaf, Tensor)}.values())
    which = {id(tensor): i for i, tensor in enumerate(tensors)}
    written = written_by(inner, tensors, name)
    new = fresh_results(returned, tensors, name)
    if not tensors:
        raise Untraceable(f"its step calls the compiled function {name}, which takes no tensors")
    target = CompiledCall(
        entry.func.function,
        name,
        entry.func.form,
        tuple(which.get(id(leaf)) for leaf in entry.leaves),
        written,
        frozenset(i for i, tensor in enumerate(tensors) if isinstance(tensor, torch.nn.Parameter)),
        frozenset(i for i, leaf in enumerate(entry.leaves) if type(leaf) is int),
        new,
        body_of(inner, tensors, [returned[i] for i in new], name),
    )
    return CompiledPart(target, entry.leaves, tensors, [returned[i] for i in new])


def written_by(calls: Sequence[RecordedCall], tensors: Sequence[Tensor], name: str) -> tuple[int, ...]:
    """Find which tensors some calls write; the others that they write they have made themselves, see `body_of`."""
    memory = {
        storage_of(tensor)
        for call in calls
        for _, _, tensor in operands_written(call.func, given_to(call.func, call.args, call.kwargs))
    }
    written = tuple(i for i, tensor in enumerate(tensors) if storage_of(tensor) in memory)
    for i in written:
        if sum(storage_of(tensor) == storage_of(tensors[i]) for tensor in tensors) > 1:
            raise Untraceable(f"its step gives the compiled function {name} several views of a tensor that it writes")
    return written


def fresh_results(returned: Sequence[Tensor], tensors: Sequence[Tensor], name: str) -> tuple[int, ...]:
    """Find which of the returned tensors are new; the others are arguments themselves, or returned twice."""
    distinct = {id(tensor): tensor for tensor in tensors}
    found = []
    for i, tensor in enumerate(returned):
        if id(tensor) in distinct:
            continue
        if any(storage_of(tensor) == storage_of(other) for other in distinct.values()):
            raise Untraceable(f"its step calls the compiled function {name}, which returns a view")
        distinct[id(tensor)] = tensor
        found.append(i)
    return tuple(found)


def body_of(calls: Sequence[RecordedCall], tensors: Sequence[Tensor], new: Sequence[Tensor], name: str) -> fx.Graph:
    """Write what a compiled function calls as written."""
    body = RecordedGraph(f"its step calls the compiled function {name}, which uses a tensor that it is not given")
    for i, tensor in enumerate(tensors):
        body.stands_for(body.input(f"t{i}"), tensor)
    for call in calls:
        body.call(call, {})
    body.graph.output(tuple(map(body.node_of, new)))
    return body.graph


def with_compiled_calls(graph: fx.Graph, parts: Sequence[CompiledPart], returned: int, inputs: int) -> fx.Graph:
    """Put the calls of compiled functions into a functional graph.

    Args:
        graph: a graph whose last inputs are what these calls give, in order. Its outputs are some that stay, what the
            calls are given, and the final values of all inputs.

    Returns:
        A graph with the inputs and the outputs that stay, and the final values of these inputs.
    """
    if not parts:
        return graph
    found, stand_ins = outputs(graph), iter(placeholders(graph)[inputs:])
    given, finals = iter(found[returned:]), found[len(found) - len(placeholders(graph)) :]
    made = [[next(stand_ins) for _ in part.made] for part in parts]
    leaves = [{i: next(given) for i in part.given} for part in parts]
    copies = {node for own in leaves for node in own.values() if getattr(node, "target", None) is CLONE}
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = {max(copies.intersection(own.values()), key=order.__getitem__): k for k, own in enumerate(leaves)}
    absent = {node for own in made for node in own}
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def value(node: Any) -> Any:
        return env[node] if isinstance(node, fx.Node) else node

    for node in graph.nodes:
        if node in copies:  # values of a functional graph never change
            env[node] = env[node.args[0]]
        elif node.target is torch.ops.aten.copy.default and node.args[1] in absent and same_form(*node.args):
            env[node] = env[node.args[1]]
        elif node.op != "output" and node not in absent:
            env[node] = new.node_copy(node, env.__getitem__)
        if node in last:
            k = last[node]
            args = tuple(value(leaves[k].get(i, leaf)) for i, leaf in enumerate(parts[k].leaves))
            name = parts[k].target.name.rpartition(".")[2]
            call = new.create_node("call_function", parts[k].target, args, name=name)
            call.meta["val"] = tuple(node.meta["val"] for node in made[k])
            for i, stand_in in enumerate(made[k]):
                env[stand_in] = new.call_function(operator.getitem, (call, i))
                env[stand_in].meta["val"] = stand_in.meta["val"]
    new.output(tuple(map(value, (*found[:returned], *finals[:inputs]))))
    new.lint()
    return new


def same_form(one: fx.Node, other: fx.Node) -> bool:
    """Tell whether two tensors have equal shapes, dtypes and strides."""
    a, b = one.meta["val"], other.meta["val"]
    return bool((a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()))
