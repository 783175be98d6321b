"""Capture: one graph per kind of parameter, symbolic numbers, and verdicts about what was captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.utils import counters
from torch.optim import AdamW, Optimizer

import canzona_compile
from canzona_compile.capture.batch_dim import first_dim_is_batch
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.separability import check_separable
from canzona_compile.capture.templates import Capture
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.fx_utils import placeholders
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.step import Form, Leaf, Role, Step, Template
from canzona_compile.passes import Canonicalize
from canzona_compile.rehearsal.rehearsal import rehearse
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from tests.harness import toys
from tests.harness.optimizers import EntriesMuon, StackMuon
from tests.harness.pairs import Pair, feed, muon, parameters
from tests.harness.random_graphs import equal, evaluate, templates, values_for
from tests.harness.samples import CPU, Builder, empty
from tests.harness.toy_optimizers import HostReading
from tests.harness.toys import GlobalNorm, GlobalNormOnHost
from tests.harness.traps.grammar import toy
from tests.harness.untimed import untimed

aten = torch.ops.aten


@pytest.fixture
def untouched_dynamo() -> Iterator[None]:
    """Dynamo's settings are the user's."""
    before = torch._dynamo.config.get_config_copy()
    yield
    assert torch._dynamo.config.get_config_copy() == before


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(shape, dtype, dtype, torch.device("cpu"))


def kinds_of(optimizer: Optimizer, *specs: ParameterSpec) -> tuple[Capture, list[ParamKind]]:
    capture = Capture(optimizer)
    return capture, [capture.kind_of(ParamExample(optimizer.param_groups[0], s, "w")) for s in specs]


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function"]


# -- how often, and how --------------------------------------------------------------------------


def test_parameters_alike_share_a_template() -> None:
    capture, kinds = kinds_of(muon(parameters()), spec(6, 4), spec(4, 6), spec(6, 4), spec(6, 4, dtype=torch.bfloat16))
    assert capture.captures == 3
    assert kinds[0] is kinds[2]
    names = [k.template.name for k in kinds]
    assert names == ["muon_6x4_f32", "muon_4x6_f32", "muon_6x4_f32", "muon_6x4_bf16"]


def test_groups_that_differ_in_numbers_share_templates() -> None:
    groups = [{"params": parameters([(6, 4)]), "lr": lr, "momentum": 1 - lr} for lr in (0.1, 0.2, 0.3)]
    optimizer = muon(groups)
    capture = Capture(optimizer)
    kinds = {id(capture.kind_of(ParamExample(group, spec(6, 4), "w"))) for group in optimizer.param_groups}
    assert (capture.captures, len(kinds)) == (1, 1)
    other = {**optimizer.param_groups[0], "nesterov": False}
    assert id(capture.kind_of(ParamExample(other, spec(6, 4), "w"))) not in kinds


def test_numbers_stay_symbolic() -> None:
    optimizer = muon(parameters(), lr=0.123, momentum=0.877, weight_decay=0.345, eps=1e-6)
    _, (kind,) = kinds_of(optimizer, spec(6, 4))
    leaves = {leaf.name: leaf for leaf in kind.template.inputs}
    scalars = {name for name, leaf in leaves.items() if leaf.role is Role.SCALAR}
    assert scalars == {"lr", "momentum", "weight_decay", "eps"}
    assert kind.template.writes == ("param", "momentum_buffer")
    constants = [a for n in kind.template.graph.nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, float)]
    assert not {0.123, 0.877, 0.345, 1e-6} & set(constants)
    assert kind.recorder is not None
    for lr, momentum in ((0.5, 0.6), (0.25, 0.75)):
        group = {**optimizer.param_groups[0], "lr": lr, "momentum": momentum}
        variant, numbers = kind.recorder.consult(group)
        assert kind.templates[variant] is kind.template
        assert (numbers["lr"], numbers["momentum"], numbers["weight_decay"]) == (lr, momentum, 0.345)


@pytest.mark.full
@pytest.mark.usefixtures("untouched_dynamo")
def test_no_recapture_in_fifty_scheduled_steps() -> None:
    wrapped: Any = canzona_compile.wrap(muon(parameters()))
    for step in range(52):
        group = wrapped.param_groups[0]
        group["lr"], group["momentum"], group["weight_decay"] = 0.1 / (1 + step), 0.9 + step / 1000, 0.1 + step / 100
        feed(wrapped, step)
        wrapped.step()
        if step == 1:
            frames, graphs = dict(counters["frames"]), dict(counters["stats"])
    assert wrapped.canzona.report().captures == 2
    assert (dict(counters["frames"]), dict(counters["stats"])) == (frames, graphs)


@pytest.mark.full
@pytest.mark.usefixtures("untouched_dynamo")
def test_a_dozen_shapes_stay_below_no_limit_of_dynamo() -> None:
    """torch._dynamo.config.recompile_limit is 8 per code object."""
    shapes = [(3 + i, 15 - i) for i in range(12)]
    assert len(shapes) > torch._dynamo.config.recompile_limit
    pair = Pair(shapes=shapes, captures_anew=True)
    pair.steps(2)
    report = pair.report
    assert (report.captures, report.fallbacks, len({t.template for t in report.tasks})) == (12, {}, 12)


@pytest.mark.usefixtures("untouched_dynamo")
def test_many_optimizers_whose_steps_break_stay_below_no_limit_of_dynamo(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo compiles what a break leaves: a method that all of them share."""
    breaking = toy("breaking-first")('print(end="")\nparam.add_(cube(grad), alpha=-group["lr"])')
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2):
        for size in (3, 4, 5):
            pair = Pair(breaking, shapes=[(size, 6)], captures_anew=True)
            pair.steps(2)
            assert [kind.recorder.way for kind in pair.wrapped.canzona.session.capture.kinds.values()] == ["Dynamo"]
    assert not [record for record in caplog.records if "hit config." in record.getMessage()]


