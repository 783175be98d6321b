"""Divide the graph of every template between fragments and owner so that the fewest bytes move between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from torch import fx

from canzona_compile.analysis.flops import flops_of, symbolic_flops
from canzona_compile.analysis.minimum_cut import Network
from canzona_compile.ir.bit_exactness import placed_equally
from canzona_compile.ir.fx_utils import (
    ancestors,
    descendants,
    from_numbers,
    outputs,
    placeholders,
    pointwise,
    subgraph,
    tensor_value,
)
from canzona_compile.ir.layout import LayoutKind, Shape
from canzona_compile.ir.step import Form, Leaf, Placed, Role, Step, Template, Wire
from canzona_compile.machine.hardware import Machine

# Every replica repeats the work and the state of FRAGMENT nodes. This is the cost of their bytes, as a fraction of
# the cost of the same bytes on a wire: memory is about 16 times as fast. The cost decides where a transfer is free
# (DDP: the momentum goes to the owner). It is too small to decide where a transfer costs something (HSDP: the
# momentum stays with its fragments).
REDUNDANT = 1 / 16


@dataclass(frozen=True, slots=True)
class Place:
    """Label every node FRAGMENT or OWNER by a minimum cut.

    FRAGMENT nodes run on every rank, on its shard of the parameter. OWNER nodes run on the owner rank, on whole
    matrices. A value that crosses from one side to the other costs its bytes once per direction, however many users
    it has. The rules of the cut are:

    - The parameter and the gradient are FRAGMENT. The new parameter is too, unless only the owner can compute it.
    - A node may be FRAGMENT only if it is pointwise on values of the parameter's shape. Under exact numerics, the
      bits of an element must also not depend on its position in the tensor, unless one rank alone has all of it.
    - A state leaf and its new value have the same label. One that only the owner can store is OWNER.
    - Numbers, and 0-d tensors that are made of numbers, are on every rank and never cross.

    The pass cuts the variants of one step (a family of templates) together, because their graphs share the state
    leaves. State that no known variant reads or writes lives on the owner.

    On replicate dims of the mesh gathering is free, but every replica repeats the work and the state of FRAGMENT
    nodes. There a FRAGMENT node costs `REDUNDANT` times its bytes.
    """

    exact: bool = True

    name: ClassVar[str] = "place"
    requires: ClassVar[Form] = Form.CAPTURED
    ensures: ClassVar[Form] = Form.PLACED

    def __call__(self, step: Step) -> Step:
        families: dict[str, list[Template]] = defaultdict(list)
        for template in step.templates:
            families[template.kin].append(template)
        placed: dict[tuple[str, LayoutKind], Placed] = {}
        dims = {template.name: len(template.shape) for template in step.templates}
        layouts = {(id(t.layout), dims[t.template]): t.layout for t in step.tasks}  # most tasks share one
        kinds = {key: LayoutKind.of(layout, key[1]) for key, layout in layouts.items()}
        kind_of = {task.name: kinds[id(task.layout), dims[task.template]] for task in step.tasks}
        for task in step.tasks:
            kind = kind_of[task.name]
            if (task.template, kind) not in placed:
                own = step.template_of(task)
                family = families[own.kin]
                cut = Cutter(family, kind, step.machine, self.exact).cut()
                for template in family:
                    name = unique_name(template, kind, placed)
                    placed[template.name, kind] = split(template, kind, cut, name)
        tasks = tuple(replace(task, placed=placed[task.template, kind_of[task.name]].name) for task in step.tasks)
        return replace(step, form=Form.PLACED, placed=tuple(placed.values()), tasks=tasks)


def unique_name(template: Template, kind: LayoutKind, placed: dict[tuple[str, LayoutKind], Placed]) -> str:
    """The name for a new cut: the name of the template, followed by the kind of layout if that name is taken."""
    taken = {p.name for p in placed.values()}
    return template.name if template.name not in taken else f"{template.name}@{kind}"


def everywhere(family: Sequence[Template]) -> set[fx.Node]:
    """The nodes that every rank can compute by itself: numbers, and 0-d tensors that are made of such nodes only.

    A 0-d state leaf is one of them only if its new value is one of them in every variant. A step counter qualifies;
    a running norm of the matrix does not.
    """
    barred: set[str] = set()
    while True:
        found = {node for template in family for node in from_numbers(template.graph, barred)}
        names = {n.target for n in found if n.op == "placeholder"}
        dependent = {
            name
            for template in family
            for name, value in zip(template.writes, outputs(template.graph), strict=True)
            if name in names and value not in found
        }
        if not dependent:
            return found
        barred |= dependent


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the nodes of a family of templates run.

    Attributes:
        near: names of the leaves that live with the fragments of the parameter.
    """

    fragment: set[fx.Node]
    everywhere: set[fx.Node]
    near: set[str]


