"""Small steps to test with: Muon as captured, and a toy optimizer lowered by hand to every form.

The toy is made without any pass, so that tests of the verifier do not depend on the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

from canzona_compile.capture.templates import Capture
from canzona_compile.ir.layout import Box, Grid, Layout, LayoutKind, Shape, local_layout
from canzona_compile.ir.program import Program
from canzona_compile.ir.step import (
    Act,
    Batch,
    Buffer,
    BufferUse,
    Event,
    Exchange,
    Form,
    Item,
    Leaf,
    MicroGroup,
    Phase,
    Placed,
    Role,
    Step,
    Strategy,
    Task,
    Template,
    Wire,
)
from canzona_compile.machine.hardware import Machine
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample

aten = torch.ops.aten
CPU = Machine("cpu", "gloo", 1)


def grid_of(replicas: int, shards: int) -> Grid:
    """Ranks 0, 1, 2, ... row by row: FSDP2 with one replica, HSDP with several."""
    return Grid(tuple(tuple(r * shards + s for s in range(shards)) for r in range(replicas)))


def rows_layout(shape: Shape, grid: Grid) -> Layout:
    """Rows cut as FSDP2 cuts them; the last fragments may be short or empty."""
    whole = Box.whole(shape)
    placements = "S0" if grid.replicas == 1 else "R,S0"
    boxes = tuple(whole.cut(0, grid.shards, s) for s in range(grid.shards))
    return Layout(shape, grid, boxes, placements)


# -- Muon, captured ----------------------------------------------------------------------------


@cache
def muon_capture() -> Capture:
    """One for all shapes: that Muon couples no parameters is checked once, which takes longer than a shape."""
    return Capture(small_muon())


@cache
def small_muon() -> torch.optim.Muon:
    """Kept here, because captures do not keep their optimizers."""
    return torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))], lr=2e-2)


@cache
def muon_template(shape: Shape) -> Template:
    """torch.optim.Muon's step for one matrix of float32."""
    capture = muon_capture()
    spec = ParameterSpec(shape, torch.float32, torch.float32, torch.device("cpu"))
    template = capture.kind_of(ParamExample(capture.optimizer.param_groups[0], spec, "weight")).template
    assert not template.interpreted, template.interpreted
    return template


def muon_step(grid: Grid, *shapes: Shape) -> Step:
    """A captured step of one matrix per shape."""
    templates = {shape: muon_template(shape) for shape in shapes}
    tasks = tuple(
        Task(f"layers.{i}.weight", i, 0, templates[shape].name, rows_layout(shape, grid))
        for i, shape in enumerate(shapes)
    )
    return Step(Form.CAPTURED, "Muon", CPU, tuple(templates.values()), tasks)


# -- A toy, lowered by hand --------------------------------------------------------------------
#
#   new  = lerp(buffer, grad, beta)         pointwise: on fragments; a state leaf
#   low  = grad in bfloat16                 so that wires have two element sizes
#   u    = (new * low) @ q                  on the owner
#   q'   = new.T @ new                      resident state
#   w'   = param + lr * u                   pointwise

TOY_SHAPE = (6, 3)
TOY_LEAVES = (
    Leaf(Role.PARAM, "param", TOY_SHAPE, torch.float32),
    Leaf(Role.GRAD, "grad", TOY_SHAPE, torch.float32),
    Leaf(Role.STATE, "buffer", TOY_SHAPE, torch.float32),
    Leaf(Role.STATE, "q", (3, 3), torch.float32),
    Leaf(Role.SCALAR, "beta"),
    Leaf(Role.SCALAR, "lr"),
)


