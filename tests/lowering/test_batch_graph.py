"""Graphs over lists and stacks of tasks do what the graph of one task does for each of them, bit for bit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from canzona_compile.ir import program_ops
from canzona_compile.ir.fx_utils import graph_module, outputs, placeholders
from canzona_compile.ir.program_ops import parts
from canzona_compile.ir.step import Leaf, Role, Template
from canzona_compile.lowering.batch_graph import (
    FOREACH,
    REDUCTIONS,
    lift_apply,
    lift_prepare,
    lift_stacked,
    overwriting_chain,
)
from canzona_compile.lowering.stacking import stackable
from canzona_compile.machine.hardware import Machine
from tests.harness.random_graphs import NUMBERS, equal, evaluate, templates, values_for
from tests.harness.samples import CPU, Builder, empty
from tests.harness.untimed import untimed

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread")
SINGLE = tuple(NUMBERS)


def tasks_of(template: Template, count: int, seed: int) -> list[dict[str, Any]]:
    return [values_for(template, 100 * seed + i) for i in range(count)]


def lists(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same values as a lifted graph takes them: matrices as lists of copies, numbers once."""
    return {k: v if k in NUMBERS else [t[k].clone() for t in tasks] for k, v in tasks[0].items()}


def one_by_one(graph: fx.Graph, tasks: Sequence[dict[str, Any]]) -> list[list[Tensor]]:
    """Results by output and task."""
    return [list(column) for column in zip(*(evaluate(graph, t) for t in tasks), strict=True)]


def alike(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    assert len(found) == len(expected)
    return all(equal(a, b) for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True))


COUNTS, SEEDS = st.integers(1, 3), st.integers(0, 9)


@untimed(80)
@given(templates(), COUNTS, SEEDS, st.booleans())
def test_prepare_over_lists(template: Template, count: int, seed: int, foreach: bool) -> None:
    tasks = tasks_of(template, count, seed)
    lifted = lift_prepare(template.graph, SINGLE, foreach=foreach, casting=0)
    values = lists(tasks)
    assert alike(evaluate(lifted, values), one_by_one(template.graph, tasks))
    assert alike(
        [values[n] for n in ("param", "grad", "buffer")], [[t[n] for t in tasks] for n in ("param", "grad", "buffer")]
    )


@pytest.mark.full
@untimed(80)
@given(templates(), COUNTS, SEEDS)
def test_compute_loops_over_tasks(template: Template, count: int, seed: int) -> None:
    tasks = tasks_of(template, count, seed)
    values = lists(tasks)
    module = graph_module(template.graph, "compute")
    arguments = [values[str(n.target)] for n in placeholders(template.graph)]
    assert alike(program_ops.each(module, *arguments), one_by_one(template.graph, tasks))


def test_loops_pick_from_lists_of_lists_and_from_keywords() -> None:
    a, b = ([torch.full((1,), float(i + j)) for i in range(2)] for j in (0, 10))
    found = program_ops.each(torch.cat, [a, b], dim=0)
    assert [t.tolist() for t in found] == [[0, 10], [1, 11]]
    found = program_ops.each(torch.sub, a, other=b, alpha=2)
    assert [t.tolist() for t in found] == [[-20], [-21]]


def test_each_task_has_an_entry_of_the_lists_that_calls_return() -> None:
    """Two foreach calls, as in the Muon of pytorch_optimizer: of what the first returns, the second takes an entry."""
    a, b, c = (list(torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(i))) for i in range(3))
    first = program_ops.each(torch.ops.aten._foreach_lerp.Scalar, [a, c], [b, b], 0.25)
    (second,) = program_ops.each(torch.ops.aten._foreach_lerp.Scalar, [first[1]], [first[0]], 0.5)
    expected = [z.lerp(y, 0.25).lerp(x.lerp(y, 0.25), 0.5) for x, y, z in zip(a, b, c, strict=True)]
    assert alike(second, expected)