class Cutter:
    """Finds the cheapest cut of a family of templates for one kind of layout, as a minimum cut of a flow network."""

    def __init__(self, family: Sequence[Template], kind: LayoutKind, machine: Machine, exact: bool) -> None:
        self.family, self.kind, self.machine, self.exact = family, kind, machine, exact
        self.shape = family[0].shape
        self.everywhere = everywhere(family)
        graphs = [template.graph for template in family]
        self.nodes = [n for graph in graphs for n in graph.nodes if n.op != "output" and n not in self.everywhere]
        self.leaf: dict[fx.Node, Leaf] = {}
        self.new: list[tuple[str, Any]] = []
        for template in family:
            self.leaf.update(zip(placeholders(template.graph), template.inputs, strict=True))
            self.new += zip(template.writes, outputs(template.graph), strict=True)

    def cut(self) -> Cut:
        """The cheapest cut that follows the rules of `Place`."""
        fragment = self.fragment_nodes()
        near = fragment | self.everywhere
        state = {leaf.name for node, leaf in self.leaf.items() if leaf.role is Role.STATE and node in near}
        return Cut(fragment, self.everywhere, state | {name for name, value in self.new if value in near})

    def may_be_fragment(self, node: fx.Node) -> bool:
        """Whether a node can run on fragments."""
        value = tensor_value(node)
        if value is None or tuple(value.shape) != self.shape:
            return False
        if node.op == "placeholder":
            stored = self.leaf[node].stored
            return stored is None or not stored.whole
        if not pointwise(node):
            return False
        apart = self.kind.sharded or self.kind.replicated or self.kind.lead  # else the fragment is the whole matrix
        if self.exact and apart and not placed_equally(node, self.machine, self.kind.aligned):
            return False
        operands = [(n, v) for n in node.all_input_nodes if (v := tensor_value(n)) is not None]
        if self.kind.lead and any(not v.ndim and n not in self.everywhere for n, v in operands):
            return False  # it has one for each matrix, and a stack of such is not 0-d
        return all(broadcasts(tuple(v.shape), self.shape) for _, v in operands)

    def fragment_nodes(self) -> set[fx.Node]:
        """The FRAGMENT nodes of the cheapest cut.

        No value of the cut that depends on an OWNER node goes back to the owner.
        """
        owner: set[fx.Node] = {n for n in self.nodes if not self.may_be_fragment(n)}
        while True:
            fragment = self._minimum_cut(owner)
            downstream = descendants({n for n in self.nodes if n not in fragment})
            returning = {
                n for n in fragment if n in downstream and any(u in self.nodes and u not in fragment for u in n.users)
            }
            if not returning:
                return fragment
            owner |= returning

    def _minimum_cut(self, owner: set[fx.Node]) -> set[fx.Node]:
        """The FRAGMENT nodes of the cheapest cut in which all nodes of `owner` are OWNER."""
        net: Network[Any] = Network()
        # A gather takes a byte up to the owner. A scatter takes a byte down, and an exchange takes it on to the other
        # replicas. A layout that only replicates needs neither gather nor scatter.
        up = 1.0 if self.kind.sharded or not self.kind.replicated else 0.0
        down = float(self.kind.sharded or not self.kind.replicated) + float(self.kind.replicated)
        for node in self.nodes:
            size = bytes_of(node)
            users = [u for u in node.users if u in self.leaf or u in self.nodes]
            if node in owner:
                net.connect(node, "owner", math.inf)
            elif self.kind.replicated and (node.op != "placeholder" or self.leaf[node].role is Role.STATE):
                net.connect(node, "owner", size * REDUNDANT)
            if users:
                net.connect(node, (node, "up"), size * up)
                net.connect((node, "down"), node, size * down)
                for user in users:
                    net.connect((node, "up"), user, math.inf)
                    net.connect(user, (node, "down"), math.inf)
        for pinned in self._pinned(owner):
            net.connect("fragment", pinned, math.inf)
        for one, other in self._same_home():
            net.connect(one, other, math.inf)
            net.connect(other, one, math.inf)
        fragment = net.far_from("owner", source="fragment")
        return {n for n in self.nodes if n in fragment}

    def _pinned(self, owner: set[fx.Node]) -> Iterable[fx.Node]:
        """The nodes that must be FRAGMENT: the parameter, the gradient and the new parameter.

        If only the owner can compute the new parameter, or the owner needs it for its state, it is not one of these
        nodes, and its value is scattered.
        """
        for node, leaf in self.leaf.items():
            if leaf.role in (Role.PARAM, Role.GRAD) and node in self.nodes:
                yield node
        for name, new in self.new:
            if name == "param" and new in self.nodes and new not in owner:
                yield new

    def _same_home(self) -> Iterable[tuple[fx.Node, fx.Node]]:
        """Pairs of nodes that must have the same label: old and new values of one state leaf, in all variants."""
        values: dict[str, list[fx.Node]] = defaultdict(list)
        for node, leaf in self.leaf.items():
            if leaf.role is Role.STATE:
                values[leaf.name].append(node)
        for name, value in self.new:
            if name != "param":
                values[name].append(value)
        for found in values.values():
            yield from pairwise(n for n in dict.fromkeys(found) if n in self.nodes)


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether a fragment of a value of `shape` broadcasts to the same fragment of a value of shape `to`."""
    return not shape or (len(shape) == len(to) and all(a in (1, b) for a, b in zip(shape, to, strict=True)))


def bytes_of(node: fx.Node) -> float:
    """The size of a node's value in bytes; infinite if the value is not a tensor."""
    value = tensor_value(node)
    return math.inf if value is None else float(value.numel() * value.element_size())