class Builder:
    """Writes a graph whose nodes know their values as meta tensors."""

    def __init__(self, **inputs: torch.Tensor | float) -> None:
        self.graph = fx.Graph()
        self.inputs = {name: self.graph.placeholder(name) for name in inputs}
        for name, value in inputs.items():
            self.inputs[name].meta["val"] = value

    def __getitem__(self, name: str) -> fx.Node:
        return self.inputs[name]

    def call(self, name: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def returns(self, *values: Any) -> fx.Graph:
        self.graph.output(values)
        return self.graph


def empty(shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def toy_fragments(b: Builder) -> tuple[fx.Node, fx.Node]:
    new = b.call("new", aten.lerp.Scalar, b["buffer"], b["grad"], b["beta"])
    return new, b.call("low", aten._to_copy.default, b["grad"], dtype=torch.bfloat16)


def toy_owner(b: Builder, new: fx.Node, low: fx.Node) -> tuple[fx.Node, fx.Node]:
    mixed = b.call("mixed", aten.mul.Tensor, new, low)
    flipped = b.call("flipped", aten.permute.default, new, [1, 0])
    update = b.call("update", aten.mm.default, mixed, b["q"])
    return update, b.call("new_q", aten.mm.default, flipped, new)


def toy_template() -> Template:
    values = {x.name: empty(x.shape, x.dtype) if x.dtype else 0.5 for x in TOY_LEAVES}
    b = Builder(**values)
    new, low = toy_fragments(b)
    update, new_q = toy_owner(b, new, low)
    new_param = b.call("new_param", aten.add.Tensor, b["param"], update, alpha=b["lr"])
    graph = b.returns(new_param, new, new_q)
    writes = ("param", "buffer", "q")
    return Template("toy", TOY_SHAPE, torch.float32, TOY_LEAVES, writes, graph)


def toy_placed(name: str, template: Template, layout: Layout) -> Placed:
    matrix = empty(TOY_SHAPE)
    prepare = Builder(buffer=matrix, grad=matrix, beta=0.5)
    new, low = toy_fragments(prepare)
    compute = Builder(new=matrix, low=empty(TOY_SHAPE, torch.bfloat16), q=empty((3, 3)))
    update, new_q = toy_owner(compute, compute["new"], compute["low"])
    apply = Builder(update=matrix, new=matrix, param=matrix, lr=0.5)
    new_param = apply.call("new_param", aten.add.Tensor, apply["param"], apply["update"], alpha=apply["lr"])
    m, n = sympy.symbols("m n")
    return Placed(
        name=name,
        template=template,
        kind=LayoutKind.of(layout, len(template.shape)),
        prepare=prepare.returns(new, low, new),
        compute=compute.returns(update, new_q),
        apply=apply.returns(new_param, apply["new"]),
        gather=(Wire("new", TOY_SHAPE, torch.float32), Wire("low", TOY_SHAPE, torch.bfloat16)),
        kept=("new",),
        scatter=(Wire("update", TOY_SHAPE, torch.float32),),
        fragment_writes=("param", "buffer"),
        resident=("q",),
        cost=4 * m * n**2,
        flops=216,
    )


def toy_step(form: Form, replicas: int = 2, shards: int = 2) -> Step:
    """Tasks a, b and c; a and b on a grid, c on rank 0 alone. Group 0 is a and b, group 1 is c."""
    template = toy_template()
    near, alone = rows_layout(TOY_SHAPE, grid_of(replicas, shards)), local_layout(TOY_SHAPE, 0)
    cuts: tuple[Placed, ...] = ()
    names = {"a": "", "b": "", "c": ""}
    if form >= Form.PLACED:
        cuts = (toy_placed("toy", template, near), toy_placed("toy@whole", template, alone))
        names = {"a": "toy", "b": "toy", "c": "toy@whole"}
    owners: dict[str, tuple[int, int] | None] = dict.fromkeys("abc")
    kinds = dict.fromkeys("abc", Strategy.OWNER)
    if form >= Form.OWNED:
        owners = {"a": (0, 0), "b": (replicas - 1, shards - 1), "c": (0, 0)}
        kinds["c"] = Strategy.LOCAL
    tasks = tuple(
        Task(
            name,
            i,
            0,
            "toy",
            alone if name == "c" else near,
            names[name],
            kinds[name],
            "",
            owners[name],
        )
        for i, name in enumerate("abc")
    )
    groups = tuple(toy_groups(form, tasks, cuts[0])) if form >= Form.GROUPED else ()
    schedule = toy_schedule(groups) if form >= Form.SCHEDULED else ()
    buffers = toy_buffers(schedule) if form >= Form.SCHEDULED else ()
    program = Program(toy_module(), {}, (), 0) if form >= Form.EMITTED else None
    return Step(form, "Toy", CPU, (template,), tasks, cuts, groups, schedule, buffers, program=program)


def toy_groups(form: Form, tasks: tuple[Task, ...], cut: Placed) -> list[MicroGroup]:
    a, b, c = tasks
    grid = a.layout.grid

    def exchange(phase: Phase, wires: tuple[Wire, ...]) -> Exchange:
        pairs = [(t, w) for w in wires for t in (a, b)]
        return Exchange(phase, tuple(Item(t.name, w, t.owner, t.layout.boxes) for t, w in pairs))

    routed, batched = form >= Form.ROUTED, form >= Form.BATCHED
    first = MicroGroup(
        0,
        ("a", "b"),
        exchange(Phase.GATHER, cut.gather) if routed and grid.shards > 1 else None,
        exchange(Phase.SCATTER, cut.scatter) if routed and grid.shards > 1 else None,
        exchange(Phase.EXCHANGE, cut.scatter) if routed and grid.replicas > 1 else None,
        tuple(Batch("toy", 0, t.owner, (t.name,), False) for t in (a, b)) if batched else (),
    )
    own = (Batch("toy@whole", 0, c.owner, ("c",), False),) if batched else ()
    return [first, MicroGroup(1, ("c",), batches=own)]


def toy_schedule(groups: tuple[MicroGroup, ...]) -> tuple[Event, ...]:
    first = groups[0]
    skipped = {Act.MEET, Act.FETCH, Act.STORE} | {
        act
        for act, exchange in (
            (Act.START_GATHER, first.gather),
            (Act.WAIT_GATHER, first.gather),
            (Act.START_SCATTER, first.scatter),
            (Act.WAIT_SCATTER, first.scatter),
            (Act.START_EXCHANGE, first.exchange),
            (Act.WAIT_EXCHANGE, first.exchange),
        )
        if exchange is None
    }
    local = (Act.PREPARE, Act.COMPUTE, Act.APPLY)
    return (
        *(Event(act, 0) for act in Act if act not in skipped),
        *(Event(act, 1) for act in local),
    )


def toy_buffers(schedule: tuple[Event, ...]) -> tuple[Buffer, ...]:
    at = {event.act: i for i, event in enumerate(schedule) if event.micro_group == 0}
    if Act.START_GATHER not in at:
        return ()
    return (
        Buffer(0, Phase.GATHER, BufferUse.SEND, at[Act.PREPARE], at[Act.WAIT_GATHER], 0),
        Buffer(0, Phase.GATHER, BufferUse.RECEIVE, at[Act.START_GATHER], at[Act.COMPUTE], 1),
        Buffer(0, Phase.SCATTER, BufferUse.SEND, at[Act.COMPUTE], at[Act.WAIT_SCATTER], 0),
    )


def toy_module() -> fx.GraphModule:
    b = Builder(x=empty((2,)))
    return fx.GraphModule({}, b.returns(b.call("y", aten.neg.default, b["x"])))
