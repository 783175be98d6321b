"""Optimizers of every kind either take the plain optimizer's steps, bit for bit, or are refused by name."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer, RMSprop
from torch.utils.flop_counter import FlopCounterMode

import canzona_compile
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedOptimizer
from tests.harness import toys
from tests.harness.layouts import ALONE, Case
from tests.harness.marks import also, first, full
from tests.harness.pairs import (
    Pair,
    Shape,
    different,
    feed,
    muon,
    one_rank,
    parameters,
    params_of,
    same_bits,
    wrapped_muon,
)
from tests.harness.ranks import run
from tests.harness.toy_optimizers import HostReading
from tests.harness.toys import Choosy, GlobalNorm, GlobalNormOnHost, TwoKinds
from tests.harness.trap_runs import frozen_mistakes, verdict
from tests.harness.traps import NAMED
from tests.harness.traps.trap import PLAIN

MIXED = ((6, 4), (4, 6), (7,), (5, 3))


def values_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params_of(optimizer)]


# -- elementwise optimizers --------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[[list[Any]], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.1),
    "adamw-amsgrad": lambda params: AdamW(params, lr=0.1, amsgrad=True),
    "adamw-tensor-lr": lambda params: AdamW(params, lr=torch.tensor(0.1)),
    "adamw-foreach": lambda params: AdamW(params, lr=0.1, foreach=True),
    "adamw-fused": lambda params: AdamW(params, lr=0.1, fused=True),
    "adam-l2": lambda params: Adam(params, lr=0.1, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=0.1),
    "sgd-momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "rmsprop": lambda params: RMSprop(params, lr=0.1),
}


FAST = ("adamw", "adam-l2", "sgd", "rmsprop")


@pytest.mark.parametrize("name", [n if n in FAST else full(n) for n in ELEMENTWISE])
def test_elementwise_optimizers_stay_on_their_rank(name: str) -> None:
    pair = Pair(ELEMENTWISE[name], ((6, 4), (7,)))
    for step in range(4):
        pair.set("weight_decay", 0.1 * step)
        pair.step(*([1] if step == 1 else []))
    assert pair.report.tasks == ()
    assert [t.name for t in pair.report.local] == ["group0.param0", "group0.param1"]


# -- flags of torch's optimizers -----------------------------------------------------------------

FLAGS: dict[str, Callable[[], dict[str, Any]]] = {
    "maximize": lambda: {"maximize": True},
    "foreach": lambda: {"foreach": True},
    "fused": lambda: {"fused": True},
    "capturable": lambda: {"capturable": True},
    "differentiable": lambda: {"differentiable": True},
    "lr": lambda: {"lr": torch.tensor(0.05)},
    "betas": lambda: {"betas": (torch.tensor(0.8), torch.tensor(0.9)), "lr": torch.tensor(0.05), "foreach": False},
    "decoupled_weight_decay": lambda: {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "amsgrad": lambda: {"amsgrad": True, "maximize": True},
}
OF_TORCH = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, Optimizer)
    and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")  # SparseAdam takes no gradients that are dense
]
FLAGGED = [(kind, flag) for kind in OF_TORCH for flag in FLAGS if flag in inspect.signature(kind).parameters]
CORE = ("maximize", "fused", "capturable", "betas", "decoupled_weight_decay")


@pytest.mark.parametrize(
    ("kind", "flag"),
    [pair if pair[1] == "differentiable" or pair in [(Adam, f) for f in CORE] else full(*pair) for pair in FLAGGED],
    ids=str,
)
def test_flags_are_equal_or_refused_by_name(kind: Any, flag: str) -> None:
    """What the plain optimizer refuses on this device, the wrapped one does not step over."""
    shapes, plain_error = ((6, 4), (4, 6)) if kind is Muon else ((6, 4), (7,)), None
    plain = kind(parameters(shapes), **FLAGS[flag]())
    try:
        feed(plain, 0)
        plain.step()
    except Exception as error:  # whatever torch raises
        plain_error = error
    if flag == "differentiable":
        with pytest.raises(UnsupportedOptimizer, match=r"has differentiable=True.*\n.*differentiable=False"):
            canzona_compile.wrap(kind(parameters(shapes), **FLAGS[flag]()))
    elif plain_error is None:
        Pair(lambda params: kind(params, **FLAGS[flag]()), shapes).steps(3)
    else:
        wrapped = canzona_compile.wrap(kind(parameters(shapes), **FLAGS[flag]()))
        feed(wrapped, 0)
        with pytest.raises((type(plain_error), canzona_compile.CanzonaError), match=flag):
            wrapped.step()


def test_differentiable_that_comes_later_is_refused() -> None:
    pair = Pair(ELEMENTWISE["sgd"], ((6, 4),))
    pair.step()
    before = values_of(pair.wrapped)
    pair.wrapped.param_groups[0]["differentiable"] = True
    pair.feed()
    with pytest.raises(UnsupportedOptimizer, match="differentiable=True"):
        pair.wrapped.step()
    with pytest.raises(UnsupportedOptimizer, match="differentiable=True"):
        canzona_compile.explain(SGD(parameters(), differentiable=True))
    assert torch.equal(before[0], values_of(pair.wrapped)[0])
    pair.wrapped.param_groups[0]["differentiable"] = False
    pair.step()


def test_groups_without_matrices() -> None:
    pair = Pair(lambda params: TwoKinds([{"params": params}, {"params": []}]), ((7,), (3,)))
    pair.steps(3)
    assert (pair.report.tasks, len(pair.report.local)) == ((), 2)


def test_matrices_and_elementwise_groups_in_one_optimizer() -> None:
    def make(params: list[Any]) -> Optimizer:
        groups = [{"params": params[:2], "use_muon": True}, {"params": params[2:], "use_muon": False}]
        return TwoKinds(groups)

    pair = Pair(make, MIXED)
    pair.step()
    pair.step(1, 3)
    pair.steps(3)
    assert [t.name for t in pair.report.tasks] == ["group0.param0", "group0.param1"]
    assert [t.name for t in pair.report.local] == ["group1.param0", "group1.param1"]
    assert pair.report.fallbacks == {}


# -- hyperparameters that change ---------------------------------------------------------------


@pytest.mark.full
def test_nesterov_switched_in_mid_run_is_captured_once_more() -> None:
    pair = Pair(shapes=((6, 4),), captures_anew=True)
    captures = []
    for nesterov in (True, False) * 3:
        pair.set("nesterov", nesterov)
        pair.steps(2)
        captures.append(pair.report.captures)
    assert captures[1] > captures[0]
    assert captures[5] == captures[3]


def test_groups_with_coefficients_of_their_own() -> None:
    def make(params: list[Any]) -> Optimizer:
        return muon([{"params": params[:1], "ns_coefficients": (3.0, -4.0, 2.0)}, {"params": params[1:]}])

    pair = Pair(make, ((6, 4), (6, 4)))
    pair.steps(3)
    assert len({t.template for t in pair.report.tasks}) == 2


@pytest.mark.parametrize(
    ("hyper", "values"),
    [
        ("ns_steps", (3, 5)),
        ("ns_coefficients", ((3.0, -4.0, 2.0), (3.4445, -4.7750, 2.0315))),  # constants of the graph
        full("adjust_lr_fn", ("original", "match_rms_adamw")),
        full("weight_decay", (0.0, 0.3)),
    ],
)
def test_other_hyperparameters_changed_in_mid_run(hyper: str, values: tuple[Any, ...]) -> None:
    pair = Pair()
    for value in values:
        pair.set(hyper, value)
        pair.steps(2)


@pytest.mark.full
def test_tensor_learning_rates() -> None:
    pair = Pair(lambda params: muon(params, lr=torch.tensor(0.1)), ((6, 4),), captures_anew=True)
    captures = []
    for _ in range(4):
        pair.step()
        captures.append(pair.report.captures)
        for optimizer in pair.both:
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert captures == captures[:1] * 4


@pytest.mark.parametrize("kind", first([muon, toys.Refreshing]))
def test_dispatch_modes_of_the_caller_change_nothing(kind: Callable[[list[Any]], Optimizer]) -> None:
    pair = Pair(kind, captures_anew=True)
    pair.step()
    captures = pair.report.captures
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            pair.step()
        assert counter.get_total_flops() > 0
        pair.steps(2)
    assert (pair.report.captures, pair.report.fallbacks) == (captures, {})


# -- counters and branches ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [toys.Cubic, toys.Counting, toys.Refreshing, toys.Nesting, toys.Replacing])
def test_counters_and_periodic_work_are_compiled(kind: type[Optimizer]) -> None:
    pair = Pair(kind, captures_anew=True)
    pair.steps(7)
    captures = pair.report.captures
    pair.steps(3)
    assert pair.report.captures == captures
    assert pair.report.fallbacks == {}


@pytest.mark.parametrize("kind", [toys.CountingOnItself, toys.CountingInGroup, *also([toys.LateCounting])])
def test_counters_in_groups_and_on_the_optimizer(kind: type[Optimizer]) -> None:
    pair = Pair(
        lambda params: kind([{"params": params[:2]}, {"params": params[2:]}]), MIXED[:2] + MIXED[3:], captures_anew=True
    )  # type: ignore[call-arg]
    pair.steps(4)
    captures = pair.report.captures
    pair.step(0, 2)
    pair.steps(4)
    assert pair.report.captures == captures
    assert pair.report.fallbacks == {}
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in pair.both]
    assert groups[0] == groups[1]
    assert getattr(pair.plain, "steps", None) == getattr(pair.wrapped, "steps", None)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (HostReading, "toy_optimizers.py, line "),
        (HostReading, ": if update.norm().item() > 10:"),
        (HostReading, "its step needs tensor values"),
        (toys.ObjectKeeping, "a Python object: 'tally'"),
    ],
)
def test_what_cannot_be_traced_is_interpreted_and_says_why(kind: type[Optimizer], reason: str) -> None:
    pair = Pair(kind)
    pair.steps(5)
    assert pair.report.fallbacks.keys() == {"group0.param0", "group0.param1"}
    assert all(reason in why for why in pair.report.fallbacks.values())
    assert reason in pair.report.to_text(width=400)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (toys.Breaking, "the step breaks into several graphs with tensor work; breaking.py, line "),
        (toys.ConstantMaking, "its step makes tensors of Python numbers"),
        (toys.CompilationAware, "the code depends on being compiled"),
    ],
)
def test_what_dynamo_cannot_trace_is_captured_by_dispatch_and_says_why(kind: type[Optimizer], reason: str) -> None:
    pair = Pair(kind)
    pair.steps(5)
    assert pair.report.fallbacks == {}
    for row in canzona_compile.explain(pair.wrapped).parameters:
        assert row.how == "compiled"
        assert "captured by dispatch, because " in row.why
        assert reason in row.why


def test_counters_that_are_tensors_leave_elementwise_steps_on_their_rank() -> None:
    pair = Pair(toys.CountingElementwise, ((6, 4), (7,)))
    pair.step()
    pair.step(1)
    pair.steps(3)
    assert (pair.report.tasks, pair.report.fallbacks) == ((), {})


def test_counters_that_are_tensors_are_named_where_steps_need_whole_matrices() -> None:
    pair = Pair(toys.CountingInATensor)
    pair.steps(3)
    reason = "its step reads a number of a tensor on the host, as .item() does; counting-in-a-tensor.py, line "
    assert [why.startswith(reason) for why in pair.report.fallbacks.values()] == [True, True]


def test_interpreted_tasks_keep_their_state_in_copies_and_checkpoints() -> None:
    pair = Pair(toys.ObjectKeeping)
    pair.steps(2)
    canzona_compile.unwrap(pair.wrapped)
    pair.steps(2)
    canzona_compile.wrap(pair.wrapped)
    pair.steps(2)
    assert [s["tally"].ticks for s in pair.wrapped.state.values()] == [6, 6]


# -- optimizers that are refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (GlobalNorm, "updates parameters together"),
        (GlobalNormOnHost, "updates parameters together"),
        (toys.CountingPerParameter, "updates parameters together"),
        (toys.CountingInAList, "changes self.norms[0]"),
        (toys.AveragingOnItself, "changes self.average"),
        (toys.MemoByParameter, "MemoByParameter.step changes self.memo[parameter], outside of self.state[param]"),
        (toys.ChosenInASet, "depends on which others there are (it knows parameters by self.chosen)"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_the_line(kind: type[Optimizer], why: str) -> None:
    wrapped = canzona_compile.wrap(kind(parameters()))  # type: ignore[call-arg]
    feed(wrapped, 0)
    with pytest.raises(UnsupportedOptimizer) as caught:
        wrapped.step()
    assert why in str(caught.value)
    assert re.search(r"this breaks line \d( or \d)? of the contract", str(caught.value))


@pytest.mark.parametrize("shapes", [((20, 12), (12, 20)), ((20, 12), (12, 20), (16, 16), (8, 10))])
def test_objects_by_parameter_are_refused_whether_small_parameters_show_them_or_not(shapes: Any) -> None:
    wrapped = canzona_compile.wrap(toys.HelperById(parameters(shapes)))
    feed(wrapped, 0)
    with pytest.raises(UnsupportedOptimizer, match=r"step changes self\.helpers\[parameter\], outside") as caught:
        wrapped.step()
    assert "line 4 of the contract" in str(caught.value)
    assert "wrap(optimizer, one_per_matrix=lambda params: HelperById(params))" in str(caught.value)


def test_what_fails_in_autocast_says_so() -> None:
    wrapped = canzona_compile.wrap(toys.AveragingProducts(parameters()))
    feed(wrapped, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedOptimizer, match=r"torch\.autocast"):
        wrapped.step()
    wrapped.step()


def test_caches_of_an_optimizer_are_no_counters() -> None:
    Pair(toys.Caching).steps(3)


def choosy_step(shapes: tuple[tuple[int, ...], ...], closure: Callable[[], Any] | None = None) -> UnsupportedOptimizer:
    """The error of a step, which is of the optimizer's own class and of ours."""
    params = parameters(shapes)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh)) for p in params]
    wrapped = canzona_compile.wrap(Choosy(params))
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError if closure else TypeError) as caught:
        wrapped.step(closure)
    assert isinstance(caught.value, UnsupportedOptimizer)
    assert isinstance(caught.value.__cause__, ValueError | TypeError)
    return pickle.loads(pickle.dumps(caught.value))  # type: ignore[no-any-return]


