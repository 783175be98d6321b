"""Where `place` cuts: the fewest bytes, state in one place, and nothing on fragments whose bits would change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from canzona_compile.ir.layout import Grid, Layout, LayoutKind, Shape, local_layout
from canzona_compile.ir.step import Form, Leaf, Placed, Role, Step, Task, Template
from canzona_compile.ir.verifier import verify
from canzona_compile.passes import Place
from tests.harness.random_graphs import equal, evaluate, templates, values_for
from tests.harness.samples import CPU, Builder, empty, grid_of, muon_template, rows_layout
from tests.harness.untimed import untimed

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread")


def place(template: Template, layout: Layout, *, exact: bool = True) -> Placed:
    task = Task("w", 0, 0, template.name, layout)
    step = Place(exact=exact)(Step(Form.CAPTURED, "Toy", CPU, (template,), (task,)))
    verify(step)
    return step.placed[0]


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function"]


# -- exactness ---------------------------------------------------------------------------------


STATE = {"param": Role.PARAM, "grad": Role.GRAD, "ema": Role.STATE}


class Writer(Builder):
    """Writes a step for one matrix."""

    def __init__(self, shape: Shape, *names: str) -> None:
        self.names = names or ("param", "grad")
        super().__init__(**{name: empty(shape) for name in self.names})
        self.leaves = tuple(Leaf(STATE[name], name, shape, torch.float32) for name in self.names)

    def cube(self, x: fx.Node, name: str = "cube") -> fx.Node:
        """x x^T x."""
        flipped = self.call(f"{name}_flipped", aten.permute.default, x, [1, 0])
        return self.call(name, aten.mm.default, self.call(f"{name}_gram", aten.mm.default, x, flipped), x)

    def cast(self, x: fx.Node, dtype: torch.dtype, name: str) -> fx.Node:
        return self.call(name, aten._to_copy.default, x, dtype=dtype)

    def template(self, name: str, *written: fx.Node) -> Template:
        states = tuple(leaf for leaf in self.leaves if leaf.role is Role.STATE)
        writes = ("param", *(leaf.name for leaf in states))
        shape = self.leaves[0].shape
        return Template(name, shape, torch.float32, self.leaves, writes, self.returns(*written), state=states)


def powers(shape: Shape) -> Template:
    """Position-dependent work on both sides of a product: w - (x @ x.T @ x) ** 1.7 of x = grad ** 1.7."""
    b = Writer(shape)
    x = b.call("x", aten.pow.Tensor_Scalar, b["grad"], 1.7)
    update = b.call("update", aten.pow.Tensor_Scalar, b.cube(x), 1.7)
    return b.template("powers", b.call("new", aten.sub.Tensor, b["param"], update))


def test_position_dependent_work_stays_on_the_owner() -> None:
    cut = place(powers((6, 5)), rows_layout((6, 5), grid_of(1, 4)))
    assert targets(cut.prepare) == []
    assert targets(cut.compute).count("pow.Tensor_Scalar") == 2
    assert targets(cut.apply) == ["sub.Tensor"]
    assert [w.name for w in cut.gather] == ["grad"]


def test_it_may_go_to_fragments_that_leave_no_tail() -> None:
    cut = place(rounded_powers((16, 16)), rows_layout((16, 16), grid_of(1, 4)))
    assert cut.kind == LayoutKind(sharded=True, replicated=False, aligned=True)
    assert targets(cut.prepare) == ["pow.Tensor_Scalar", "_to_copy.default"]
    assert targets(cut.apply) == ["_to_copy.default", "pow.Tensor_Scalar", "sub.Tensor"]


def rounded_powers(shape: Shape) -> Template:
    """The same with a product in bfloat16, so that the cheap cut has the powers on the fragments."""
    b = Writer(shape)
    low = b.cast(b.call("x", aten.pow.Tensor_Scalar, b["grad"], 1.7), torch.bfloat16, "low")
    update = b.call("update", aten.pow.Tensor_Scalar, b.cast(b.cube(low), torch.float32, "high"), 1.7)
    return b.template("rounded", b.call("new", aten.sub.Tensor, b["param"], update))


def test_fast_numerics_take_the_cheap_cut_anyway() -> None:
    layout = rows_layout((6, 5), grid_of(1, 4))
    exact, fast = (place(rounded_powers((6, 5)), layout, exact=exact) for exact in (True, False))
    assert [w.itemsize for w in (*exact.gather, *exact.scatter)] == [4, 4]
    assert [w.itemsize for w in (*fast.gather, *fast.scatter)] == [2, 2]


# -- Muon --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "resident", "itemsizes"),
    [
        (grid_of(1, 4), (), (2, 2)),  # FSDP2: the momentum with its fragments, bfloat16 both ways
        (grid_of(2, 2), (), (2, 2)),  # HSDP
        (grid_of(4, 1), ("momentum_buffer",), (4, 2)),  # DDP: gathering is free, one momentum is enough
        (grid_of(1, 1), (), (4, 2)),
    ],
    ids=["fsdp", "hsdp", "ddp", "alone"],
)
def test_muon(grid: Grid, resident: tuple[str, ...], itemsizes: tuple[int, int]) -> None:
    shape = (32, 16)
    layout = rows_layout(shape, grid) if grid.size > 1 else local_layout(shape, 0)
    cut = place(muon_template(shape), layout)
    assert cut.resident == resident
    assert [w.shape for w in (*cut.gather, *cut.scatter)] == [shape] * 2
    if grid.shards > 1:
        assert (cut.gather[0].itemsize, cut.scatter[0].itemsize) == itemsizes
    assert cut.scatter[0].dtype == torch.bfloat16
    products = {"mm.default", "addmm.default"}
    assert products <= set(targets(cut.compute))
    assert not products & {*targets(cut.prepare), *targets(cut.apply)}


def there_and_back(shape: Shape) -> Template:
    """The cheapest cut would bring the first product to the fragments and half of its bytes back again."""
    b = Writer(shape)
    moved = b.call("moved", aten.add.Tensor, b["param"], b.cube(b["grad"], "first"))
    second = b.cube(b.cast(moved, torch.bfloat16, "low"), "second")
    return b.template("there-and-back", b.call("new", aten.sub.Tensor, moved, second))


def test_values_cross_once_in_each_direction() -> None:
    template, layout = there_and_back((6, 5)), rows_layout((6, 5), grid_of(1, 4))
    cut = place(template, layout)
    assert {w.name for w in cut.gather} == {"param", "grad"}
    assert targets(cut.prepare) == []
    values = values_for(template, 1)
    assert equal(step_in_parts(cut, template, layout, 1)["param"], evaluate(template.graph, values)[0])


# -- any graph ---------------------------------------------------------------------------------


def averaged(shape: Shape) -> Template:
    """Averages the new parameter in the state: the new parameter is read where the average is."""
    b = Writer(shape, "param", "grad", "ema")
    new = b.call("new", aten.sub.Tensor, b["param"], b.cube(b["grad"]))
    return b.template("averaged", new, b.call("mean", aten.lerp.Scalar, b["ema"], new, 0.3))


@pytest.mark.parametrize("grid", [grid_of(2, 1), grid_of(1, 2), grid_of(2, 2)], ids=str)
def test_a_new_parameter_that_the_owner_reads_for_its_state_is_scattered(grid: Grid) -> None:
    cut = place(averaged((6, 4)), rows_layout((6, 4), grid))
    assert "param" in cut.fragment_writes
    if grid.shards == 1:
        assert cut.resident == ("ema",)
        assert [w.name for w in cut.scatter] == ["new"]


def step_in_parts(cut: Placed, template: Template, layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """One step as ranks would run it: prepare and apply on every fragment, compute once."""
    whole = values_for(template, seed)
    resident = set(cut.resident)
    fragments = [
        {k: v[box.slices()] if isinstance(v, torch.Tensor) and k not in resident else v for k, v in whole.items()}
        for box in layout.boxes
    ]
    wires = {w.name: torch.empty(w.shape, dtype=w.dtype) for w in cut.gather}
    kept: list[dict[str, torch.Tensor]] = []
    for box, own in zip(layout.boxes, fragments, strict=True):
        own.update({k: v.contiguous() for k, v in own.items() if isinstance(v, torch.Tensor) and k not in resident})
        prepared = evaluate(cut.prepare, own)
        for wire, value in zip(cut.gather, prepared, strict=False):
            wires[wire.name][wire.box(box).slices()] = value
        kept.append(dict(zip(cut.kept, prepared[len(cut.gather) :], strict=True)))
    computed = evaluate(cut.compute, whole | wires)
    scattered = dict(zip([w.name for w in cut.scatter], computed, strict=False))
    found = dict(zip(cut.owner_writes, computed[len(cut.scatter) :], strict=True))
    new = {name: torch.empty(template.shape) for name in cut.fragment_writes}
    for box, own, saved in zip(layout.boxes, fragments, kept, strict=True):
        parts = {w.name: scattered[w.name][w.box(box).slices()].contiguous() for w in cut.scatter}
        for name, value in zip(cut.fragment_writes, evaluate(cut.apply, own | saved | parts), strict=True):
            new[name][box.slices()] = value
    return found | new


@pytest.mark.full
@untimed(150)
@given(templates(), st.integers(1, 2), st.integers(1, 4), st.integers(0, 9))
def test_the_parts_together_are_the_whole(template: Template, replicas: int, shards: int, seed: int) -> None:
    layout = rows_layout(template.shape, grid_of(replicas, shards))
    cut = place(template, layout)
    assert {*cut.fragment_writes, *cut.owner_writes} == set(template.writes)
    expected = dict(zip(template.writes, evaluate(template.graph, values_for(template, seed)), strict=True))
    found = step_in_parts(cut, template, layout, seed)
    for name, value in expected.items():
        assert equal(found[name], value), name


@untimed(60)
@given(templates(("add", "mul", "lerp", "times", "neg")))
def test_pointwise_steps_are_elementwise(template: Template) -> None:
    cut = place(template, rows_layout(template.shape, grid_of(1, 3)))
    assert cut.elementwise
    assert targets(cut.compute) == []
