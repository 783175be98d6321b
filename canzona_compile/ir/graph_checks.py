"""Check what the forms CAPTURED and PLACED promise about templates, layouts and cuts.

`canzona_compile.ir.verifier` calls these functions. Each one raises InvalidStep if a promise is broken. An argument
`where` is the place that the error names.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

from torch import fx

from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.errors import InvalidStep
from canzona_compile.ir.bucket import Bucket, BucketSlice
from canzona_compile.ir.fx_utils import from_numbers, outputs, placeholders, pointwise, tensor_value
from canzona_compile.ir.layout import WHOLE_VECTORS, Box, Layout, LayoutKind, Shape
from canzona_compile.ir.step import (
    Placed,
    Role,
    Step,
    Task,
    Template,
    Wire,
)

# -- CAPTURED ----------------------------------------------------------------------------------


def captured(step: Step) -> None:
    """Check that templates are sound, names are unique, and each task has a template and a layout of equal shape."""
    unique((t.name for t in step.templates), "templates")
    unique((t.name for t in step.tasks), "tasks")
    for template in step.templates:
        captured_template(template)
    templates = {t.name: t for t in step.templates}
    checked: dict[tuple[Shape, str], list[Layout]] = {}
    seen: set[int] = set()  # most tasks share their layout as one object
    for task in step.tasks:
        if task.template not in templates:
            raise InvalidStep(f"there is no template {task.template!r}", at=task.name)
        shape = templates[task.template].shape
        if task.layout.shape[len(task.layout.shape) - len(shape) :] != shape:
            raise InvalidStep(
                f"its layout is of {list(task.layout.shape)}, its template of {list(shape)}",
                at=task.name,
            )
        if id(task.layout) in seen:
            continue
        seen.add(id(task.layout))
        alike = checked.setdefault((shape, task.layout.placements), [])
        if all(task.layout.boxes != known.boxes for known in alike):
            tiled(task.layout, task.name)
            alike.append(task.layout)


def captured_template(template: Template) -> None:
    """Check that a graph reads its template's leaves in order, and returns a value for each leaf that it writes."""
    sound(template.graph, f"template {template.name}")
    unique((leaf.name for leaf in template.inputs), f"leaves of template {template.name}")
    unique(template.writes, f"writes of template {template.name}")
    found = ", ".join(str(n.target) for n in placeholders(template.graph))
    leaves = ", ".join(leaf.name for leaf in template.inputs)
    if found != leaves:
        raise InvalidStep(
            f"its graph has the placeholders {found}, not its leaves {leaves}",
            at=f"template {template.name}",
        )
    roles = {leaf.name: leaf.role for leaf in (*template.inputs, *template.state)}  # it may write state it never reads
    for name in template.writes:
        # The first step, which is interpreted, writes state that it does not read.
        role = roles.get(name, Role.STATE if template.interpreted else None)
        if role not in (Role.PARAM, Role.STATE):
            raise InvalidStep(
                f"it writes {name}, which is neither parameter nor state",
                at=f"template {template.name}",
            )
    returns(template.graph, len(template.writes), f"template {template.name}")


def sound(graph: fx.Graph, where: str) -> None:
    """Check that a graph is well formed and functional."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise InvalidStep(f"its graph is malformed: {error}", at=where) from error
    for node in graph.nodes:
        if node.op not in ("call_function", "placeholder", "output"):
            raise InvalidStep(f"{where} has a node of kind {node.op}", at=f"%{node.name}")
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise InvalidStep(f"{node.target} writes to its operand in {where}", at=f"%{node.name}")


def returns(graph: fx.Graph, count: int, where: str) -> None:
    """Check that a graph returns `count` values."""
    if len(outputs(graph)) != count:
        raise InvalidStep(f"it returns {len(outputs(graph))} values, not {count}", at=where)


def unique(names: Iterable[str], what: str) -> None:
    """Check that no two names are equal. `what` says in the plural what has the names."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidStep(f"{count} {what} share a name", at=name)


def tiled(layout: Layout, where: str) -> None:
    """Check that the boxes of a layout lie in the matrix, are disjoint and cover it."""
    for box in layout.boxes:
        inside = len(box.size) == len(layout.shape) and all(
            0 <= a <= a + n <= length for a, n, length in zip(box.start, box.size, layout.shape, strict=True)
        )
        if not inside:
            raise InvalidStep(f"box {box} is not inside {list(layout.shape)}", at=where)
    boxes = [box for box in layout.boxes if box.numel]
    # The edges of all boxes cut the matrix into cells. Two boxes overlap if they share a cell.
    cuts = [
        sorted({edge for b in boxes for edge in (b.start[d], b.start[d] + b.size[d])}) for d in range(len(layout.shape))
    ]
    owner: dict[tuple[int, ...], Box] = {}
    for box in boxes:
        ranges = [
            range(bisect_left(own, a), bisect_left(own, a + n))
            for own, a, n in zip(cuts, box.start, box.size, strict=True)
        ]
        for cell in product(*ranges):
            if owner.setdefault(cell, box) is not box:
                raise InvalidStep(f"boxes {owner[cell]} and {box} overlap", at=where)
    if sum(box.numel for box in boxes) != math.prod(layout.shape):
        raise InvalidStep(f"its boxes do not cover {list(layout.shape)}", at=where)


