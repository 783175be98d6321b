"""Every promise of CAPTURED and PLACED has a step here that breaks it, and the verifier says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.layout import Box, Layout
from canzona_compile.ir.step import Form, Placed, Wire
from canzona_compile.ir.verifier import verify
from tests.harness.samples import (
    TOY_SHAPE,
    Builder,
    empty,
    grid_of,
    muon_step,
    rows_layout,
    toy_placed,
    toy_step,
    toy_template,
)
from tests.ir.breaking import Case, Change, cut, fires, task, template

aten = torch.ops.aten


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("grid", [(1, 4), (2, 2), (4, 1), (1, 32), (8, 4)], ids=str)
def test_toy_keeps_every_promise(form: Form, grid: tuple[int, int]) -> None:
    verify(toy_step(form, *grid))


def test_captured_muon_keeps_its_promises() -> None:
    verify(muon_step(grid_of(1, 4), (64, 32), (6, 20)))


def graph_with(op: str, target: Any = None) -> fx.Graph:
    """A graph over the toy's leaves with one unwanted node."""
    b = Builder(**{name: empty(TOY_SHAPE) for name in ("param", "grad", "buffer", "q", "beta", "lr")})
    if op == "call_function":
        b.graph.call_function(target, (b["param"], b["grad"]))
    else:
        b.graph.create_node(op, "anything", ())
    return b.returns(b["param"], b["buffer"], b["q"])


def malformed() -> fx.Graph:
    graph = toy_template().graph
    nodes = {n.name: n for n in graph.nodes}
    nodes["new"].prepend(nodes["update"])  # used before it is defined
    return graph


def boxes(*pairs: tuple[tuple[int, int], tuple[int, int]]) -> Layout:
    return Layout(TOY_SHAPE, grid_of(2, 2), tuple(Box(a, n) for a, n in pairs), "S0")


# -- CAPTURED ----------------------------------------------------------------------------------

LEAVES = toy_template().inputs
CAPTURED: list[Case] = [
    ("malformed", template(graph=malformed()), "malformed", "template toy"),
    ("attribute", template(graph=graph_with("call_module")), "call_module", "%anything"),
    ("mutation", template(graph=graph_with("call_function", aten.add_.Tensor)), "writes to its operand", "%add"),
    ("leaves out of order", template(inputs=LEAVES[::-1]), "not its leaves", "template toy"),
    ("leaf missing", template(inputs=LEAVES[1:]), "not its leaves", "template toy"),
    ("leaf twice", template(inputs=(*LEAVES, LEAVES[0])), "2 leaves of template toy share a name", "param"),
    ("write twice", template(writes=("param", "param", "q")), "2 writes of template toy share a name", "param"),
    ("writes a gradient", template(writes=("param", "grad", "q")), "writes grad, which is neither", "template toy"),
    ("writes what it does not know", template(writes=("param", "other", "q")), "writes other", "template toy"),
    ("too few outputs", template(writes=("param",)), "returns 3 values, not 1", "template toy"),
    ("no such template", task("b", template="muon"), "no template 'muon'", "b"),
    (
        "other shape",
        task("b", layout=rows_layout((4, 3), grid_of(2, 2))),
        "layout is of [4, 3], its template of [6, 3]",
        "b",
    ),
    (
        "two templates of one name",
        lambda step: replace(step, templates=(*step.templates, toy_template())),
        "2 templates share a name",
        "toy",
    ),
    ("boxes overlap", task("a", layout=boxes(((0, 0), (3, 3)), ((2, 0), (3, 3)))), "overlap", "a"),
    ("box outside", task("a", layout=boxes(((0, 0), (3, 3)), ((4, 0), (3, 3)))), "not inside", "a"),
    (
        "box of other rank",
        task("a", layout=boxes(((0, 0), (3, 3)), ((3,), (9,)))),  # type: ignore[arg-type]
        "not inside",
        "a",
    ),
]


@pytest.mark.parametrize("case", CAPTURED, ids=lambda case: case[0])
def test_captured(case: Case) -> None:
    fires(Form.CAPTURED, *case[1:])