@pytest.mark.usefixtures("untouched_dynamo")
def test_compiled_functions_of_the_user_are_left_alone() -> None:
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    compiled(torch.ones(3))
    frames = counters["frames"]["ok"]
    pair = Pair(shapes=[(5, 4)], captures_anew=True)
    pair.step()
    captured = counters["frames"]["ok"]
    assert captured > frames
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert counters["frames"]["ok"] == captured


# -- separability ------------------------------------------------------------------------------

INDEPENDENT: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": muon,
    "adamw-foreach": lambda params: AdamW(params, foreach=True),
    "counting": toys.Counting,
    "host-reading": HostReading,
    "object-keeping": toys.ObjectKeeping,
    "scratch": toys.Scratch,
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_optimizers_pass(name: str) -> None:
    optimizer = INDEPENDENT[name](parameters())
    followed = check_separable(optimizer, ParamExample(optimizer.param_groups[0], spec(6, 4), "w"))
    assert followed is (name != "host-reading"), "a number on the host has no labels"


# Couples parameters through their states: each learns from the one before.
SharedAverage = toy("shared-average", step="before = None")("""
    average = state.setdefault("average", torch.zeros_like(param))
    average.lerp_(grad if before is None else grad + before.norm(), 0.1)
    param.sub_(average)
    before = average
""")
# Independent foreach functions, and one norm of all of them.
ForeachNorm = toy(
    "foreach-norm",
    whole="""
    params = self.param_groups[0]["params"]
    updates = torch._foreach_mul([p.grad for p in params], 0.1)
    total = torch.stack(torch._foreach_norm(updates)).sum()
    torch._foreach_sub_(params, [u / total for u in updates])
    """,
)()


@pytest.mark.parametrize("kind", [GlobalNorm, GlobalNormOnHost, SharedAverage, ForeachNorm])
def test_coupled_optimizers_do_not(kind: type[Optimizer]) -> None:
    optimizer = kind(parameters())  # type: ignore[call-arg]
    with pytest.raises(UnsupportedOptimizer, match="updates parameters together") as caught:
        rehearse(optimizer)
    assert "in a chain, wrap only the matrix optimizer" in str(caught.value)


@pytest.mark.parametrize("kind", [GlobalNorm, SharedAverage, ForeachNorm])
def test_what_can_be_captured_shows_coupling_in_its_graph_too(kind: type[Optimizer]) -> None:
    optimizer = kind(parameters())  # type: ignore[call-arg]
    with pytest.raises(UnsupportedOptimizer, match="updates parameters together") as caught:
        check_separable(optimizer, ParamExample(optimizer.param_groups[0], spec(6, 4), "layer.weight"))
    assert caught.value.at == "layer.weight"