# -- PLACED ------------------------------------------------------------------------------------


def placed(step: Step) -> None:
    """Check that cuts are sound, and that the cut of each task is made from its template, for its kind of layout."""
    unique((p.name for p in step.placed), "cuts")
    for cut in step.placed:
        placed_graphs(cut)
    cuts, templates = {p.name: p for p in step.placed}, {t.name: t for t in step.templates}
    kinds: dict[tuple[int, int], LayoutKind] = {}
    for task in step.tasks:
        if task.placed not in cuts:
            raise InvalidStep(f"there is no cut {task.placed!r}", at=task.name)
        cut = cuts[task.placed]
        if cut.template is not templates[task.template]:
            raise InvalidStep(f"its cut {cut.name} is not of its template {task.template}", at=task.name)
        key = id(task.layout), len(cut.template.shape)
        kind = kinds.get(key) or kinds.setdefault(key, LayoutKind.of(task.layout, key[1]))
        if cut.kind != kind:
            raise InvalidStep(f"its cut {cut.name} is for layouts {cut.kind}, its layout is {kind}", at=task.name)


def placed_graphs(cut: Placed) -> None:
    """Check that the three graphs of a cut read and return what `Placed` says.

    Prepare and apply may read only what lies with the fragments, compute only what lies on the owner.
    """
    leaves = {leaf.name: leaf for leaf in cut.template.inputs}
    state = {n for n in cut.template.writes if n not in leaves} | {leaf.name for leaf in cut.template.state}
    state |= {leaf.name for leaf in cut.template.inputs if leaf.role is Role.STATE}
    everywhere = {name for name, leaf in leaves.items() if not leaf.shape}
    where = f"cut {cut.name}"
    if not set(cut.fragment_writes) <= set(cut.template.writes):
        raise InvalidStep("fragment_writes names leaves that the template does not write", at=where)
    for name in cut.resident:
        if name not in state:
            raise InvalidStep(f"resident {name} is not a state of its template", at=where)
    for name in cut.owner_writes:
        if name not in cut.resident:
            raise InvalidStep(f"the owner writes {name}, which does not live there", at=where)
    for name in cut.fragment_writes:
        if name in cut.resident:
            raise InvalidStep(f"fragments write {name}, which lives on the owner", at=where)
    wires_in, wires_out = [w.name for w in cut.gather], [w.name for w in cut.scatter]
    on_fragments = leaves.keys() - set(cut.resident)
    for title, graph, first, allowed in (
        ("prepare", cut.prepare, [], on_fragments),
        ("compute", cut.compute, wires_in, everywhere | set(cut.resident)),
        ("apply", cut.apply, [*wires_out, *cut.kept], on_fragments),
    ):
        sound(graph, f"{title} of {where}")
        names = [str(n.target) for n in placeholders(graph)]
        if names[: len(first)] != first:
            raise InvalidStep(
                f"{title} takes {', '.join(names) or 'nothing'}, but first should come {', '.join(first)}",
                at=where,
            )
        for name in names[len(first) :]:
            if name not in allowed:
                raise InvalidStep(f"{title} reads %{name}, which does not lie where {title} runs", at=where)
    for title, graph in (("prepare", cut.prepare), ("apply", cut.apply)):
        elementwise(graph, f"{title} of {where}")
    returns(cut.prepare, len(cut.gather) + len(cut.kept), f"prepare of {where}")
    returns(cut.compute, len(cut.scatter) + len(cut.owner_writes), f"compute of {where}")
    returns(cut.apply, len(cut.fragment_writes), f"apply of {where}")
    for graph, wires in ((cut.prepare, cut.gather), (cut.compute, cut.scatter)):
        typed(graph, wires, cut.kind.lead, where)


