"""Rank programs whose numbers lie on the device, so that a recorded program can be replayed with others.

A CUDA graph keeps the numbers that kernels were launched with. Here the arithmetic on hyperparameters is taken out
of a program and done on the host, in double precision as ever, and its results are handed to the operators in 0-d
tensors. Operators that take numbers only get forms that take such tensors and round as they do: in 32 bits where
tensors have 16, with one rounding for a product and its sum. An operator without such a form keeps its number,
and another value means another recording.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from canzona_compile import instructions
from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.ir import outputs, placeholders
from canzona_compile.program import Program

aten = torch.ops.aten


class DeviceNumber:
    """A number as 0-d tensors, in 32 and in 64 bits."""

    def __init__(self, device: torch.device) -> None:
        self.single = torch.zeros((), dtype=torch.float32, device=device)
        self.double = torch.zeros((), dtype=torch.float64, device=device)
        self.value: float | None = None

    def fill(self, value: float) -> None:
        """Give it a value, on the current stream; nothing is launched where it has that already."""
        if value != self.value:
            self.single.fill_(value)
            self.double.fill_(value)
            self.value = value

    def beside(self, tensor: Tensor) -> Tensor:
        """As precise as arithmetic with `tensor` is."""
        return self.double if tensor.dtype == torch.float64 else self.single


def wide(tensor: Tensor) -> Tensor:
    """In the precision in which ATen computes: 16-bit formats in 32 bits."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def operand(value: Any, tensor: Tensor) -> Any:
    if isinstance(value, DeviceNumber):
        return value.beside(tensor)
    return wide(value) if isinstance(value, Tensor) else value


def result_dtype(*values: Any) -> torch.dtype:
    """Of an operator on floating-point tensors; numbers do not count."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    found = tensors[0].dtype
    for tensor in tensors[1:]:
        found = torch.promote_types(found, tensor.dtype)
    return found if found.is_floating_point else torch.get_default_dtype()


def tensor_among(*values: Any) -> Tensor:
    return next(v for v in values if isinstance(v, Tensor))


def mul(x: Any, y: Any) -> Tensor:
    """x * y; either may be a number."""
    like = tensor_among(x, y)
    return torch.mul(operand(x, like), operand(y, like)).to(result_dtype(x, y))


def div(x: Any, y: Any) -> Tensor:
    """x / y. By a number ATen's CUDA kernel multiplies with its reciprocal."""
    like = tensor_among(x, y)
    a, b = operand(x, like), operand(y, like)
    by_reciprocal = isinstance(y, DeviceNumber) and like.is_cuda
    return (torch.mul(a, b.reciprocal()) if by_reciprocal else torch.div(a, b)).to(result_dtype(x, y))


