"""Optimizers that call functions compiled by `torch.compile`: trials leave no trace in what those remember, and graphs
call them as the step does.

Compiled code is compiled anew when a size or a number differs from call to call, and then it rounds otherwise.
Inductor's does; here a backend stands in for it that adds a little more with every compile.
"""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

import canzona_compile
from canzona_compile.capture.compiled_calls import CompiledCallRecorder, compiled_calls
from canzona_compile.capture.recording import RecordedCall
from canzona_compile.compat.optimizer_class import class_as_written
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.compiled_call import CompiledCall, num_compiled_calls
from canzona_compile.rehearsal.rehearsal import rehearse
from canzona_compile.replica.raised import Note
from canzona_compile.replica.twin import as_written
from tests.harness import compiled_optimizers as toys
from tests.harness.marks import full
from tests.harness.pairs import Pair, different, feed, parameters
from tests.harness.toys import TwoPrecisions
from tests.harness.traps.grammar import toy
from tests.harness.traps.kit import matmul_precision

STEPS = 3
SHAPES = ((24, 16),)  # other than those of miniatures
compiled: list[fx.GraphModule] = []
seen: list[Any] = []  # what compiled code was called with


def rounding_by_history(graph: fx.GraphModule, _examples: Any) -> Any:
    compiled.append(graph)
    number = len(compiled)

    def run(*args: Any) -> tuple[Any, ...]:
        seen.extend(args)
        return tuple(value + number * 1e-3 for value in graph(*args))

    return run


@torch.compile(backend=rounding_by_history)
def averaged(average: Tensor, grad: Tensor, beta: float, number: int = 1) -> Tensor:
    return (average * beta + grad * (1.0 - beta)) / (1.0 - beta**number)


# A matrix optimizer whose average is compiled.
CompiledAverage = toy("compiled-average", outside=f"from {__name__} import averaged")("""
    if not state:
        state["average"], state["number"] = torch.zeros_like(param), 0
    state["number"] += 1
    state["average"] = averaged(state["average"], grad, 0.9, state["number"])
    param.add_(state["average"] / state["average"].norm(), alpha=-group["lr"])
""")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    compiled.clear()
    seen.clear()
    yield
    torch._dynamo.reset()


@torch.compiler.disable
def untraced(grad: Tensor, beta: float) -> Tensor:
    return averaged(grad @ grad.T @ grad, grad, beta)


# The same, called by something that Dynamo does not trace.
BrokenAverage = toy("broken-average", outside=f"from {__name__} import untraced", update="untraced(grad, 0.9)")()


def trained(optimizer: Any) -> Any:
    for step in range(STEPS):
        feed(optimizer, step)
        optimizer.step()
    return optimizer


def test_the_toy_shows_what_it_is_for() -> None:
    one = torch.ones(2)
    assert torch.equal(averaged(one, one, 0.5), averaged(one, one, 0.5))
    assert not torch.equal(averaged(one, one, 0.5), averaged(one, one, 0.25))


def test_a_rehearsal_compiles_nothing() -> None:
    rehearse(CompiledAverage(parameters()))
    assert not compiled


def test_bits_are_those_of_a_process_without_trials() -> None:
    plain = trained(CompiledAverage(parameters(SHAPES)))
    torch._dynamo.reset()
    compiled.clear()
    wrapped = trained(canzona_compile.wrap(CompiledAverage(parameters(SHAPES))))
    assert not different(plain, wrapped)
    assert not wrapped.canzona.report().fallbacks


def test_the_stance_that_users_chose_stays() -> None:
    one = torch.ones(2)
    with as_written():
        averaged(one, one, 0.5)
    assert not compiled
    averaged(one, one, 0.5)
    assert len(compiled) == 1


def test_profilers_go_on_after_calls_were_counted() -> None:
    profiler = cProfile.Profile()
    with profiler, as_written(), compiled_calls() as calls:
        averaged(torch.ones(2), torch.ones(2), 0.5)
    assert len(calls) == 1
    assert sys.getprofile() is None


def test_compiled_functions_never_run_on_fake_tensors() -> None:
    """After a break Dynamo would call them; machine code then reads the memory that fake tensors do not have."""
    trained(canzona_compile.wrap(BrokenAverage(parameters(SHAPES))))
    assert not any(isinstance(value, FakeTensor) for value in seen)


def templates(pair: Pair) -> list[Any]:
    kinds = pair.wrapped.canzona.session.capture.kinds.values()
    return [template for kind in kinds for template in kind.templates.values()]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (toys.CompiledAdam, {2}),
        (toys.CompiledParts, {2, 3}),
        full(toys.CompiledProducts, {1}),
        full(toys.CallingLate, {0, 1}),
    ],
)
def test_compiled_functions_are_called_by_graphs(kind: type[Any], calls: set[int]) -> None:
    pair = Pair(kind, ((6, 4), (5, 7), (6, 4)), captures_anew=True)
    for step in range(4):
        pair.set("lr", 0.1 / (step + 1))
        pair.step()
    assert not pair.report.fallbacks
    captures = pair.report.captures
    pair.steps(4)
    assert pair.report.captures == captures
    assert {num_compiled_calls(template.graph) for template in templates(pair)} == calls