def test_an_optimizers_own_error_keeps_its_class_and_names_the_parameter() -> None:
    found = choosy_step(((6, 4), (4,), (4, 6)))
    assert "TypeError: only matrices are supported, not 1 dims; choosy.py, line " in str(found)
    assert (found.at, found.hint) == (
        "group0.param1",
        "leave this parameter to another optimizer, as canzona_compile.hidden_matrices(model) and chain() do",
    )


def test_without_a_parameter_that_it_takes_the_error_names_none() -> None:
    found = choosy_step(((4,), (5,)))
    assert (found.at or "", found.hint) == (
        "",
        "this is Choosy's own error: give it the parameters and hyperparameters that it takes",
    )


def test_its_own_error_for_a_closure() -> None:
    found = choosy_step(((6, 4),), lambda: torch.tensor(1.0))
    assert "it raises ValueError: closures are not supported" in str(found)
    assert found.hint == "call loss = closure() yourself, then step() without it"


def test_every_rank_raises_the_optimizers_own_error() -> None:
    found = run(2, choosy_step, ((6, 4), (4,), (4, 6)))
    assert [error.at for error in found] == ["group0.param1"] * 2


def test_an_object_of_one_matrix_raises_an_error_of_its_own() -> None:
    class Picky(Choosy):
        def __init__(self, params: Any) -> None:
            if params[0].ndim != 2:
                raise TypeError("only matrices")
            super().__init__(params)

    params = parameters(((6, 4), (4,)))
    wrapped = canzona_compile.wrap(Choosy(params), one_per_matrix=Picky)
    feed(wrapped, 0)
    with pytest.raises(TypeError, match="only matrices") as caught:
        wrapped.step()
    assert isinstance(caught.value, CanzonaError)
    assert caught.value.at == "group0.param1"