def split(template: Template, kind: LayoutKind, cut: Cut, name: str) -> Placed:
    """Split the graph of a template into prepare, compute and apply."""
    graph = template.graph
    fragment, free = cut.fragment & set(graph.nodes), cut.everywhere
    leaf = dict(zip(placeholders(graph), template.inputs, strict=True))
    owner = [n for n in graph.nodes if n.op != "output" and n not in free and n not in fragment]
    late = descendants(set(owner))
    crossing_up = [n for n in fragment if any(u in owner for u in n.users)]
    new = dict(zip(template.writes, outputs(graph), strict=True))

    def on_fragment(write: str, value: Any) -> bool:
        if template.resident is not None:
            return write not in template.resident
        return value in fragment or value in free or write == "param"

    fragment_writes = tuple(w for w, v in new.items() if on_fragment(w, v))
    owner_writes = tuple(w for w in new if w not in fragment_writes)
    read = [leaf[n].name for n in owner if n.op == "placeholder" and leaf[n].role is Role.STATE]
    untouched = [x.name for x in template.state if x.name not in cut.near | set(fragment_writes)]
    resident = tuple(dict.fromkeys([*read, *owner_writes, *untouched]))
    ordered = list(graph.nodes)
    gather = sorted(crossing_up, key=ordered.index)
    early = ancestors(gather) & fragment
    wanted = {new[w] for w in fragment_writes}
    apply_nodes = [n for n in ordered if n in fragment and n.op != "placeholder" and n not in early]
    needed = {a for n in apply_nodes for a in n.all_input_nodes} | wanted
    scatter = [n for n in ordered if n in owner and n in needed]
    kept = [n for n in ordered if n in early and n.op != "placeholder" and n in needed]
    assert not late & early, "a value goes back to the owner from which it came"
    prepare = subgraph(graph, [], [*gather, *kept])
    compute = subgraph(graph, gather, [*scatter, *(new[w] for w in owner_writes)])
    apply = subgraph(graph, [*scatter, *kept], [new[w] for w in fragment_writes])
    cost = kind.matrices * symbolic_flops(compute, template)
    return Placed(
        name=name,
        template=template,
        kind=kind,
        prepare=prepare,
        compute=compute,
        apply=apply,
        gather=tuple(wire(n, kind.lead) for n in gather),
        kept=tuple(n.name for n in kept),
        scatter=tuple(wire(n, kind.lead) for n in scatter),
        fragment_writes=fragment_writes,
        resident=resident,
        cost=cost,
        flops=flops_of(cost, template.shape),
    )


def wire(node: fx.Node, lead: Shape) -> Wire:
    """The wire that carries the values of a node, with the shape and dtype of all of them.

    Args:
        lead: the dims that count the matrices for each of which there is a value.
    """
    value = tensor_value(node)
    assert value is not None
    return Wire(node.name, (*lead, *value.shape), value.dtype)
