"""A chain keeps every promise of torch.optim.Optimizer, wrapped or not, beside its optimizers stepped by hand."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import canzona_compile
from canzona_compile import CanzonaError, Chain, chain
from tests.harness.chains import SHAPES, Hand, both, chained, either, everything, steps
from tests.harness.mistakes import refused
from tests.harness.optimizers import shared_captures
from tests.harness.pairs import parameters, params_of, same_bits

pytestmark = pytest.mark.usefixtures("captures_shared")

# -- the object --------------------------------------------------------------------------------


@both
@either
def test_steps_are_those_of_its_optimizers(name: str, wrapped: bool) -> None:
    made = chained(name, wrapped)
    steps(made, range(4), Hand(name))
    assert isinstance(made, Optimizer)
    assert canzona_compile.is_wrapped(made) is wrapped


@both
@either
def test_groups_are_the_very_dicts_and_state_is_a_view(name: str, wrapped: bool) -> None:
    made = chained(name, wrapped)
    steps(made, range(2))
    inner = [group for own in made.optimizers for group in own.param_groups]
    assert [id(group) for group in made.param_groups] == [id(group) for group in inner]
    made.param_groups[-1]["lr"] = 0.5
    assert made.optimizers[-1].param_groups[-1]["lr"] == 0.5
    assert len(made.state) == sum(len(own.state) for own in made.optimizers)
    first, last = params_of(made)[0], params_of(made)[-1]
    assert made.state[first] is made.optimizers[0].state[first]
    made.state[last] = {"mine": 1}
    assert made.optimizers[-1].state[last] == {"mine": 1}
    del made.state[last]
    assert last not in made.optimizers[-1].state
    with pytest.raises(KeyError):
        made.state[torch.zeros(1)]


@either
def test_what_optimizers_hold_stays_when_a_chain_is_made_of_them(wrapped: bool) -> None:
    hand = Hand("three")
    first, made = chained("three"), None
    steps(first, range(2), hand)
    made = chain(*first.optimizers)
    if wrapped:
        canzona_compile.wrap(made)
    assert len(made.state) == len(params_of(made))
    steps(made, range(2, 4), hand)


def test_a_list_of_groups_cannot_grow_unnoticed() -> None:
    made = chained("two")
    changes: list[Callable[[Any], Any]] = [
        lambda groups: groups.append({"params": []}),
        lambda groups: groups.sort(key=id),
        lambda groups: groups.clear(),
        lambda groups: operator.setitem(groups, slice(None), groups[:1]),
        lambda groups: operator.setitem(groups, slice(None), groups[::-1]),
        lambda groups: operator.setitem(groups, slice(2, None), [{"params": []}]),
        lambda groups: operator.setitem(groups, 0, {"params": parameters([(6, 4)])}),
        lambda groups: setattr(made, "param_groups", [*groups, {"params": parameters([(6, 4)])}]),
    ]
    before = list(made.param_groups)
    for change in changes:
        with refused("of its optimizers", at="chain.param_groups", hint=r"chain.add_param_group\(group, to=...\)"):
            change(made.param_groups)
        assert [*map(id, made.param_groups)] == [*map(id, before)]
    for taken in (copy.copy(made.param_groups), copy.deepcopy(made.param_groups)):
        taken.append({"params": []})
    assert len(pickle.loads(pickle.dumps(made.param_groups))) == len(made.param_groups)


@either
def test_groups_may_be_set_as_a_whole(wrapped: bool) -> None:
    made = chained("three", wrapped)
    made.param_groups = [{**group, "lr": 0.7} for group in made.param_groups]
    assert [group["lr"] for own in made.optimizers for group in own.param_groups] == [0.7] * 4
    with pytest.raises(CanzonaError):
        made.param_groups = made.param_groups[:1]


@either
def test_empty_groups_may_be_left_out(wrapped: bool) -> None:
    """As DeepSpeed does with the groups of any optimizer."""
    made, hand = chained("three"), Hand("three")
    for own in (*made.optimizers, *hand.optimizers):
        own.add_param_group({"params": []})
    if wrapped:
        canzona_compile.wrap(made)
    steps(made, range(1), hand)
    groups = made.param_groups
    groups[:] = list(groups)
    assert [len(own.param_groups) for own in made.optimizers] == [2, 2, 3]
    groups[:] = [group for group in groups if group["params"]]
    assert [len(group["params"]) for group in made.param_groups] == [len(group["params"]) for group in groups]
    assert [len(own.param_groups) for own in made.optimizers] == [1, 1, 2]
    steps(made, range(1, 3), hand)


@both
@either
def test_a_group_is_added_to_one_of_its_optimizers(name: str, wrapped: bool) -> None:
    made, hand = chained(name, wrapped), Hand(name)
    steps(made, range(2), hand)
    for to, target in ((0, made), (made.optimizers[-1], made)):
        target.add_param_group({"params": parameters([(8, 4)], seed=7 if to == 0 else 8)}, to=to)
    hand.optimizers[0].add_param_group({"params": parameters([(8, 4)], seed=7)})
    hand.optimizers[-1].add_param_group({"params": parameters([(8, 4)], seed=8)})
    steps(made, range(2, 4), hand)
    with refused(hint="0 is Muon"):
        made.add_param_group({"params": parameters([(2, 2)])})
    with pytest.raises(CanzonaError):
        made.add_param_group({"params": params_of(made.optimizers[0])}, to=1)


@either
def test_unwrap_and_steps_before_wrap(wrapped: bool) -> None:
    made, hand = chained("two", wrapped), Hand("two")
    steps(made, range(2), hand)
    if wrapped:
        assert canzona_compile.unwrap(made) is made
        assert type(made) is Chain
        assert not hasattr(made, "canzona")
        assert type(made.optimizers[0]) is Muon
    else:
        canzona_compile.wrap(made)
    steps(made, range(2, 4), hand)


def test_a_second_wrap_with_equal_options_changes_nothing() -> None:
    made = chained("two", wrapped=True)
    sessions = made.canzona.sessions
    assert canzona_compile.wrap(made) is made
    assert made.canzona.sessions == sessions
    with pytest.raises(CanzonaError, match="different options"):
        canzona_compile.wrap(made, depth=3)


# -- schedulers, hooks, closures, GradScaler ---------------------------------------------------


@either
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_or_after_wrap(when: str, wrapped: bool) -> None:
    """Warnings of torch (a step that the scheduler did not see) are errors in this suite."""
    made, hand = chained("two", wrapped and when == "after"), Hand("two")
    schedulers = [LambdaLR(own, lambda step: 1 / (1 + step)) for own in (made, *hand.optimizers)]
    if wrapped and when == "before":
        canzona_compile.wrap(made)
    for step in range(4):
        steps(made, [step], hand)
        for scheduler in schedulers:
            scheduler.step()
    assert [group["lr"] for group in made.param_groups] == [0.1 * (1 / 5)] * 2


@either
def test_hooks_run_once(wrapped: bool) -> None:
    made, calls = chained("two", wrapped), []
    made.register_step_pre_hook(lambda *_: calls.append("pre"))
    made.register_step_post_hook(lambda *_: calls.append("post"))
    made.optimizers[1].register_step_pre_hook(lambda *_: calls.append("pre of AdamW"))
    made.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    made.register_state_dict_post_hook(lambda *_: calls.append("after save"))
    made.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    made.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
    steps(made, range(2))
    made.load_state_dict(made.state_dict())
    saved = ["before save", "after save", "before load", "after load"]
    assert calls == ["pre", "pre of AdamW", "post"] * 2 + saved


@either
@pytest.mark.parametrize("where", ["chain", "member", "all"])
def test_a_pre_hook_may_change_gradients(where: str, wrapped: bool) -> None:
    made, hand = chained("two", wrapped), Hand("two")

    def double(optimizer: Optimizer, *_: Any) -> None:
        if where == "all" and not isinstance(optimizer, AdamW):
            return
        for param in params_of(optimizer):
            param.grad = None if param.grad is None else param.grad * 2 + 1

    handle = register_optimizer_step_pre_hook(double) if where == "all" else None
    if where == "chain":
        made.register_step_pre_hook(double)
        for optimizer in hand.optimizers:
            optimizer.register_step_pre_hook(double)
    elif where == "member":
        for optimizer in (made.optimizers[0], hand.optimizers[0]):
            optimizer.register_step_pre_hook(double)
    steps(made, range(3), hand)
    if handle is not None:
        handle.remove()


@both
@either
def test_a_closure_runs_once_with_gradients_before_all_steps(name: str, wrapped: bool) -> None:
    made = chained(name, wrapped)
    calls: list[bool] = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        made.zero_grad()
        loss = torch.stack([(p**2).sum() for p in params_of(made)]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(made.step(closure)) for _ in range(3)]
    assert calls == [True] * 3
    assert losses[0] > losses[-1]
    assert made.step() is None


@both
@either
def test_grad_scaler_skips_the_steps_of_all_optimizers(name: str, wrapped: bool) -> None:
    made = chained(name, wrapped)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for step in range(4):
        made.zero_grad()
        loss = torch.stack([(p * (step + 1)).square().sum() for p in params_of(made)]).sum()
        before = [p.detach().clone() for p in params_of(made)]
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(made)
        scaler.update()
        moved.append([not same_bits(a, b) for a, b in zip(before, params_of(made), strict=True)])
    assert [any(m) for m in moved] == [True, True, False, True]
    assert all(moved[3])  # SOAP only finds its basis in the first step


@either
def test_zero_grad(wrapped: bool) -> None:
    made = chained("two", wrapped)
    steps(made, [0])
    made.zero_grad(set_to_none=False)
    assert [p.grad is not None and float(p.grad.abs().sum()) for p in params_of(made)] == [0.0] * 6
    made.zero_grad()
    assert [p.grad for p in params_of(made)] == [None] * 6


@either
def test_parameters_without_gradients_are_skipped(wrapped: bool) -> None:
    made, hand = chained("two", wrapped), Hand("two")
    for number, missing in enumerate(([0, 5], [], [1, 4])):
        for optimizers in (made.optimizers, hand.optimizers):
            everything(optimizers, number)
            params = [p for own in optimizers for p in params_of(own)]
            for i in missing:
                params[i].grad = None
        made.step()
        for optimizer in hand.optimizers:
            optimizer.step()
        assert hand.different(made) == []


# -- what is shown -----------------------------------------------------------------------------


def test_one_handle_for_all(tmp_path: Any) -> None:
    made = chained("three", wrapped=True)
    ahead = made.canzona.explain()
    with pytest.raises(CanzonaError, match="no plan yet"):
        made.canzona.report()
    steps(made, range(2))
    assert [(p.name, p.how, p.why) for p in made.canzona.explain().parameters] == [
        (p.name, p.how, p.why) for p in ahead.parameters
    ]
    report = made.canzona.report()
    assert [task.name for task in report.tasks] == [p.name for p in ahead.parameters if p.how == "compiled"]
    assert len({p.name for p in ahead.parameters}) == 6
    assert [task.name for task in report.local] == [p.name for p in ahead.parameters if p.how == "local"]
    made.canzona.measure(2)
    steps(made, range(2, 4))
    assert made.canzona.report().measured.steps == 2
    folder = made.canzona.dump(tmp_path)
    assert {"report.txt", "plan.json", "0_Muon", "1_SOAP", "2_AdamW"} <= {path.name for path in folder.iterdir()}
    assert not list((folder / "0_Muon").glob("rank*"))
    plan = made.canzona.plan()
    canzona_compile.wrap(made)  # once more changes nothing
    assert made.canzona.plan() == plan
    assert made.canzona.graph("captured", report.templates[-1].name) is not None
    assert made.canzona.passes().records


def test_explain_says_the_same_before_wrap() -> None:
    plain, wrapped = chained("three"), chained("three", wrapped=True)
    assert canzona_compile.explain(plain) == wrapped.canzona.explain() == canzona_compile.explain(wrapped)


def test_a_plan_of_a_chain_is_followed() -> None:
    """Each has captures of its own, so that both name their graphs in the same order."""
    made, other, hand = chained("three"), chained("three"), Hand("three")
    with shared_captures({}):
        canzona_compile.wrap(made)
    steps(made, range(2))
    plan = made.canzona.plan()
    with shared_captures({}):
        canzona_compile.wrap(other, plan=plan)
    steps(other, range(3), hand)
    assert other.canzona.plan().fingerprint == plan.fingerprint


def test_graphs_of_equal_names_are_told_apart() -> None:
    params = parameters(((6, 4), (6, 4)))
    made: Any = canzona_compile.wrap(chain(Muon(params[:1], lr=0.1), Muon(params[1:], lr=0.1, nesterov=False)))
    steps(made, range(1))
    names = [template.name for template in made.canzona.report().templates]
    texts = {made.canzona.graph("captured", name).print_readable(print_output=False) for name in names}
    assert len(texts) == len(names) == 2


def test_an_optimizer_that_was_wrapped_by_itself_steps_in_a_chain_and_the_chain_is_refused() -> None:
    params, hand = parameters(SHAPES), Hand("two")
    made = chain(canzona_compile.wrap(Muon(params[:4], lr=0.1)), AdamW(params[4:], lr=0.1))
    steps(made, range(2), hand)
    with pytest.raises(CanzonaError, match="before it was put into the chain"):
        canzona_compile.wrap(made)
    steps(made, range(2, 3), hand)


def test_patterns_may_fit_some_of_its_optimizers() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    named = list(model.named_parameters())
    matrices, rest = [p for _, p in named if p.ndim == 2], [p for _, p in named if p.ndim == 1]
    made = chain(Muon(matrices, lr=0.1), AdamW(rest, lr=0.1))
    canzona_compile.wrap(made, model=model, split={"0.weight": {"a": 2, "b": 4}})
    assert {p.name for p in made.canzona.explain().parameters} >= {"0.weight[a]", "0.weight[b]", "1.bias"}
    other = chain(Muon(matrices, lr=0.1))
    with pytest.raises(CanzonaError, match="matches no parameter"):
        canzona_compile.wrap(other, model=model, split={"2.weight": {"a": 2, "b": 4}})
    assert not canzona_compile.is_wrapped(other.optimizers[0])


@either
def test_a_rate_that_comes_to_zero(wrapped: bool) -> None:
    """The lr comes to 0, which is another code of some optimizers."""
    made, hand = chained("two", wrapped), Hand("two")
    schedulers = [CosineAnnealingLR(own, T_max=3) for own in (made, *hand.optimizers)]
    for step in range(5):
        steps(made, [step], hand)
        for scheduler in schedulers:
            scheduler.step()