# Reads the norms of all gradients always, and divides large matrices by their sum.
Scales = toy("scales", group='norm = sum(float(p.grad.norm()) for p in group["params"])')(
    'param.sub_(grad.sign(), alpha=0.1 / (norm if param.numel() > group["most"] else 1.0))'
)
# Divides large matrices by the norm of all of them.
Together = toy(
    "together",
    step="""
    params = [param for group in self.param_groups for param in group["params"]]
    norm = sum(p.grad.norm() for p in params if p.numel() > 300)
    """,
)("param.sub_(grad / (norm if param.numel() > 300 else grad.norm()))")


@pytest.mark.parametrize("apart", [False, True], ids=["one group", "two groups"])
def test_a_second_large_matrix_shows_that_they_are_coupled(apart: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(20, 20)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(20, 20)
    optimizer = canzona_compile.wrap(Together(params[:1]))
    optimizer.step()
    if apart:
        optimizer.add_param_group({"params": params[1:]})
    else:
        optimizer.param_groups[0]["params"].append(params[1])
    with pytest.raises(UnsupportedOptimizer, match="updates parameters together"):
        optimizer.step()


HUGE = ((50_000, 20_000), (20_000, 50_000), (50_000, 10_000))


def separable(optimizer: Optimizer) -> bool:
    """Whether the step at the real sizes could be followed; parameters lie in one element, as no memory holds them."""
    param = optimizer.param_groups[0]["params"][0]
    return check_separable(optimizer, ParamExample(optimizer.param_groups[0], ParameterSpec.of(param), "w"))


def huge() -> list[Any]:
    return [torch.nn.Parameter(torch.zeros(()).expand(shape)) for shape in HUGE]


@pytest.mark.parametrize("make", [muon, AdamW, lambda params: AdamW(params, foreach=True, amsgrad=True)])
def test_sizes_that_no_memory_holds_are_stepped(make: Callable[[list[Any]], Optimizer]) -> None:
    assert separable(make(huge()))


def test_numbers_that_are_read_count_where_they_are_used() -> None:
    assert not separable(Scales(huge(), most=math.inf)), "a number on the host has no labels"
    with pytest.raises(UnsupportedOptimizer, match="updates parameters together"):
        separable(Scales(huge(), most=750_000_000))


# Stacks all gradients, which have one shape, and hands out what a function makes of the stack.
Stacking = toy(
    "stacking",
    body="of_stack = None",
    group="""
    stack = torch.stack([param.grad for param in group["params"]])
    updates = iter(self.of_stack(stack).unbind())
    """,
)("param.sub_(next(updates))")


def stacking(of_stack: Callable[[torch.Tensor], torch.Tensor]) -> Optimizer:
    optimizer = Stacking(parameters([(6, 4)] * 2))
    optimizer.of_stack = of_stack
    return optimizer  # type: ignore[no-any-return]


def with_diagonals(stack: torch.Tensor) -> torch.Tensor:
    gram = stack @ stack.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return gram @ stack


def with_neighbour(stack: torch.Tensor) -> torch.Tensor:
    stack[1].add_(stack[0])
    return stack


SEPARATE = {
    "products": lambda s: (s @ s.mT) @ s,
    "in-place": lambda s: s.mul_(2.0).add_(1.0),
    "norms": lambda s: s / s.flatten(1).norm(dim=1)[:, None, None],
    "diagonals": with_diagonals,
    "transposed": lambda s: s.mT.exp().mT,
    "one by one": lambda s: torch.cat([(one * 2.0).unsqueeze(0) for one in s]),
}
TOGETHER = {
    "norm": lambda s: s / s.norm(),
    "sum": lambda s: s - s.sum(0),
    "first": lambda s: s * s[0],
    "neighbour": with_neighbour,
    "order": lambda s: s.flip(0),
    "norms in another order": lambda s: s / s.flatten(1).norm(dim=1).flip(0)[:, None, None],
}


@pytest.mark.parametrize("of_stack", SEPARATE.values(), ids=SEPARATE)
def test_entries_of_a_stack_are_separate(of_stack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert separable(stacking(of_stack))


@pytest.mark.parametrize("of_stack", TOGETHER.values(), ids=TOGETHER)
def test_entries_of_a_stack_that_meet_are_not(of_stack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedOptimizer, match="updates parameters together"):
        separable(stacking(of_stack))


# -- stacks ------------------------------------------------------------------------------------

STACK = (4, 3, 5)


def stack_template(write: Callable[[Builder, fx.Node], fx.Node], shape: Shape = STACK) -> Template:
    """A step param -> param - write(grad) on a stack."""
    leaves = tuple(Leaf(role, role.value, shape, torch.float32) for role in (Role.PARAM, Role.GRAD))
    b = Builder(param=empty(shape), grad=empty(shape))
    graph = b.returns(b.call("new", aten.sub.Tensor, b["param"], write(b, b["grad"])))
    return Template("stack", shape, torch.float32, leaves, ("param",), graph)


def gram(b: Builder, x: fx.Node) -> fx.Node:
    flipped = b.call("flipped", aten.transpose.int, x, 1, 2)
    return b.call("cube", aten.bmm.default, b.call("gram", aten.bmm.default, x, flipped), x)


def reduced(*dims: int) -> Callable[[Builder, fx.Node], fx.Node]:
    def write(b: Builder, x: fx.Node) -> fx.Node:
        return b.call("scaled", aten.mul.Tensor, x, b.call("total", aten.sum.dim_IntList, x, list(dims), True))

    return write


def flattened(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("back", aten.view.default, b.call("flat", aten.view.default, x, [12, 5]), list(STACK))


def operator_product(b: Builder, x: fx.Node) -> fx.Node:
    """`x @ x.mT @ x` as it is captured."""

    def product(name: str, left: fx.Node, right: fx.Node) -> fx.Node:
        pair = []
        for side, operand in (("left", left), ("right", right)):
            shape = list(operand.meta["val"].shape)
            wide = b.call(f"{name}_{side}_expand", aten.expand.default, operand, shape)
            pair.append(b.call(f"{name}_{side}_view", aten.view.default, wide, shape))
        found = b.call(f"{name}_bmm", aten.bmm.default, *pair)
        return b.call(name, aten._unsafe_view.default, found, list(found.meta["val"].shape))

    return product("cube", product("gram", x, b.call("flipped", aten.transpose.int, x, -2, -1)), x)


def rows(b: Builder, x: fx.Node) -> fx.Node:
    entries, m, n = x.meta["val"].shape
    flat = b.call("flat", aten.view.default, x, [entries, 1, m * n])
    scaled = b.call("scaled", aten.div.Tensor, flat, b.call("largest", aten.amax.default, flat, [-1], True))
    return b.call("back", aten.view.default, scaled, [entries, m, n])


def paired(b: Builder, x: fx.Node) -> fx.Node:
    """Pairs of entries, which are added up."""
    pairs = b.call("pairs", aten.view.default, x, [2, 2, 3, 5])
    total = b.call("total", aten.expand.default, b.call("sum", aten.sum.dim_IntList, pairs, [1], True), [2, 2, 3, 5])
    return b.call("back", aten.reshape.default, total, list(STACK))


def numbered(b: Builder, x: fx.Node) -> fx.Node:
    """Every entry times its number, which a rank that has only some of them would count anew."""
    numbers = b.call("numbers", aten.arange.default, 4, device=torch.device("meta"))
    return b.call("y", aten.mul.Tensor, x, b.call("column", aten.view.default, numbers, [4, 1, 1]))


def turned(b: Builder, x: fx.Node) -> fx.Node:
    there = b.call("there", aten.permute.default, x, [1, 0, 2])
    return b.call("back", aten.permute.default, b.call("twice", aten.mul.Tensor, there, 2.0), [1, 0, 2])


def rolled(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("rolled", aten.roll.default, x, [1], [0])


def summed(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("scaled", aten.mul.Tensor, x, b.call("total", aten.sum.default, x))


STACKS: dict[str, tuple[Callable[[Builder, fx.Node], fx.Node], bool]] = {
    "pointwise": (lambda b, x: b.call("y", aten.abs.default, x), True),
    "batched product": (gram, True),
    "sum per matrix": (reduced(1, 2), True),
    "sum per row": (reduced(-1), True),
    "turned and back": (turned, True),
    "sum over entries": (reduced(0), False),
    "sum over everything": (summed, False),
    "rolled along the entries": (rolled, False),
    "merged with rows": (flattened, False),
    "product by an operator": (operator_product, True),
    "a row per entry": (rows, True),
    "in pairs": (paired, False),
    "numbered": (numbered, False),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_independent_matrices(name: str) -> None:
    write, verdict = STACKS[name]
    template = stack_template(write)
    assert first_dim_is_batch(template) is verdict
    if verdict:
        values = values_for(template, 3)
        entries = [{name: values[name][i : i + 1] for name in ("param", "grad")} for i in range(STACK[0])]
        alone = stack_template(write, (1, *STACK[1:]))
        parts = [evaluate(alone.graph, entry)[0] for entry in entries]
        assert torch.equal(torch.cat(parts), evaluate(template.graph, values)[0])


@pytest.mark.full
def test_optimizers_of_stacks() -> None:
    for kind, shape, verdict in ((StackMuon, (4, 6, 5), True), (EntriesMuon, (4, 6, 5), True), (muon, (6, 5), False)):
        optimizer = kind(parameters([shape]))
        _, (captured,) = kinds_of(optimizer, spec(*shape))
        assert not captured.template.interpreted
        assert first_dim_is_batch(captured.template) is verdict


def test_interpreted_steps_are_never_taken_apart() -> None:
    _, (kind,) = kinds_of(HostReading(parameters()), spec(6, 4))
    assert kind.template.interpreted
    assert not first_dim_is_batch(kind.template)


# -- canonicalize ------------------------------------------------------------------------------


def canonical(template: Template) -> Template:
    return Canonicalize()(Step(Form.CAPTURED, "Toy", CPU, (template,), ())).templates[0]


def matrix_template(write: Callable[[Builder], fx.Node], shape: Shape = (3, 5)) -> Template:
    leaves = (*(Leaf(r, r.value, shape, torch.float32) for r in (Role.PARAM, Role.GRAD)), Leaf(Role.SCALAR, "lr"))
    b = Builder(param=empty(shape), grad=empty(shape), lr=0.5)
    return Template("toy", shape, torch.float32, leaves, ("param",), b.returns(write(b)))


def twice(b: Builder, order: list[int], again: list[int]) -> fx.Node:
    once = b.call("once", aten.permute.default, b["grad"], order)
    return b.call("again", aten.permute.default, once, again)


def repeated(target: Any) -> Callable[[Builder], fx.Node]:
    return lambda b: b.call("sum", aten.add.Tensor, b.call("x", target, b["grad"]), b.call("y", target, b["grad"]))


def read(b: Builder) -> fx.Node:
    b.inputs["lr"].meta["val"] = torch.empty((), dtype=torch.float64, device="meta")
    number = b.graph.call_function(aten._local_scalar_dense.default, (b["lr"],))
    number.meta["val"] = 0.5
    return b.call("scaled", aten.mul.Tensor, b["grad"], number)


RULES: dict[str, tuple[Callable[[Builder], fx.Node], list[str]]] = {
    "transposed twice": (lambda b: b.call("y", aten.neg.default, twice(b, [1, 0], [1, 0])), ["neg.default"]),
    "transposed twice, counted from the end": (
        lambda b: b.call("y", aten.neg.default, twice(b, [-1, -2], [1, 0])),
        ["neg.default"],
    ),
    "detached": (lambda b: b.call("y", aten.neg.default, b.call("x", aten.detach.default, b["grad"])), ["neg.default"]),
    "aliased": (lambda b: b.call("y", aten.neg.default, b.call("x", aten.alias.default, b["grad"])), ["neg.default"]),
    "computed twice": (repeated(aten.abs.default), ["abs.default", "add.Tensor"]),
    "drawn twice": (repeated(aten.rand_like.default), ["rand_like.default", "rand_like.default", "add.Tensor"]),
    "a number read": (read, ["mul.Tensor"]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_canonicalize(name: str) -> None:
    write, expected = RULES[name]
    template = matrix_template(write)
    before = str(template.graph)
    assert targets(canonical(template).graph) == expected
    assert str(template.graph) == before  # graphs are immutable


def test_a_transpose_that_is_not_undone_stays() -> None:
    square = matrix_template(lambda b: b.call("y", aten.add.Tensor, b["param"], twice(b, [1, 0], [0, 1])), (4, 4))
    assert targets(canonical(square).graph) == ["permute.default", "permute.default", "add.Tensor"]


def test_unused_numbers_are_dropped_and_unused_tensors_kept() -> None:
    template = canonical(matrix_template(lambda b: b.call("y", aten.neg.default, b["param"])))
    assert [leaf.name for leaf in template.inputs] == ["param", "grad"]
    assert [n.target for n in placeholders(template.graph)] == ["param", "grad"]


@untimed(80)
@given(templates(), st.integers(0, 9))
def test_canonicalize_changes_no_bit(template: Template, seed: int) -> None:
    values, simpler = values_for(template, seed), canonical(template)
    assert len(simpler.graph.nodes) <= len(template.graph.nodes)
    pairs = zip(evaluate(template.graph, values), evaluate(simpler.graph, values), strict=True)
    assert all(equal(a, b) for a, b in pairs)