@pytest.mark.full
@untimed(80)
@given(templates(), COUNTS, SEEDS, st.booleans())
def test_apply_writes_the_leaves_in_place(template: Template, count: int, seed: int, foreach: bool) -> None:
    tasks = tasks_of(template, count, seed)
    lifted = lift_apply(template.graph, template.writes, SINGLE, foreach=foreach)
    values = lists(tasks)
    memory = {name: [t.data_ptr() for t in values[name]] for name in template.writes}
    assert evaluate(lifted, values) == ()
    assert alike([values[name] for name in template.writes], one_by_one(template.graph, tasks))
    assert {name: [t.data_ptr() for t in values[name]] for name in template.writes} == memory


@pytest.mark.full
@untimed(60)
@given(templates(), COUNTS, SEEDS)
def test_prepare_leaves_casts_to_the_copy_into_the_buffer(template: Template, count: int, seed: int) -> None:
    tasks = tasks_of(template, count, seed)
    lifted = lift_prepare(template.graph, SINGLE, foreach=True, casting=1)
    expected = one_by_one(template.graph, tasks)
    found = [
        [v.to(e.dtype) for v, e in zip(f, own, strict=True)]
        for f, own in zip(evaluate(lifted, lists(tasks)), expected, strict=True)
    ]
    assert alike(found, expected)


def test_prepare_drops_the_last_cast_of_what_is_copied_and_of_nothing_else() -> None:
    b = Builder(grad=empty((3, 2)))
    low = b.call("low", aten._to_copy.default, b["grad"], dtype=torch.bfloat16)
    graph = b.returns(low, low)
    sent, kept = evaluate(lift_prepare(graph, (), foreach=True, casting=1), {"grad": [torch.ones(3, 2)]})
    assert (sent[0].dtype, kept[0].dtype) == (torch.float32, torch.bfloat16)


@untimed(80)
@given(templates(), COUNTS, SEEDS, st.booleans(), st.booleans())
def test_compute_over_stacks(template: Template, count: int, seed: int, everything: bool, foreach: bool) -> None:
    """Whatever may run on stacks by itself also does so next to what may not."""
    tasks = tasks_of(template, count, seed)

    def on_stacks(node: fx.Node) -> bool:
        batched = node.target in (aten.mm.default, aten.sum.default)  # other bits, or no rule
        return stackable(node, CPU, exact=True) and not batched and (everything or hash(node.name) % 2 == 0)

    stacked = lift_stacked(template.graph, ("param", "grad"), SINGLE, on_stacks, foreach=foreach)
    values = lists(tasks)
    for name in stacked.inputs:
        values[name] = torch.stack(values[name])
    found = evaluate(stacked.graph, values)
    assert [isinstance(f, Tensor) for f in found] == list(stacked.outputs)
    assert alike([list(f) for f in found], one_by_one(template.graph, tasks))


def test_a_number_per_task_stands_beside_its_matrix() -> None:
    b = Builder(x=empty((3, 2)), total=empty(()))
    graph = b.returns(b.call("scaled", aten.mul.Tensor, b["x"], b["total"]))
    stacked = lift_stacked(graph, ("x",), (), lambda _: True, foreach=True)
    tasks = [{"x": torch.full((3, 2), i + 1.0), "total": torch.tensor(10.0**i)} for i in range(3)]
    values = {"x": torch.stack([t["x"] for t in tasks]), "total": [t["total"] for t in tasks]}
    (found,) = evaluate(stacked.graph, values)
    assert found.shape == (3, 3, 2)
    assert alike([list(found)], one_by_one(graph, tasks))


def test_products_become_batched_products() -> None:
    b = Builder(x=empty((32, 16), torch.bfloat16))
    flipped = b.call("flipped", aten.permute.default, b["x"], [1, 0])
    gram = b.call("gram", aten.mm.default, b["x"], flipped)
    graph = b.returns(b.call("cube", aten.addmm.default, b["x"], gram, b["x"], beta=0.5, alpha=2.0))
    stacked = lift_stacked(graph, ("x",), (), lambda n: stackable(n, CPU, exact=True), foreach=True)
    calls = [n.target for n in stacked.graph.nodes if n.op == "call_function"]
    assert calls == [aten.permute.default, aten.bmm.default, aten.baddbmm.default]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 32, 16, generator=random).bfloat16()
    assert alike([list(evaluate(stacked.graph, {"x": x})[0])], one_by_one(graph, [{"x": t} for t in x]))