# -- what small parameters lack, and numbers in tensors ----------------------------------------


@pytest.mark.parametrize(
    "trap",
    [
        "heads-that-divide-rows",
        "parts-that-sum-to-rows",
        "rows-of-eight",
        "stacks-of-heads",
        "stacks-with-a-norm-from-1000-elements",
        "scratch-filled",
        "scratch-counts",
        "scratch-filled-once",
        "rate-in-a-tensor-of-its-own",
    ],
)
def test_traps_of_sizes_and_of_numbers_in_tensors(trap: str) -> None:
    assert frozen_mistakes(NAMED[trap], verdict(NAMED[trap], ALONE), PLAIN) == []


def test_explaining_makes_no_tensor_of_a_number() -> None:
    optimizer = NAMED["rate-made-a-tensor"].make(parameters())
    assert {row.how for row in canzona_compile.explain(optimizer).parameters} == {"compiled"}
    assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]


def test_an_optimizer_that_communicates_is_refused() -> None:
    wrapped = canzona_compile.wrap(toys.Communicating(parameters()))
    feed(wrapped, 0)
    with one_rank(), pytest.raises(UnsupportedOptimizer, match="communicates by itself") as caught:
        wrapped.step()
    assert "single-device version" in str(caught.value)


def test_complex_parameters_are_refused() -> None:
    real, made = parameters()[0], torch.nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    wrapped = canzona_compile.wrap(SGD([real, made], lr=0.1))
    with pytest.raises(UnsupportedOptimizer, match="complex parameters") as caught:
        wrapped.step()
    assert caught.value.at == "group0.param1"


