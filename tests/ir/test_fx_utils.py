"""Helpers for FX graphs: records of inserted calls are torch's own, parts of graphs compute what the whole does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from canzona_compile.errors import InvalidStep
from canzona_compile.ir.fx_utils import (
    ancestors,
    descendants,
    drop_dead_code,
    from_numbers,
    graph_module,
    insert_call,
    outputs,
    placeholders,
    pointwise,
    subgraph,
    tensor_value,
)
from canzona_compile.kernels.ops import GEMM_AXPBY, PAD_CAST, SYM_GEMM
from tests.harness.samples import Builder, empty

aten = torch.ops.aten
M, N = 6, 4
MAIN = (0, -2, -1)

Inserted = Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], fx.Node]


def on(target: Any, *more: Any, **kwargs: Any) -> Inserted:
    """A call on the wide matrix x alone."""
    return lambda graph, x, s, t: insert_call(graph, target, (x, *more), kwargs)


def turned(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return insert_call(graph, aten.permute.default, (x, [1, 0]))


def factor(graph: fx.Graph, target: Any, operand: fx.Node, index: int) -> fx.Node:
    return insert_call(graph, operator.getitem, (insert_call(graph, target, (operand,)), index))


CALLS: dict[str, Inserted] = {
    "permute": on(aten.permute.default, [1, 0]),
    "transpose": on(aten.transpose.int, 0, 1),
    "slice": on(aten.slice.Tensor, 1, 1, 3),
    "expand": on(aten.expand.default, [3, M, N]),
    "diagonal": on(aten.diagonal.default, *MAIN),
    "cast": on(aten._to_copy.default, dtype=torch.bfloat16),
    "cast a transpose": lambda g, x, s, t: insert_call(
        g, aten._to_copy.default, (turned(g, x),), {"dtype": torch.bfloat16}
    ),
    "reshape a transpose": lambda g, x, s, t: insert_call(g, aten.reshape.default, (turned(g, x), [M * N])),
    "mul of transposes": lambda g, x, s, t: insert_call(g, aten.mul.Tensor, (turned(g, x), turned(g, x))),
    "broadcast": lambda g, x, s, t: insert_call(
        g, aten.mul.Tensor, (x, insert_call(g, aten.sum.dim_IntList, (x, [1], True)))
    ),
    "compare": on(aten.gt.Scalar, 0.5),
    "norm": on(aten.linalg_vector_norm.default, 2, None, False, dtype=torch.float64),
    "mm": lambda g, x, s, t: insert_call(g, aten.mm.default, (s, x)),
    "mm of a transpose": lambda g, x, s, t: insert_call(g, aten.mm.default, (turned(g, x), x)),
    "addmm": lambda g, x, s, t: insert_call(g, aten.addmm.default, (x, s, x), {"beta": 2.0, "alpha": 0.5}),
    "bmm": lambda g, x, s, t: insert_call(
        g, aten.bmm.default, (insert_call(g, aten.expand.default, (s, [3, M, M])),) * 2
    ),
    "sym_gemm": lambda g, x, s, t: insert_call(g, SYM_GEMM, (x, None, s), {"alpha": 2.0, "diag": 1.0}),
    "sym_gemm of a transpose": lambda g, x, s, t: insert_call(g, SYM_GEMM, (turned(g, x),), {"trans": True}),
    "gemm_axpby": lambda g, x, s, t: insert_call(g, GEMM_AXPBY, (s, x)),
    "pad_cast": on(PAD_CAST, dtype=torch.float16),
    "eigenvectors": lambda g, x, s, t: factor(g, aten._linalg_eigh.default, s, 1),
    "Q of a library": lambda g, x, s, t: factor(g, aten.linalg_qr.default, x, 0),
    "R of a library": lambda g, x, s, t: factor(g, aten.linalg_qr.default, x, 1),
    "number on the device": lambda g, x, s, t: insert_call(g, aten.mul.Tensor, (x, t)),
}


def captured() -> tuple[fx.Graph, list[FakeTensor]]:
    """A graph of x [M, N], a symmetric s [M, M] and a 0-d tensor, as capture records it, and its inputs."""
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(M, N), torch.empty(M, M), torch.empty(())]
    graph = make_fx(lambda x, s, t: (x + 0.0, s + 0.0, t + 0.0), tracing_mode="real")(*inputs).graph
    return graph, inputs  # type: ignore[return-value]


def facts(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [facts(v) for v in value]
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.stride()
    return value


def last(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "output")


@pytest.mark.parametrize("name", CALLS)
def test_records_are_those_of_a_fake_run_of_the_whole_graph(name: str) -> None:
    graph, inputs = captured()
    first = [n for n in graph.nodes if n.op == "call_function"]
    with graph.inserting_before(last(graph)):
        made = CALLS[name](graph, *first)
    last(graph).args = (made,)
    graph.lint()
    records = {n.name: facts(n.meta["val"]) for n in graph.nodes if n.op == "call_function"}
    module = graph_module(graph, "Whole")
    FakeTensorProp(module, inputs[0].fake_mode).propagate_dont_convert_inputs(*inputs)
    again = {n.name: facts(n.meta["val"]) for n in module.graph.nodes if n.op == "call_function"}
    assert records == again
    assert isinstance(tensor_value(made), FakeTensor)


@pytest.mark.parametrize("name", CALLS)
def test_graphs_of_meta_tensors_need_no_fake_mode(name: str) -> None:
    """The records are those that fake tensors give, but for the device."""
    fake, _ = captured()
    b = Builder(x=empty((M, N)), s=empty((M, M)), t=empty(()))
    made = CALLS[name](b.graph, *b.inputs.values())
    with fake.inserting_before(last(fake)):
        expected = CALLS[name](fake, *[n for n in fake.nodes if n.op == "call_function"])
    value, like = made.meta["val"], expected.meta["val"]
    assert value.device.type == "meta"
    assert (value.shape, value.dtype, value.stride()) == (like.shape, like.dtype, like.stride())


def test_nothing_is_computed_and_no_gradient_recorded() -> None:
    b = Builder(x=empty((1 << 20, 1 << 20)).requires_grad_())
    made = insert_call(b.graph, aten.mm.default, (b["x"], b["x"]))
    assert tuple(made.meta["val"].shape) == (1 << 20, 1 << 20)
    assert not made.meta["val"].requires_grad


def test_a_call_without_tensors_takes_the_mode_of_the_graph() -> None:
    graph, inputs = captured()
    with graph.inserting_before(last(graph)):
        eye = insert_call(graph, aten.eye.default, (M,), {"dtype": torch.float32, "device": torch.device("cpu")})
    assert eye.meta["val"].fake_mode is inputs[0].fake_mode


# -- numbers -------------------------------------------------------------------------------------


def test_hyperparameters_have_no_record_and_are_floats() -> None:
    b = Builder(x=empty((M, N)), k=torch.empty(M, N, dtype=torch.int64, device="meta"))
    lr = b.graph.placeholder("lr")
    assert facts(insert_call(b.graph, aten.add.Tensor, (b["x"], b["x"]), {"alpha": lr}).meta["val"])[1] == torch.float32
    assert insert_call(b.graph, aten.mul.Tensor, (b["k"], lr)).meta["val"].dtype == torch.float32
    assert facts(insert_call(b.graph, SYM_GEMM, (b["x"],), {"alpha": lr}).meta["val"])[0] == (M, M)


def test_numbers_of_capture_are_symbols_without_a_value() -> None:
    """An operator whose shape rule asks for such a number runs as well: addmm asks for beta."""
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()):
        given = torch.empty((), dtype=torch.float64), torch.empty(M, M)
        graph = make_fx(lambda lr, x: x * lr.item(), tracing_mode="real")(*given).graph
    number = next(n for n in graph.nodes if n.target is aten._local_scalar_dense.default)
    assert isinstance(number.meta["val"], torch.SymFloat)
    x = placeholders(graph)[1]
    with graph.inserting_before(last(graph)):
        scaled = insert_call(graph, operator.mul, (number, 2.0))
        made = insert_call(graph, aten.addmm.default, (x, x, x), {"beta": scaled, "alpha": number})
    assert isinstance(scaled.meta["val"], float)
    assert tuple(made.meta["val"].shape) == (M, M)


def test_arithmetic_never_divides_by_zero() -> None:
    graph = fx.Graph()
    beta = graph.placeholder("beta")
    rest = insert_call(graph, operator.sub, (1.0, beta))
    assert isinstance(insert_call(graph, operator.truediv, (1.0, rest)).meta["val"], float)


# -- names and errors ----------------------------------------------------------------------------


def test_names() -> None:
    b = Builder(x=empty((M, N)))
    names = [insert_call(b.graph, aten.neg.default, (b["x"],), name=name).name for name in (None, None, "minus", "neg")]
    assert names == ["neg", "neg_1", "minus", "neg_2"]
    assert insert_call(b.graph, operator.mul, (2.0, 3.0)).name == "mul"


@pytest.mark.parametrize(
    ("target", "args"),
    [(aten.mm.default, "xx"), (SYM_GEMM, "xxx"), (GEMM_AXPBY, "xx"), (aten.permute.default, "x"), (operator.mul, "x")],
)
def test_operands_that_do_not_fit(target: Any, args: str) -> None:
    b = Builder(x=empty((M, N)))
    with pytest.raises(InvalidStep, match="does not take its operands") as caught:
        insert_call(b.graph, target, [b[name] for name in args])
    assert "%x" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert len(b.graph.nodes) == 1  # nothing was inserted
    assert not b["x"].users


# -- walks and parts -----------------------------------------------------------------------------


def diamond() -> dict[str, fx.Node]:
    """x -> a, b; c = a + b * lr; d reads c, and e reads x."""
    b = Builder(x=empty((2, 2)), lr=0.5)
    nodes = dict(b.inputs)
    nodes["a"] = b.call("a", aten.neg.default, b["x"])
    nodes["b"] = b.call("b", aten.abs.default, b["x"])
    nodes["twice"] = b.call("twice", operator.mul, b["lr"], 2.0)
    nodes["c"] = b.call("c", aten.add.Tensor, nodes["a"], nodes["b"], alpha=nodes["twice"])
    nodes["d"] = b.call("d", aten.mm.default, nodes["c"], nodes["c"])
    nodes["e"] = b.call("e", aten.sum.default, b["x"])
    b.returns(nodes["d"], nodes["e"], 3.0)
    return nodes


def named(nodes: set[fx.Node]) -> set[str]:
    return {n.name for n in nodes}


def test_walks() -> None:
    n = diamond()
    assert named(ancestors([n["c"]])) == {"c", "a", "b", "x", "twice", "lr"}
    assert named(ancestors([n["c"]], stop={n["a"], n["lr"]})) == {"c", "b", "x", "twice"}
    assert named(ancestors([n["a"]], stop={n["a"]})) == set()
    assert named(descendants([n["a"]])) == {"c", "d", "output"}
    assert named(from_numbers(n["x"].graph)) == {"lr", "twice"}  # e is 0-d, but of a matrix
    assert named(from_numbers(n["x"].graph, {"lr"})) == set()
    assert [n.op for n in n["x"].graph.nodes if pointwise(n)] == ["call_function"] * 3


def test_a_part_takes_its_inputs_first_and_keeps_the_records() -> None:
    n = diamond()
    whole = n["x"].graph
    part = subgraph(whole, [n["b"]], [n["c"], 7, n["b"]])
    assert [str(p.target) for p in placeholders(part)] == ["b", "x", "lr"]
    assert [o.name if isinstance(o, fx.Node) else o for o in outputs(part)] == ["c", 7, "b"]
    assert facts(outputs(part)[0].meta["val"]) == facts(n["c"].meta["val"])
    x = torch.randn(2, 2)
    found = graph_module(part, "Part")(x.abs(), x, 0.5)
    assert torch.equal(found[0], -x + x.abs())
    assert "e" in named(set(whole.nodes))  # the whole stays as it is


def test_dead_code_goes_even_if_torch_would_keep_it() -> None:
    b = Builder(x=empty((2, 2)), unused=empty((2,)))
    random = b.call("random", aten.bernoulli.default, b["x"])
    b.call("more", aten.neg.default, random)
    b.call("checked", aten._assert_tensor_metadata.default, b["x"])
    graph = b.returns(b.call("kept", SYM_GEMM, b["x"]))
    assert drop_dead_code(graph) is graph
    assert [n.name for n in graph.nodes] == ["x", "unused", "kept", "output"]
