"""Print a step as text, which people read, tests compare and ranks hash.

The text says everything that decides what a step computes, and nothing else. It contains no object ids, times, paths or
device numbers, so ranks that hold the same plan print the same text. Each template and each cut is printed once, and
each task takes a line. A step of hundreds of tasks takes milliseconds.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.fx_utils import outputs, placeholders
from canzona_compile.ir.layout import Grid, Layout, Shape
from canzona_compile.ir.step import (
    Exchange,
    Form,
    Item,
    Leaf,
    MicroGroup,
    Phase,
    Placed,
    Stacked,
    Step,
    Task,
    Template,
)
from canzona_compile.machine.hardware import HERE

MATRIX_RANKS = 8  # the largest grid, in ranks, whose blocks are printed one by one


def show(step: Step) -> str:
    """Print a step of any form as one text."""
    return text_of(parts(step))


def text_of(printed: Mapping[str, Sequence[str]]) -> str:
    """Join the parts of a printed step."""
    return "".join(f"{line}\n" for lines in printed.values() for line in lines)


def parts(step: Step, reasons: bool = True) -> dict[str, list[str]]:
    """Print a step of any form in parts.

    Args:
        reasons: whether to print why tasks have their owners and why templates are interpreted. Fingerprints of plans
            leave the reasons out: the same decision for another reason is the same plan.

    Returns:
        Lines of text by part: "graphs" (what runs), "tasks" (on which rank), "buckets" (only if the step has some),
        "groups" (the micro-groups) and "schedule" (when, in which memory, and at last the program). An empty line
        between two blocks belongs to the first one.
    """
    layouts = Layouts()
    tasks = [show_task(step.form, task, layouts.name(task.layout), reasons) for task in step.tasks]
    blocks: list[tuple[str, Iterable[str]]] = [("graphs", [show_header(step)])]
    blocks += [("graphs", show_template(template, reasons)) for template in step.templates]
    blocks += [("graphs", show_placed(placed)) for placed in step.placed]
    blocks.append(("tasks" if layouts.lines else "graphs", layouts.lines))  # without layouts this is an empty line
    blocks.append(("tasks", ["tasks {", *indented(tasks), "}"]))
    if step.buckets:
        blocks.append(("buckets", show_buckets(step.buckets)))
    blocks += [("groups", show_group(step, micro_group)) for micro_group in step.micro_groups]
    if step.form >= Form.SCHEDULED:
        blocks += [("schedule", show_schedule(step)), ("schedule", show_buffers(step))]
    if step.program is not None:
        blocks.append(("schedule", show_program(step.program)))
    names = ("graphs", "tasks", *(("buckets",) if step.buckets else ()), "groups", "schedule")
    found: dict[str, list[str]] = {name: [] for name in names}
    before = ""
    for part, lines in blocks:
        if before:
            found[before].append("")
        found[part] += [line.rstrip() for line in lines]
        before = part
    return found


def show_header(step: Step) -> str:
    machine = step.machine
    rates = f" rates={machine.rates.name}@{machine.rates.digest}" if machine.rates else ""
    if machine.rates is not None and machine.rates.here:  # they vary a little from run to run
        rates = f" rates={HERE}"
    return (
        f"step @{step.optimizer} form={step.form.name.lower()} "
        f"machine={machine.device}/{machine.backend or 'none'} threads={machine.threads}{rates}"
    )


def differences(a: str, b: str) -> str:
    """A unified diff of two texts; empty if they are equal."""
    before, after = a.splitlines(), b.splitlines()
    found = difflib.unified_diff(before, after, "before", "after", n=2, lineterm="")
    return "".join(f"{line}\n" for line in found)


def show_nodes(graph: fx.Graph, writes: Sequence[str] | None = None) -> Iterator[str]:
    """Print the operators of a graph and what it returns."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        args = [show_argument(a) for a in node.args]
        args += [f"{name}={show_argument(a)}" for name, a in node.kwargs.items()]
        kind = show_type(node.meta.get("val"))
        yield f"%{node.name} = {show_target(node.target)}({', '.join(args)}){kind and f' : {kind}'}"
    values = [show_argument(value) for value in outputs(graph)]
    if writes is not None and len(writes) == len(values):  # an invalid step has to print as well
        values = [f"{name}={value}" for name, value in zip(writes, values, strict=True)]
    yield f"return {', '.join(values)}".rstrip()