# -- gradients ---------------------------------------------------------------------------------


def sparse(param: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(param).to_sparse()


def complex_(param: torch.Tensor) -> torch.Tensor:
    return torch.ones(param.shape, dtype=torch.complex64)


@pytest.mark.parametrize("steps", [0, 2], ids=["at the first step", "later"])
@pytest.mark.parametrize("make", first([Muon, SGD]))
@pytest.mark.parametrize(("gradient", "word"), [(sparse, "sparse_coo"), (complex_, "complex")])
def test_bad_gradients_are_named_and_nothing_is_updated(
    gradient: Callable[[torch.Tensor], torch.Tensor], word: str, make: type[Optimizer], steps: int
) -> None:
    def build(params: list[Any]) -> Optimizer:
        return make(params, lr=0.1)  # type: ignore[call-arg]

    pair = Pair(build)
    pair.steps(steps)
    feed(pair.wrapped, 9)
    second = params_of(pair.wrapped)[1]
    second.grad_dtype = None
    second.grad = gradient(second)
    with pytest.raises(InvalidGradient, match=word) as caught:
        pair.wrapped.step()
    assert caught.value.at == "group0.param1"
    assert different(*pair.both) == []
    pair.steps(2)


def test_nan_gradients_pass_through_as_in_the_plain_optimizer() -> None:
    pair = Pair()
    pair.step()
    for optimizer in pair.both:
        feed(optimizer, 5)
        grad = params_of(optimizer)[0].grad
        assert grad is not None
        grad[1, 2] = float("nan")
        optimizer.step()
    assert different(*pair.both) == []
    poisoned, healthy = params_of(pair.wrapped)
    assert bool(poisoned.isnan().all())
    assert not bool(healthy.isnan().any())


def test_steps_without_any_gradient_do_nothing() -> None:
    wrapped = wrapped_muon()
    before = values_of(wrapped)
    wrapped.step()
    wrapped.step()
    assert all(map(same_bits, before, params_of(wrapped)))
    assert len(wrapped.state) == 0


@pytest.mark.parametrize("make", first([Muon, SGD]))
def test_gradients_wider_than_parameters(make: type[Optimizer]) -> None:
    """As those that a run sums up in 32 bits for parameters in bfloat16."""
    pair = Pair(partial(make, lr=0.1, momentum=0.9), dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        for params in zip(*map(params_of, pair.both), strict=True):
            grad = torch.randn(params[0].shape, generator=random)
            for param in params:
                param.grad_dtype = torch.float32
                param.grad = grad.clone()
        pair.take()
        pair.check()


def test_a_gradient_that_plain_steps_left_in_the_state() -> None:
    """Wrapped later, the optimizer still holds it; a backward pass that writes in place would change its state."""
    plain = NAMED["last-gradient"].make(parameters())
    feed(plain, 0)
    plain.step()
    wrapped = canzona_compile.wrap(plain)
    for param in params_of(wrapped):
        assert param.grad is not None
        param.grad.mul_(2.0)
    with pytest.raises(InvalidGradient, match="written over an earlier gradient"):
        wrapped.step()


@pytest.mark.parametrize("make", [torch.optim.RAdam, torch.optim.NAdam, torch.optim.Adamax])
def test_numbers_of_elementwise_steps_in_16_bits_are_those_of_the_eager_step(make: type[Optimizer]) -> None:
    """Dynamo narrows what they make of a counter that is a tensor."""
    pair = Pair(partial(make, lr=0.01, weight_decay=0.1), ((7, 5),), dtype=torch.bfloat16)
    pair.steps(8)
    # One element in some thousands shows it, so that the own step runs is what counts.
    assert [row.how for row in pair.wrapped.canzona.explain().parameters] == ["local"]


def way_in_16_bits(name: str, shape: Shape) -> str:
    """How a parameter in two fragments runs whose bits are compared step by step."""
    make = partial(getattr(torch.optim, name), lr=0.01, weight_decay=0.1)
    pair = Pair(make, [shape], Case("fsdp", (2,)), dtype=torch.bfloat16)
    pair.steps(4)
    (row,) = pair.wrapped.canzona.explain().parameters
    return str(row.how)


@pytest.mark.parametrize(
    ("name", "shape", "way"),
    [
        ("AdamW", (7, 5), "local"),
        ("Adamax", (64, 64), "local"),
        ("Adamax", (7, 5), "eager"),
        ("SGD", (7, 5), "compiled"),
    ],
)
def test_fragments_in_16_bits_step_locally_where_no_bit_depends_on_its_place(name: str, shape: Shape, way: str) -> None:
    """Elsewhere an owner has the whole, and runs the graph only if it computes its numbers as the step does."""
    assert run(2, way_in_16_bits, name, shape) == [way] * 2