def elementwise(graph: fx.Graph, where: str) -> None:
    """Check that every node is pointwise, or computes a number or a 0-d tensor that every rank can compute."""
    free = from_numbers(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in free and not pointwise(node):
            raise InvalidStep(f"{node.target} is not pointwise, in {where}", at=f"%{node.name}")


def typed(graph: fx.Graph, wires: Sequence[Wire], lead: Shape, where: str) -> None:
    """Check that the first results of a graph, one for each matrix, have the shapes and dtypes of the wires."""
    for wire, node in zip(wires, outputs(graph), strict=False):
        value = tensor_value(node) if isinstance(node, fx.Node) else None
        if value is not None and ((*lead, *value.shape), value.dtype) != (wire.shape, wire.dtype):
            raise InvalidStep(
                f"wire {wire.name} is {wire.dtype} {list(wire.shape)}, its value {value.dtype} {list(value.shape)}",
                at=where,
            )


# -- buckets --------------------------------------------------------------------------------------


def bucketed(step: Step) -> None:
    """Check the buckets of a step, if it has some."""
    if not step.buckets:
        return
    found: dict[str, list[tuple[BucketSlice, Bucket]]] = defaultdict(list)
    for i, bucket in enumerate(step.buckets):
        if bucket.index != i:
            raise InvalidStep(f"bucket {i} calls itself {bucket.index}", at=f"bucket {i}")
        laid_out(bucket)
        for part in bucket.slices:
            found[part.name].append((part, bucket))
    for task in step.tasks:
        owned(task, found.get(task.name, []))
    for task in (*step.tasks, *step.elementwise):
        covered(task, found.pop(task.name, []))
    if found:
        raise InvalidStep("a bucket holds what no task updates", at=next(iter(found)))


def laid_out(bucket: Bucket) -> None:
    """The slices of each shard are in order, aligned, apart from one another and inside of the shard."""
    where = f"bucket {bucket.index}"
    if any(length % WHOLE_VECTORS for length in bucket.lengths):
        raise InvalidStep(f"the length of a shard is not a multiple of {WHOLE_VECTORS}", at=where)
    if bucket.ranks and len(bucket.ranks) != len(bucket.lengths):
        raise InvalidStep(f"it has {len(bucket.lengths)} shards for {len(bucket.ranks)} ranks", at=where)
    reached = [0] * len(bucket.lengths)
    before = -1
    for part in bucket.slices:
        at = f"{part.name} in {where}"
        if not 0 <= part.owner < len(bucket.lengths):
            raise InvalidStep(f"its owner {part.owner} is not one of {len(bucket.lengths)}", at=at)
        if part.owner < before:
            raise InvalidStep("the slices are not in the order of their owners", at=at)
        before = part.owner
        if part.length < 0:
            raise InvalidStep(f"a slice has {part.length} elements", at=at)
        if part.offset % WHOLE_VECTORS:
            raise InvalidStep(f"its offset {part.offset} is not a multiple of {WHOLE_VECTORS}", at=at)
        if part.offset < reached[part.owner]:
            raise InvalidStep("it overlaps the slice before it", at=at)
        reached[part.owner] = part.offset + part.length
        if reached[part.owner] > bucket.lengths[part.owner]:
            raise InvalidStep(f"it ends after its shard of {bucket.lengths[part.owner]} elements", at=at)


def covered(task: Task, found: list[tuple[BucketSlice, Bucket]]) -> None:
    """The slices of a parameter hold each element of a fragment once, in one bucket."""
    if len({bucket.index for _, bucket in found}) > 1:
        raise InvalidStep("it is in several buckets", at=task.name)
    sizes = sorted({box.numel for box in task.layout.boxes})
    if len(found) > 1 and not all(part.length for part, _ in found):
        raise InvalidStep("a slice of it has no elements", at=task.name)
    reached = 0
    for part, _ in sorted(found, key=lambda pair: pair[0].start):
        if part.start != reached:
            problem = "are missing" if part.start > reached else "are in two slices"
            low, high = sorted((part.start, reached))
            raise InvalidStep(f"its elements {low} to {high} {problem}", at=task.name)
        reached = part.stop
    if reached not in sizes:
        raise InvalidStep(f"buckets hold {reached} of its elements, a fragment has {sizes}", at=task.name)


def owned(task: Task, found: list[tuple[BucketSlice, Bucket]]) -> None:
    """A matrix is in one piece, in the shard of the replica that updates it."""
    if task.owner is None:
        raise InvalidStep("it has no owner, so no shard is its own", at=task.name)
    if len(found) > 1:
        raise InvalidStep(f"it is a matrix, but lies in {len(found)} slices", at=task.name)
    for part, bucket in found:
        if not bucket.ranks:
            continue
        grid, rank = task.layout.grid, bucket.ranks[part.owner]
        members = set(grid.members())
        # Before tasks move to the replicas of their owners, each replica has as many rows as the others.
        rows = grid.replicas // len(bucket.ranks) if members.issuperset(bucket.ranks) else grid.replicas
        if rank not in members or grid.find(rank)[0] // rows != task.owner[0] // rows:
            raise InvalidStep(f"it lies in the shard of rank {rank}, which is not in its owner's replica", at=task.name)