def factored() -> fx.Graph:
    """Products, a factorization, numbers that tasks share, and a function that is no operator."""
    b = Builder(x=empty((4, 4)), y=empty((4, 4)), rate=empty(()))
    half = b.call("half", aten.mul.Tensor, b["rate"], 0.5)
    turned = b.call("turned", aten.permute.default, b["x"], [1, 0])
    mixed = b.call("mixed", aten.mm.default, b["y"], turned)
    moved = b.call("moved", aten.sub.Tensor, mixed, b["y"], alpha=2)
    scaled = b.call("scaled", aten.div.Tensor, moved, half)
    both = b.call("both", aten.linalg_qr.default, scaled)
    parts = [b.call(f"part{i}", operator.getitem, both, i) for i in range(2)]
    bare = b.call("bare", torch.sub, parts[0], b["y"])
    last = b.call("last", aten.sub.Tensor, bare, b["y"])
    less = b.call("less", aten.sub.Tensor, half, b["y"])
    return b.returns(parts[1], bare, last, less, b.call("lone", torch.neg, last), half)


OUTPUTS = {  # which are stacks, by what does not run on stacks
    "nothing": (True, True, True, True, False, False),
    "products": (True, False, False, False, False, False),
    "everything": (False, False, False, False, False, False),
}


@pytest.mark.parametrize("alone", OUTPUTS)
@pytest.mark.parametrize("foreach", [False, True])
def test_values_go_from_stacks_to_lists_and_back(foreach: bool, alone: str) -> None:
    """Where a node runs alone."""
    graph = factored()
    random = torch.Generator().manual_seed(0)
    rate = torch.tensor(0.5)  # and products of small integers, so that each order of sums gives the same bits
    tasks = [{n: torch.randint(-9, 9, (4, 4), generator=random).float() for n in "xy"} for _ in range(3)]

    def on_stacks(node: fx.Node) -> bool:
        single = {"nothing": (), "products": (aten.mm.default,)}.get(alone)
        return single is not None and node.target not in (*single, torch.sub, torch.neg)

    found = lift_stacked(graph, ["x"], ["rate"], on_stacks, foreach=foreach)
    assert (found.inputs, found.outputs) == (("x",), OUTPUTS[alone])
    values = {"x": torch.stack([t["x"] for t in tasks]), "y": [t["y"] for t in tasks], "rate": rate}
    *results, shared = evaluate(found.graph, values)
    expected = one_by_one(graph, [{**task, "rate": rate} for task in tasks])
    assert all(equal(shared, own) for own in expected.pop())
    assert alike([list(own) for own in results], expected)