def show_target(target: Any) -> str:
    """The name of an operator or function, without its address: aten.lerp.Scalar, operator.mul, eager_step."""
    if isinstance(target, OpOverload | str):
        return str(target)
    name = getattr(target, "__name__", type(target).__name__)
    module = getattr(target, "__module__", "")
    return f"operator.{name}" if module == "_operator" else str(name)


def show_argument(value: Any) -> str:
    """Print an operand. Numbers keep all digits. Devices lose their index, because it differs between ranks."""
    match value:
        case fx.Node():
            return f"%{value.name}"
        case torch.dtype():
            return dtype_name(value)
        case torch.device():
            return value.type
        case list() | tuple():
            return f"[{', '.join(map(show_argument, value))}]"
        case dict():
            return f"{{{', '.join(f'{k}: {show_argument(v)}' for k, v in value.items())}}}"
        case slice():
            return ":".join(map(show_argument, (value.start, value.stop, value.step)))
        case torch.Tensor():
            return f"tensor {show_type(value)}"
    if callable(value):
        return show_target(value)
    return neutral(repr(value))


def show_type(value: Any) -> str:
    """The type of a value: f32[64x32] for a tensor, float for a symbolic number, empty for everything else."""
    match value:
        case torch.Tensor():
            return show_tensor(value.dtype, tuple(value.shape))
        case list() | tuple():
            return f"({', '.join(map(show_type, value))})"
        case bool() | torch.SymBool():
            return "bool"
        case int() | torch.SymInt():
            return "int"
        case float() | torch.SymFloat():
            return "float"
    return ""


def show_tensor(dtype: torch.dtype, shape: Shape) -> str:
    return f"{dtype_name(dtype)}[{'x'.join(map(str, shape))}]"


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: bf16, f32, i64, f8_e4m3fn."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def neutral(text: str) -> str:
    """Remove addresses and directories from free text, because they differ between ranks and machines."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x...", text.replace("\n", " "))
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])", "", text)


def indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def show_template(template: Template, reasons: bool = True) -> list[str]:
    kind = show_tensor(template.dtype, template.shape)
    end = " {"
    if template.interpreted:  # without the reason the brace is left out too: fingerprints were taken of such text
        end = f" interpreted because {neutral(template.interpreted)} {{" if reasons else " interpreted"
    resident = "" if template.resident is None else f" resident={','.join(template.resident)}"
    precision = f" precision={template.precision}" if template.precision else ""
    nodes = placeholders(template.graph)
    lines = [f"template {template.name} : {kind}{resident}{precision}{end}"]
    for i, leaf in enumerate(template.inputs):
        lines.append(f"  {show_leaf(leaf, nodes[i].name if i < len(nodes) else leaf.name)}")
    return [*lines, *indented(show_nodes(template.graph, template.writes)), "}"]


def show_leaf(leaf: Leaf, node: str) -> str:
    """Print a leaf, and its node if that has another name: FX renames placeholders that shadow a Python builtin."""
    renamed = f" = %{node}" if node != leaf.name else ""
    kind = "number" if leaf.dtype is None else show_tensor(leaf.dtype, leaf.shape)
    return f"{leaf.role} %{leaf.name}{renamed} : {kind}"


def show_placed(placed: Placed) -> list[str]:
    lines = [f"placed {placed.name} = {placed.template.name} on {placed.kind} {{"]
    for wire in placed.gather:
        lines.append(f"  gather %{wire.name} : {show_tensor(wire.dtype, wire.shape)}")
    for wire in placed.scatter:
        lines.append(f"  scatter %{wire.name} : {show_tensor(wire.dtype, wire.shape)}")
    for title, names in (("kept", placed.kept), ("resident", placed.resident)):
        lines += [f"  {title} {', '.join(f'%{name}' for name in names)}"] if names else []
    lines.append(f"  cost {placed.cost} = {placed.flops} FLOP")
    graphs: list[tuple[str, fx.Graph, Sequence[str] | None]] = [
        ("prepare", placed.prepare, None),
        ("compute", placed.compute, [*(w.name for w in placed.scatter), *placed.owner_writes]),
        ("apply", placed.apply, placed.fragment_writes),
    ]
    if placed.stacked is not None:
        title = f"stacked {flags(placed.stacked)} "
        graphs.append((title, placed.stacked.graph, graphs[1][2]))
    for title, graph, writes in graphs:
        inputs = ", ".join(f"%{node.name}" for node in placeholders(graph))
        lines += [f"  {title}({inputs}) {{"]
        lines += [*indented(indented(show_nodes(graph, writes))), "  }"]
    return [*lines, "}"]


def flags(stacked: Stacked) -> str:
    """Print which inputs and outputs of a stacked compute graph are stacks; the others are lists."""
    outs = "".join("s" if flag else "l" for flag in stacked.outputs)
    return f"in={','.join(stacked.inputs)} out={outs}"


class Layouts:
    """Names the layouts of a step L0, L1, ... in order of appearance, and prints each layout once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[tuple[Shape, str, Grid], list[tuple[str, Layout]]] = {}
        self._seen: dict[int, str] = {}  # most tasks share their layout as one object

    def name(self, layout: Layout) -> str:
        """The name of a layout. Equal layouts have one name."""
        if id(layout) not in self._seen:
            self._seen[id(layout)] = self._name(layout)
        return self._seen[id(layout)]

    def _name(self, layout: Layout) -> str:
        alike = self._known.setdefault((layout.shape, layout.placements, layout.grid), [])
        for name, known in alike:
            if known.boxes == layout.boxes:
                return name
        name = f"L{sum(map(len, self._known.values()))}"
        alike.append((name, layout))
        ranks = " | ".join(" ".join(map(str, row)) for row in layout.grid.ranks)
        shape = "x".join(map(str, layout.shape))
        self.lines.append(f"layout {name} : {shape} {layout.placements} on {show_grid(layout.grid)} ranks {ranks}")
        self.lines.append(f"  boxes {' '.join(map(str, layout.boxes))}")
        return name