def test_a_graph_shows_what_it_calls() -> None:
    pair = Pair(toys.CompiledAdam, ((6, 4),))
    pair.steps(2)
    (template,) = templates(pair)
    nothing, node = (node for node in template.graph.nodes if isinstance(node.target, CompiledCall))
    assert not nothing.users
    assert str(node.target) == "tests.harness.compiled_optimizers.adam"
    assert {1e-08, "x"} <= set(node.args)  # what never changes; the rest are inputs
    assert len(node.target.written) == 2


def test_the_work_of_compiled_functions_counts() -> None:
    pair = Pair(toys.CompiledProducts, ((6, 4),))
    pair.steps(2)
    (task,) = pair.report.tasks
    products = 2 * 6 * 4 * 6 + 2 * 6 * 6 * 6 + 2 * 6 * 6 * 4
    assert products < task.flops < 1.5 * products


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [toys.CompiledAdam, TwoPrecisions])
def test_stacks_loop_over_what_is_no_operator(kind: type[Any]) -> None:
    """Products of these sizes and this dtype are stacked; what stands between them is not.

    On one thread stacks of products round as single ones do; on several not for all sizes.
    """
    shapes = ((32, 16), (32, 16))
    plain = trained(kind(parameters(shapes, torch.bfloat16)))
    wrapped = trained(canzona_compile.wrap(kind(parameters(shapes, torch.bfloat16))))
    assert not different(plain, wrapped)
    assert not wrapped.canzona.report().fallbacks
    names = [str(getattr(node.target, "__name__", "")) for node in nodes_of(wrapped)]
    assert any(name.startswith("each_") for name in names)


def nodes_of(wrapped: Any) -> list[fx.Node]:
    """All nodes of the program that ran last."""
    module = wrapped.canzona.session.driver.last.executor.program.module
    return [node for own in module.modules() if isinstance(own, fx.GraphModule) for node in own.graph.nodes]


@pytest.mark.parametrize("ambient", ["highest", "medium"])
def test_compiled_products_keep_the_precision_that_the_step_sets(ambient: str) -> None:
    with matmul_precision(ambient):
        pair = Pair(toys.CompiledProducts, ((6, 4),), captures_anew=True)
        pair.steps(3)
    (template,) = templates(pair)
    (call,) = (node.target for node in template.graph.nodes if isinstance(node.target, CompiledCall))
    assert call.precision == "high"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (toys.Pulling, "uses a tensor that it is not given"),
        (toys.ReturningAView, "returns a view"),
        (toys.Hidden, "that its module does not name"),
        (toys.Catching, "its step catches the errors of aten._linalg_check_errors"),
    ],
)
def test_what_one_node_cannot_be_is_interpreted(kind: type[Any], reason: str) -> None:
    pair = Pair(kind)
    pair.steps(2)
    rows = canzona_compile.explain(pair.wrapped).parameters
    assert {row.how for row in rows} == {"eager"}
    assert all(reason in row.why for row in rows), rows[0].why


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [
        (toys.Method, "scaled", "compiled"),
        (toys.EagerMethod, "scaled", "eager"),
        (toys.CompiledStep, "step", "compiled"),
    ],
)
def test_compiled_methods_run_as_written(kind: type[Any], name: str, how: str) -> None:
    """For copies of the optimizer torch compiles them again, and that code rounds otherwise."""
    pair = Pair(kind, captures_anew=True)
    pair.plain.__class__ = class_as_written(kind)
    with pytest.warns(UserWarning, match=f"{kind.__name__} compiles methods, which take the optimizer: {name}"):
        pair.steps(4)
    assert {row.how for row in canzona_compile.explain(pair.wrapped).parameters} == {how}


def test_compiled_functions_that_are_given_the_optimizer_are_refused() -> None:
    pair = Pair(toys.Given)
    with pytest.raises(UnsupportedOptimizer, match="Given compiles a function that takes the optimizer"):
        pair.steps(1)


def test_errors_of_compiled_functions_that_steps_catch_are_met_when_they_come() -> None:
    pair = Pair(toys.Avoiding)
    pair.steps(4)
    rows = canzona_compile.explain(pair.wrapped).parameters
    assert {row.how for row in rows} == {"eager"}
    assert "catches the error of a compiled function" in rows[0].why


def test_random_numbers_in_compiled_functions_are_seen() -> None:
    with pytest.warns(UserWarning, match="draws random numbers"):
        wrapped = trained(canzona_compile.wrap(toys.DrawingInside(parameters())))
    rows = canzona_compile.explain(wrapped).parameters
    assert {row.how for row in rows} == {"eager"}
    assert "draws random numbers" in rows[0].why


def test_a_recorder_that_has_ended_watches_nothing() -> None:
    before = sys.getprofile()
    recorder = CompiledCallRecorder(RecordedCall(), Note())
    with recorder:
        assert sys.getprofile() is not before
    assert sys.getprofile() is before