@pytest.mark.parametrize("lead", [(1,), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("shape", [(16, 4), (3, 5)])  # where each begins at a multiple of the alignment, or not
def test_matrices_of_stacks_are_one_stack_or_one_list(lead: tuple[int, ...], shape: tuple[int, int]) -> None:
    stacks = [torch.randn((*lead, *shape)) for _ in range(2)]
    joined, listed = program_ops.join(stacks, len(lead)), program_ops.matrices(stacks, len(lead))
    assert torch.equal(program_ops.join(torch.stack(stacks), len(lead)), joined)
    assert program_ops.join(stacks[:1], len(lead)).data_ptr() == stacks[0].data_ptr()  # one is not copied
    assert alike([listed[: len(joined)]], [list(joined)])
    assert len(listed) == max(1, len(joined))  # there is one to compute with
    assert all(own.data_ptr() % program_ops.MATRIX_ALIGNMENT == 0 for own in listed)
    for values in (joined, listed):
        assert alike([program_ops.divide(values, lead, 2)], [stacks])


# -- in place ----------------------------------------------------------------------------------


def chain_of(graph: fx.Graph) -> set[str]:
    """Names of the nodes that may overwrite `param` on the way to the first result."""
    leaf = next(n for n in placeholders(graph) if n.target == "param")
    results = list(outputs(graph))
    return {n.name for n in overwriting_chain(results[0], leaf, results)}


def muon_like(b: Builder) -> fx.Node:
    decayed = b.call("decayed", aten.mul.Tensor, b["param"], 0.9)
    return b.call("new", aten.add.Tensor, decayed, b["grad"], alpha=-0.1)


@pytest.mark.parametrize("shape", [(96, 64), (64, 96)])
def test_products_of_transposed_matrices_keep_their_bits(shape: tuple[int, int]) -> None:
    """Muon transposes tall ones before it multiplies. On some CPUs 47 of 1,200 differed where the stack was not."""
    random = torch.Generator().manual_seed(5)
    for _ in range(100):
        matrices = [torch.randn(shape, generator=random).bfloat16().mT for _ in range(2)]
        whole = program_ops.stack(matrices)
        assert [value.stride() for value in whole] == [value.stride() for value in matrices]
        assert torch.equal(torch.bmm(whole, whole.mT), torch.stack([value @ value.mT for value in matrices]))


def test_an_update_overwrites_its_parameter() -> None:
    b = Builder(param=empty((3, 2)), grad=empty((3, 2)))
    assert chain_of(b.returns(muon_like(b))) == {"decayed", "new"}


@pytest.mark.parametrize("reason", ["old value is used", "old value is returned", "squared", "another dtype", "broken"])
def test_an_update_does_not_overwrite_what_is_still_needed(reason: str) -> None:
    b = Builder(param=empty((3, 2)), grad=empty((3, 2)))
    new = muon_like(b)
    results = [new]
    match reason:
        case "old value is used":
            results.append(b.call("late", aten.neg.default, b["param"]))
        case "old value is returned":
            results.append(b["param"])
        case "squared":
            squared = b.call("squared", aten.mul.Tensor, b["param"], b["param"])
            results = [b.call("from_square", aten.add.Tensor, squared, b["grad"])]
        case "another dtype":
            results = [b.call("low", aten._to_copy.default, new, dtype=torch.bfloat16)]
        case "broken":
            results = [b.call("from_grad", aten.add.Tensor, b["grad"], 1.0)]
    assert chain_of(b.returns(*results)) == set()


def test_a_second_leaf_that_needs_the_old_value_of_the_first_gets_it() -> None:
    """param and buffer swap: neither may be written before the other was read."""
    shape = (4, 3)
    leaves = tuple(Leaf(r, n, shape, torch.float32) for r, n in ((Role.PARAM, "param"), (Role.STATE, "buffer")))
    b = Builder(param=empty(shape), buffer=empty(shape))
    new = b.call("new", aten.add.Tensor, b["param"], b["buffer"])
    graph = b.returns(new, b.call("kept", aten.mul.Tensor, b["param"], 2.0))
    template = Template("swap", shape, torch.float32, leaves, ("param", "buffer"), graph)
    tasks = [values_for(template, i) for i in range(2)]
    values = {name: [t[name].clone() for t in tasks] for name in ("param", "buffer")}
    evaluate(lift_apply(graph, template.writes, (), foreach=True), values)
    assert alike([values["param"], values["buffer"]], one_by_one(graph, tasks))


@pytest.mark.parametrize("foreach", [False, True])
def test_leaves_are_overwritten_beside_leaves_that_are_new(foreach: bool) -> None:
    shape = (4, 3)
    b = Builder(param=empty(shape), grad=empty(shape), lr=0.5)
    mixed = b.call("mixed", aten.lerp.Scalar, b["param"], b["grad"], 0.25)
    new = b.call("new", aten.neg.default, b.call("moved", aten.add.Tensor, mixed, b["grad"], alpha=b["lr"]))
    graph = b.returns(new, b.call("seen", aten.mul.Tensor, b["grad"], b["lr"]))
    assert chain_of(graph) == {"mixed", "moved", new.name}
    tasks = [{n: torch.full(shape, i + float(n == "grad")) for n in ("param", "grad")} | {"lr": 0.5} for i in range(2)]
    values = lists(tasks) | {"seen": [torch.zeros(shape) for _ in tasks]}
    places = [t.data_ptr() for t in values["param"]]
    assert evaluate(lift_apply(graph, ("param", "seen"), ["lr"], foreach=foreach), values) == ()
    assert alike([values["param"], values["seen"]], one_by_one(graph, tasks))
    assert [t.data_ptr() for t in values["param"]] == places


# -- foreach -----------------------------------------------------------------------------------


def test_foreach_functions_exist_in_both_forms() -> None:
    for name in FOREACH.values():
        assert callable(getattr(torch, f"_foreach_{name}"))
        assert callable(getattr(torch, f"_foreach_{name}_"))


@pytest.mark.parametrize("foreach", [True, False])
def test_foreach_is_used_where_asked_for(foreach: bool) -> None:
    b = Builder(param=empty((3, 2)), grad=empty((3, 2)))
    graph = b.returns(muon_like(b))
    lifted = lift_apply(graph, ["param"], (), foreach=foreach)
    names = {getattr(n.target, "__name__", "") for n in lifted.nodes if n.op == "call_function"}
    assert names == ({"_foreach_mul_", "_foreach_add_"} if foreach else {"each"})
    tasks = [{n: torch.full((3, 2), i + float(n == "grad")) for n in ("param", "grad")} for i in range(3)]
    values = lists(tasks)
    evaluate(lifted, values)
    assert alike([values["param"]], one_by_one(graph, tasks))


def test_lifted_graphs_are_copied_into_modules() -> None:
    b = Builder(param=empty((3, 2)), grad=empty((3, 2)))
    graph = b.returns(muon_like(b))
    module = graph_module(graph, "toy")
    assert module.graph is not graph
    assert "class toy(" in module.print_readable(print_output=False)


def test_parts_of_lists_and_stacks() -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    rows = (slice(0, 2), slice(1, 4))
    found = parts([*values], [(0, *rows), (1, *rows)])
    assert torch.equal(parts(values, [(slice(None), *rows)])[0], torch.stack(found))


@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_and_sums_of_a_stack_run_at_once(keepdim: bool) -> None:
    """On CPU, where their bits are promised, they loop if several threads share one."""
    b = Builder(x=empty((6, 4)))
    norm = b.call("norm", aten.linalg_vector_norm.default, b["x"], 2, None, keepdim)
    rows = b.call("rows", aten.sum.dim_IntList, b["x"], [1], True)
    bounded = b.call("bounded", aten.clamp.default, norm, 1e-7)
    graph = b.returns(b.call("scaled", aten.div.Tensor, b["x"], bounded), b.call("even", aten.div.Tensor, b["x"], rows))
    tasks = [{"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(i))} for i in range(3)]
    for machine, targets in (
        (Machine("cuda", "nccl", 1), {aten.linalg_vector_norm.default, aten.sum.dim_IntList}),
        (CPU, {aten.linalg_vector_norm.default, aten.sum.dim_IntList}),
        (replace(CPU, threads=2), set()),
    ):
        lifted = lift_stacked(graph, ["x"], (), lambda n, m=machine: stackable(n, m, True), foreach=False)
        called = [n.target for n in lifted.graph.nodes if n.op == "call_function"]
        assert {t for t in called if t in REDUCTIONS} == targets
        found = evaluate(lifted.graph, {"x": torch.stack([t["x"] for t in tasks])})
        assert alike([list(own) for own in found], one_by_one(graph, tasks))


def test_numbers_that_tasks_read_are_one_for_each() -> None:
    """Such as the counter that each has in its state."""
    read = program_ops.each(torch.ops.aten._local_scalar_dense.default, [torch.tensor(2.0), torch.tensor(3.0)])
    scaled = program_ops.each(operator.mul, 0.5, read)
    assert list(scaled) == [1.0, 1.5]
    params, grads = ([torch.ones(2), torch.ones(3)] for _ in range(2))
    found = program_ops.each(torch.ops.aten.add.Tensor, params, grads, alpha=scaled)
    assert [one.tolist() for one in found] == [[2.0, 2.0], [2.5, 2.5, 2.5]]