def show_grid(grid: Grid) -> str:
    return f"{grid.replicas}x{grid.shards}"


def show_task(form: Form, task: Task, layout: str, reasons: bool = True) -> str:
    line = (
        f"{task.name} : {'x'.join(map(str, task.shape))} index={task.index} group={task.param_group} "
        f"template={task.template} layout={layout} {task.layout.placements} "
        f"on {show_grid(task.layout.grid)}"
    )
    if form >= Form.PLACED:
        line += f" placed={task.placed}"
    if form >= Form.OWNED:
        line += f" strategy={task.strategy} owner={show_place(task.owner)}"
    return f"{line} because {neutral(task.reason)}" if task.reason and reasons else line


def show_place(owner: tuple[int, int] | None) -> str:
    return "all" if owner is None else f"({owner[0]}, {owner[1]})"


def show_buckets(buckets: Sequence[Bucket]) -> Iterator[str]:
    """Print a line per bucket, short enough to read for hundreds of owners.

    The digest at the end of a line stands for all slices: names, elements, owners and positions.
    """
    yield "buckets {"
    for bucket in buckets:
        kind = "uniform" if bucket.uniform else "uneven"
        yield (
            f"  {bucket.index} {dtype_name(bucket.dtype)} elements={bucket.elements} padding={bucket.padding} {kind} "
            f"shards {show_shards(bucket.lengths)} slices={digest_of(bucket)}"
        )
    yield "}"


def show_shards(lengths: Sequence[int]) -> str:
    """The shards that hold something, as owner:length. Consecutive owners with equal shards share an entry."""
    entries: list[str] = []
    first = 0
    for owner in range(1, len(lengths) + 1):
        if owner < len(lengths) and lengths[owner] == lengths[first]:
            continue
        owners = str(first) if owner == first + 1 else f"{first}-{owner - 1}"
        if lengths[first]:
            entries.append(f"{owners}:{lengths[first]}")
        first = owner
    return " ".join(entries)