def test_captured_tasks_of_one_name() -> None:
    step = toy_step(Form.CAPTURED)
    with pytest.raises(InvalidStep, match="two tasks share a name"):
        replace(step, tasks=(*step.tasks, step.tasks[0]))


def test_a_layout_that_leaves_a_gap_is_refused() -> None:
    layout = toy_step(Form.CAPTURED).tasks[0].layout
    smaller = Box((3, 0), (2, 3))
    object.__setattr__(layout, "boxes", (layout.boxes[0], smaller))
    with pytest.raises(InvalidStep, match="do not cover"):
        verify(task("a", layout=layout)(toy_step(Form.CAPTURED)))


def test_interpreted_templates_may_write_new_state() -> None:
    new_state: Change = template(writes=("param", "buffer", "other"), interpreted="first step")
    verify(new_state(toy_step(Form.CAPTURED)))


# -- PLACED ------------------------------------------------------------------------------------


def retargeted(graph: fx.Graph, node: str, target: Any) -> fx.Graph:
    """The same graph with another operator at a node."""
    next(n for n in graph.nodes if n.name == node).target = target
    return graph


def plain_cut() -> Placed:
    """A fresh cut, whose graphs may be edited."""
    return toy_placed("toy", toy_template(), rows_layout(TOY_SHAPE, grid_of(2, 2)))


def reads(title: str, leaf: str) -> Change:
    """A graph of the cut reads one leaf more."""
    graph: fx.Graph = getattr(plain_cut(), title)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        graph.placeholder(leaf)
    return cut(**{title: graph})


WIRES = plain_cut().gather
PLACED: list[Case] = [
    ("no such cut", task("a", placed="muon"), "no cut 'muon'", "a"),
    ("cut of another kind", task("a", placed="toy@whole"), "for layouts whole", "a"),
    (
        "cut of another template",
        lambda step: replace(step, templates=(toy_template(),)),
        "is not of its template toy",
        "a",
    ),
    (
        "two cuts of one name",
        lambda step: replace(step, placed=(step.placed[0], *step.placed)),
        "2 cuts share a name",
        "toy",
    ),
    (
        "reduction on fragments",
        cut(prepare=retargeted(plain_cut().prepare, "low", aten.sum.default)),
        "aten.sum.default is not pointwise, in prepare",
        "%low",
    ),
    (
        "product on fragments",
        cut(apply=retargeted(plain_cut().apply, "new_param", aten.mm.default)),
        "aten.mm.default is not pointwise, in apply",
        "%new_param",
    ),
    ("compute reads a fragment", reads("compute", "grad"), "compute reads %grad", "cut toy"),
    ("prepare reads what is resident", reads("prepare", "q"), "prepare reads %q", "cut toy"),
    ("apply reads what is resident", reads("apply", "q"), "apply reads %q", "cut toy"),
    ("apply reads a stranger", reads("apply", "other"), "apply reads %other", "cut toy"),
    ("gather wires first", cut(gather=WIRES[::-1]), "first should come low, new", "cut toy"),
    ("kept comes after scatter", cut(kept=("low",)), "first should come update, low", "cut toy"),
    ("prepare returns too little", cut(kept=("new",) * 2), "apply takes", "cut toy"),
    ("gather missing", cut(gather=WIRES[:1]), "compute reads %low", "cut toy"),
    (
        "wire of other type",
        cut(gather=(Wire("new", TOY_SHAPE, torch.float64), WIRES[1])),
        "wire new is torch.float64 [6, 3], its value torch.float32 [6, 3]",
        "cut toy",
    ),
    ("scatter of nothing", cut(scatter=()), "first should come", ""),
    ("a leaf that is not written", cut(fragment_writes=("param", "grad")), "does not write", "cut toy"),
    ("written by the owner", cut(fragment_writes=("param",)), "owner writes buffer", "cut toy"),
    ("resident and not", cut(fragment_writes=("param", "buffer", "q")), "fragments write q", "toy"),
    ("resident parameter", cut(resident=("q", "param")), "resident param is not a state", "cut toy"),
    ("not resident", cut(resident=()), "owner writes q", "cut toy"),
]


@pytest.mark.parametrize("case", PLACED, ids=lambda case: case[0])
def test_placed(case: Case) -> None:
    fires(Form.PLACED, *case[1:])