def add(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    """x + alpha y, in one rounding on CUDA."""
    return scaled_sum(x, y, alpha, 1)


def sub(x: Any, y: Any, *, alpha: Any = 1) -> Tensor:
    """x - alpha y, in one rounding on CUDA."""
    return scaled_sum(x, y, alpha, -1)


def scaled_sum(x: Any, y: Any, alpha: Any, sign: int) -> Tensor:
    like = tensor_among(x, y)
    a, b = operand(x, like), operand(y, like)
    if isinstance(alpha, DeviceNumber):
        total = torch.addcmul(a, b, alpha.beside(like), value=sign)
    else:
        total = torch.add(a, b, alpha=sign * alpha)
    return total.to(result_dtype(x, y))


def lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    """x + weight (end - x), as ATen does it."""
    return torch.lerp(wide(x), wide(end), operand(weight, x)).to(result_dtype(x, end))


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """x + value a b."""
    return torch.addcmul(wide(x), torch.mul(wide(a), operand(value, x)), wide(b)).to(result_dtype(x, a, b))


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """x + value a / b."""
    quotient, factor = torch.div(wide(a), wide(b)), operand(value, x)
    if isinstance(value, DeviceNumber):
        total = torch.addcmul(wide(x), quotient, factor)
    else:
        total = torch.add(wide(x), quotient, alpha=factor)
    return total.to(result_dtype(x, a, b))


def mul_(x: Tensor, y: Any) -> Tensor:
    return x.copy_(mul(x, y))


def div_(x: Tensor, y: Any) -> Tensor:
    return x.copy_(div(x, y))


def add_(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.copy_(add(x, y, alpha=alpha))


def sub_(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x.copy_(sub(x, y, alpha=alpha))


def lerp_(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x.copy_(lerp(x, end, weight))


def addcmul_(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x.copy_(addcmul(x, a, b, value=value))


def addcdiv_(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x.copy_(addcdiv(x, a, b, value=value))


FORMS: Mapping[Any, Callable[..., Tensor]] = {
    aten.mul.Tensor: mul,
    aten.div.Tensor: div,
    aten.add.Tensor: add,
    aten.sub.Tensor: sub,
    aten.lerp.Scalar: lerp,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.mul_.Tensor: mul_,
    aten.div_.Tensor: div_,
    aten.add_.Tensor: add_,
    aten.sub_.Tensor: sub_,
    aten.lerp_.Scalar: lerp_,
    aten.addcmul_.default: addcmul_,
    aten.addcdiv_.default: addcdiv_,
}


def each_numbered(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The form of `op` for every task, see `instructions.each`."""
    return instructions.each(FORMS[op], *args, **kwargs)


# How a value gets to where it is needed: in a tensor; as a number, which a recording keeps; or in a kernel's table.
Kind = Literal["device", "kept", "table"]


@dataclass(frozen=True, eq=False, slots=True)
class DeviceProgram:
    """A program in two parts.

    Attributes:
        host: the numbers among the program's inputs, in order -> the values that operators take.
        module: the program's inputs, then those values: as `DeviceNumber` where their kind is "device", else as they
            are. What it gets for the numbers among the inputs it does not read.
        kinds: by value.
        tables: which values each generated kernel reads, by its name and for each of its parts.
    """

    host: fx.GraphModule
    module: fx.GraphModule
    kinds: tuple[Kind, ...]
    tables: Mapping[str, tuple[tuple[int, ...], ...]]


def with_device_numbers(program: Program, numbers: Sequence[str]) -> DeviceProgram:
    """Take the arithmetic on numbers out of a program.

    Args:
        numbers: the names of its inputs that are Python numbers. Hyperparameters may be tensors as well.
    """
    return _Splitter(program, numbers).split()


@dataclass(frozen=True, slots=True)
class _Cut:
    """A graph without arithmetic on numbers: what it takes instead, nodes of the old one, in order of its inputs."""

    name: str
    takes: tuple[tuple[fx.Node, Kind], ...]


class _Splitter:
    def __init__(self, program: Program, numbers: Sequence[str]) -> None:
        self.old, self.numbers = program.module, numbers
        self.host, self.root = fx.Graph(), torch.nn.Module()
        self.graph = fx.Graph()
        self.values: dict[tuple[fx.Node, Kind], fx.Node] = {}  # by node of `host`
        self.results: dict[fx.Node, list[fx.Node]] = {}  # of graphs that return numbers only, in `host`
        self.known: dict[Hashable, fx.Node] = {}  # arithmetic that is in `host` already
        self.cuts: dict[tuple[str, tuple[str, ...]], _Cut] = {}

    def split(self) -> DeviceProgram:
        new: dict[fx.Node, fx.Node] = {}
        on_host = {name: self.host.placeholder(name) for name in self.numbers}
        for node in self.old.graph.nodes:
            numbers = {n: on_host[n.name] for n in node.all_input_nodes if n.name in on_host}
            if node.op == "get_attr":
                self.root.add_module(str(node.target), self.old.get_submodule(str(node.target)))
            own = self.old.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(own, GroupedKernel):
                new[node] = self.kernel(node, own, new)
            elif isinstance(own, fx.GraphModule) and numbers and numbers_only(own.graph):
                inlined = self.inline(own.graph, self.given(node, own.graph, numbers))
                self.results[node] = [inlined[n] for n in outputs(own.graph)]
            elif numbers and (own is not None or node.target is instructions.each):
                new[node] = self.call(node, new, numbers)
            elif numbers and node.op == "call_function":
                kept = {n: self.value(number, "kept") for n, number in numbers.items()}
                new[node] = self.graph.node_copy(node, (new | kept).__getitem__)
            else:
                new[node] = self.graph.node_copy(node, new.__getitem__)
                if own is not None:
                    self.root.add_module(str(node.target), own)
        self.host.output(tuple(node for node, _ in self.values))
        self.graph.lint()
        kinds = tuple(kind for _, kind in self.values)
        host = fx.GraphModule(torch.nn.Module(), self.host, class_name="HostNumbers")
        module = fx.GraphModule(self.root, self.graph, class_name="DeviceProgram")
        return DeviceProgram(host, module, kinds, self.tables())

    def kernel(self, node: fx.Node, kernel: GroupedKernel, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A call of a generated kernel, whose numbers come from the host."""
        self.root.add_module(str(node.target), kernel)
        parts: list[Any] = []
        for part in node.args:
            lists, numbers = cast(tuple[Any, Any], part)
            if isinstance(numbers, fx.Node):
                known = self.results.get(numbers)
                numbers = tuple(self.value(n, "table") for n in known) if known is not None else new[numbers]
            parts.append((fx.map_arg(lists, new.__getitem__), numbers))
        return self.graph.call_module(str(node.target), tuple(parts))

    def tables(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        place = {node: i for i, node in enumerate(self.values.values())}
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        for node in self.graph.nodes:
            if node.op == "call_module" and isinstance(self.root.get_submodule(str(node.target)), GroupedKernel):
                found[str(node.target)] = tuple(tuple(place[n] for n in numbers) for _, numbers in node.args)
        return found

    def given(self, node: fx.Node, graph: fx.Graph, numbers: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """The numbers that a call hands to a graph, by the graph's inputs."""
        return {i: numbers[a] for i, a in zip(placeholders(graph), node.args, strict=True) if a in numbers}  # type: ignore[index]

    def call(self, node: fx.Node, new: Mapping[fx.Node, fx.Node], numbers: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A call with numbers among its arguments: of a module, or of the module of one task in a loop."""
        looped = node.target is instructions.each
        arguments = list(node.args[1:] if looped else node.args)
        attribute: Any = node.args[0] if looped else None
        name = str(attribute.target) if looped else str(node.target)
        module = self.old.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        given = {i: numbers[a] for i, a in zip(inputs, arguments, strict=True) if a in numbers}  # type: ignore[index]
        cut = self.cut(name, module.graph, given)
        kept = [a for i, a in zip(inputs, arguments, strict=True) if i not in given]
        args: list[Any] = [fx.map_arg(a, new.__getitem__) for a in kept]
        inlined = self.inline(module.graph, given)
        args += [self.value(inlined[single], kind) for single, kind in cut.takes]
        if not looped:
            return self.graph.call_module(cut.name, tuple(args))
        return self.graph.call_function(instructions.each, (self.graph.get_attr(cut.name), *args))

    def inline(self, graph: fx.Graph, given: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """A graph's arithmetic on numbers, in the host's graph; once where several graphs do the same."""
        found = dict(given)
        for node in graph.nodes:
            if arithmetic(node, found):
                args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                key = (node.target, repr(args), repr(kwargs))
                if key not in self.known:
                    self.known[key] = self.host.call_function(node.target, args, kwargs)
                found[node] = self.known[key]
        return found

    def value(self, number: fx.Node, kind: Kind) -> fx.Node:
        """The program's input for a value that the host computes."""
        if (number, kind) not in self.values:
            last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
            with self.graph.inserting_after(last):
                self.values[number, kind] = self.graph.placeholder(f"number_{len(self.values)}")
        return self.values[number, kind]

    def cut(self, name: str, graph: fx.Graph, given: Iterable[fx.Node]) -> _Cut:
        """A graph without its arithmetic on numbers, whose operators take device numbers where they can."""
        singles = set(given)
        key = name, tuple(sorted(n.name for n in singles))
        if key in self.cuts:
            return self.cuts[key]
        made = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        takes: dict[tuple[fx.Node, Kind], fx.Node] = {}
        last: fx.Node | None = None
        for node in graph.nodes:
            if node in singles:
                continue
            if arithmetic(node, singles):
                singles.add(node)
                continue
            form = form_of(node)
            kind: Kind = "kept" if form is None else "device"
            for single in [n for n in node.all_input_nodes if n in singles]:
                if (single, kind) not in takes:
                    with made.inserting_after(last) if last else made.inserting_before(first_of(made)):
                        last = takes[single, kind] = made.placeholder(f"number_{len(takes)}")

            def operand_of(n: fx.Node, kind: Kind = kind) -> fx.Node:
                return takes[n, kind] if n in singles else new[n]

            new[node] = made.node_copy(node, operand_of)
            if node.op == "placeholder":
                last = new[node]
            if form is not None and any(n in singles for n in node.all_input_nodes):
                new[node].target = each_numbered if node.target is instructions.each else form
        # Those that this graph's own inputs are followed by, in order.
        unique = f"{name}_{len(self.cuts)}"
        self.root.add_module(unique, fx.GraphModule(self.old.get_submodule(name), made, class_name=unique))
        self.cuts[key] = _Cut(unique, tuple(takes))
        return self.cuts[key]


def numbers_only(graph: fx.Graph) -> bool:
    """Does a graph compute numbers from numbers, and nothing else?"""
    known: set[fx.Node] = set(placeholders(graph))
    for node in graph.nodes:
        if node.op == "call_function" and arithmetic(node, known):
            known.add(node)
    return all(isinstance(n, fx.Node) and n in known for n in outputs(graph))


def first_of(graph: fx.Graph) -> fx.Node | None:
    return next(iter(graph.nodes), None)


def arithmetic(node: fx.Node, numbers: Any) -> bool:
    """Does a node compute a number from numbers alone? What ATen makes of them are tensors."""
    operands = node.all_input_nodes
    plain = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    return plain and node.target is not instructions.each and bool(operands) and all(n in numbers for n in operands)


def form_of(node: fx.Node) -> Callable[..., Tensor] | None:
    """What runs instead of a node where numbers are on the device."""
    target: Any = node.args[0] if node.target is instructions.each else node.target
    return FORMS.get(target) if node.op == "call_function" else None
