"""What published optimizers do beside the mathematics: each habit is followed bit for bit, or refused."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.errors import UnsupportedOptimizer
from tests.harness import toys
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.pairs import Pair, feed, muon, parameters, params_of
from tests.harness.ranks import run
from tests.harness.toy_optimizers import PerParameter
from tests.harness.traps.grammar import toy

COMPILED = (
    toys.Columns,
    toys.Optional,
    toys.Subtracting,
    toys.Debiasing,
    toys.CountingInState,
    toys.RootOfNorm,
    toys.FreshAverage,
)


@pytest.mark.parametrize("kind", first(COMPILED, 4))
def test_compiled(kind: type[Optimizer]) -> None:
    pair = Pair(kind, captures_anew=True)
    for step in range(10):
        pair.set("lr", 0.1 / (1 + step))
        pair.step()
        if step == 2:
            captures = pair.report.captures
    assert (pair.report.captures, pair.report.fallbacks) == (captures, {})
    assert captures <= 3 * 2


def test_squares_are_elementwise() -> None:
    pair = Pair(toys.Squaring)
    pair.steps(5)
    assert pair.report.tasks == ()


def test_another_formula_for_foreach_is_not_taken_for_the_same() -> None:
    pair = Pair(toys.AnyForeach)
    pair.steps(3)
    assert all("bits of its eager step" in why for why in pair.report.fallbacks.values())
    assert len(pair.report.fallbacks) == 2


def test_interpreted_tasks_count_too() -> None:
    pair = Pair(toys.DebiasingOnHost)
    pair.steps(5)
    assert len(pair.report.fallbacks) == 2
    assert [g["step"] for o in pair.both for g in o.param_groups] == [5, 5]


@pytest.mark.full
def test_counters_in_the_state_are_kept_in_checkpoints() -> None:
    pair = Pair(toys.CountingInState)
    pair.steps(3)
    assert [o.state_dict()["state"]["k"] for o in pair.both] == [3, 3]
    for optimizer in pair.both:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.steps(3)


@pytest.mark.full
@pytest.mark.parametrize("replan", first([False, True]))
def test_hyperparameters_that_decided_about_the_state_change_too_late(replan: bool) -> None:
    pair = Pair(toys.Optional)
    pair.steps(3)
    pair.set("averaged", False)
    if replan:
        for optimizer in pair.both:
            optimizer.load_state_dict(optimizer.state_dict())
    pair.steps(4)
    assert pair.report.fallbacks == {}


class Delegating(PerParameter):
    """Stands for another optimizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups


def test_wrappers_of_optimizers_are_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="is a wrapper around another optimizer") as caught:
        canzona_compile.wrap(Delegating(muon(parameters())))
    assert "call wrap on the optimizer inside it" in str(caught.value)


# -- what surrounds a step -------------------------------------------------------------------------


# A map by parameter, so that each matrix has an object of its own, and settings in a dict or an object.
Configured = toy(
    "configured",
    begin="""
    self.means = {p: torch.zeros_like(p) for p in params}
    self.settings = {"factor": 1.0}
    self.helper = types.SimpleNamespace(factor=1.0)
    """,
)("""
    self.means[param].lerp_(grad, 0.1)
    param.sub_(cube(self.means[param]) * 0.01 * self.settings["factor"] * self.helper.factor)
""")


@pytest.mark.parametrize("inside", ["dict", "object"])
def test_what_users_change_inside_of_an_attribute_is_refused(inside: str) -> None:
    plain, wrapped = Configured(parameters()), Configured(parameters())
    canzona_compile.wrap(wrapped, one_per_matrix=Configured)
    for step in range(2):
        for optimizer in (plain, wrapped):
            feed(optimizer, step)
            optimizer.step()
    assert all(map(torch.equal, params_of(plain), params_of(wrapped)))
    if inside == "dict":
        wrapped.settings["factor"] = 10.0
    else:
        wrapped.helper.factor = 10.0
    feed(wrapped, 2)
    with pytest.raises(UnsupportedOptimizer, match=r"self\.(settings|helper).* changed after the optimizer was built"):
        wrapped.step()
    assert all(map(torch.equal, params_of(plain), params_of(wrapped)))


# Writes a line to a file that it holds.
Logging = toy("logging", body="file = None", end='self.file.write("step\\n")\nself.file.flush()')()


def test_rehearsals_leave_nothing_in_a_file_that_a_step_writes(tmp_path: Any) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        file.write("begin\n")
        wrapped: Any = Logging(parameters())
        wrapped.file = file
        canzona_compile.wrap(wrapped)
        feed(wrapped, 0)
        canzona_compile.explain(wrapped)
    assert path.read_text() == "begin\n"


# Counts its steps in a variable of the context.
Contextual = toy(
    "contextual",
    outside='COUNT = contextvars.ContextVar("COUNT", default=0)',
    step="COUNT.set(COUNT.get() + 1)",
    update="cube(grad) * 0.1",
    scale="COUNT.get()",
)()


def test_variables_of_the_context_stay_what_they_are() -> None:
    wrapped: Any = canzona_compile.wrap(Contextual(parameters()))
    feed(wrapped, 0)
    with pytest.raises(UnsupportedOptimizer, match="COUNT"):
        wrapped.step()
    assert sys.modules[Contextual.__module__].COUNT.get() == 0


# Knows itself by a proxy.
Proxied = toy("proxied", begin="self.own = weakref.proxy(self)", update="cube(grad) * 0.1")()


# Steps in a thread of its own, which no mode follows.
InThread = toy(
    "in-thread",
    outside="import threading",
    body="""
    def step(self, closure=None):
        thread = threading.Thread(target=super().step)
        thread.start()
        thread.join()

    def update(self, param, grad, group, state):
        param.sub_(cube(grad) * 0.01)
    """,
)()


@pytest.mark.parametrize("kind", [Proxied, InThread])
def test_proxies_and_threads(kind: Any) -> None:
    Pair(kind).steps(3)


class CountsCalls(torch.overrides.TorchFunctionMode):
    """A user's mode with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("explained", [False, True])
def test_function_modes_of_users(explained: bool) -> None:
    pair = Pair(captures_anew=True)
    if explained:
        canzona_compile.explain(pair.wrapped)
    with CountsCalls() as mode:
        pair.steps(3)
    assert mode.count > 0
    assert pair.report.fallbacks == {}


def new_data(of: str) -> set[str]:
    pair = Pair(partial(toys.NewData, of=of), ((8, 6), (5, 4)), compares_state=False, case=Case("fsdp", (2,)))
    pair.steps(3)
    return {row.how for row in canzona_compile.explain(pair.wrapped).parameters}


@pytest.mark.parametrize("of", ["param", "state"])
def test_new_data_reaches_fragments(of: str) -> None:
    """Torch changes what holds a fragment then, and the fragment stays: the plain step does nothing on shards."""
    assert run(2, new_data, of) == [{"eager"}] * 2