def digest_of(bucket: Bucket) -> str:
    """A short hash of the slices of a bucket."""
    lines = (f"{p.name} {p.start} {p.length} {p.owner} {p.offset}\n" for p in bucket.slices)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


def show_group(step: Step, micro_group: MicroGroup) -> list[str]:
    lines = [f"group {micro_group.index} {{", f"  tasks {', '.join(micro_group.tasks)}"]
    for exchange in micro_group.exchanges:
        grid = step.task(exchange.items[0].task).layout.grid if exchange.items else None
        lines += indented(show_exchange(step, exchange, grid))
    for batch in micro_group.batches:
        how = "stacked" if batch.stacked else "looped"
        how += f" lane={batch.lane}" if batch.lane else ""
        lines.append(
            f"  batch {batch.placed} group={batch.param_group} owner={show_place(batch.owner)} {how}: "
            f"{', '.join(batch.tasks)}"
        )
    return [*lines, "}"]


def show_exchange(step: Step, exchange: Exchange, grid: Grid | None) -> Iterator[str]:
    sizes: dict[tuple[int, Shape], int] = {}
    total = 0
    yield f"{exchange.phase} {{"
    for item in exchange.items:
        size = item_bytes(item, step.task(item.task).shape, sizes)
        total += size
        wire = f"%{item.wire.name} {show_tensor(item.wire.dtype, item.wire.shape)}"
        yield f"  {item.task} {wire} {size} B owner={show_place(item.owner)}"
    if grid is not None and grid.size <= MATRIX_RANKS:
        yield from indented(show_blocks(exchange, grid))
    else:
        yield f"  total {total} B"
    yield "}"


def item_bytes(item: Item, shape: Shape, sizes: dict[tuple[int, Shape], int]) -> int:
    """The bytes of all fragments of an item.

    The boxes tile the parameter, so for a wire of the parameter's shape they need not be added up.

    Args:
        shape: the shape of the parameter.
        sizes: elements of the items so far, by the id of their boxes and the shape of their wire. It gets a new entry.
    """
    if item.wire.shape == shape:
        return math.prod(shape) * item.wire.itemsize
    key = id(item.boxes), item.wire.shape
    if key not in sizes:
        sizes[key] = sum(item.wire.box(box).numel for box in item.boxes)
    return sizes[key] * item.wire.itemsize


def show_blocks(exchange: Exchange, grid: Grid) -> Iterator[str]:
    """Print the bytes of every block, as a matrix per process group: a row per sender, a column per receiver."""
    over_shards = exchange.phase is not Phase.EXCHANGE
    title, peers = ("replica", grid.shards) if over_shards else ("shard", grid.replicas)
    for fixed in range(grid.replicas if over_shards else grid.shards):
        places = [(fixed, i) if over_shards else (i, fixed) for i in range(peers)]
        rows = [[str(exchange.block(a, b)[1]) for b in places] for a in places]
        width = max(len(cell) for row in rows for cell in row)
        yield f"blocks of {title} {fixed}"
        yield from (f"  {' '.join(cell.rjust(width) for cell in row)}" for row in rows)


def show_schedule(step: Step) -> Iterator[str]:
    yield f"schedule depth={step.depth} {{"
    yield from (f"  {i} {event.act} {event.micro_group}" for i, event in enumerate(step.schedule))
    yield "}"


def show_buffers(step: Step) -> Iterator[str]:
    yield "buffers {"
    for buffer in step.buffers:
        yield (f"  slot {buffer.slot} : group {buffer.micro_group} {buffer.title} from {buffer.first} to {buffer.last}")
    yield "}"


def show_program(program: Any) -> Iterator[str]:
    """Print the program of one rank: its code, and that of the graphs that it calls."""
    slots = ", ".join(map(str, program.slots))
    yield f"program collectives={program.collectives} slots=[{slots}] {{"
    for name, module in program.module.named_modules():
        if isinstance(module, fx.GraphModule):
            yield f"  # {name or 'the program'}"
            yield from indented(module.code.strip().splitlines())
    yield "}"
