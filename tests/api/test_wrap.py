"""The wrapped optimizer is the same object and keeps every promise of torch.optim.Optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import canzona_compile
from canzona_compile import CanzonaError, UnsupportedOptimizer
from canzona_compile.compat.interrupts import uninterrupted
from canzona_compile.eager.cell import step_alone
from examples.optimizers.shampoo import Shampoo
from tests.harness import toys
from tests.harness.layouts import Case, Laid
from tests.harness.marks import first
from tests.harness.optimizers import share_captures
from tests.harness.pairs import (
    Pair,
    different,
    feed,
    left_after,
    muon,
    one_rank,
    parameters,
    params_of,
    same_bits,
    wrapped_muon,
)
from tests.harness.ranks import run
from tests.harness.traps.grammar import toy

# -- the object --------------------------------------------------------------------------------


def test_wrap_returns_the_same_object_of_a_subclass() -> None:
    plain = muon(parameters())
    wrapped = canzona_compile.wrap(plain)
    assert wrapped is plain
    assert isinstance(wrapped, Muon)
    assert type(wrapped) is not Muon
    assert canzona_compile.is_wrapped(wrapped)
    assert not canzona_compile.is_wrapped(muon(parameters()))


def test_optimizers_of_one_class_share_the_wrapped_class() -> None:
    assert type(wrapped_muon()) is type(wrapped_muon())


def test_state_and_groups_hold_nothing_of_ours() -> None:
    pair = Pair()
    pair.step()
    plain, wrapped = pair.both
    assert wrapped.param_groups[0].keys() == plain.param_groups[0].keys()
    assert set(wrapped.__dict__) - set(plain.__dict__) == {"canzona"}
    assert [p.keys() for p in wrapped.state.values()] == [p.keys() for p in plain.state.values()]


def test_unwrap_restores_the_class_and_plain_steps_go_on() -> None:
    pair = Pair()
    pair.steps(2)
    assert canzona_compile.unwrap(pair.wrapped) is pair.wrapped
    assert type(pair.wrapped) is Muon
    assert not hasattr(pair.wrapped, "canzona")
    pair.steps(2)


def test_unwrap_of_a_plain_optimizer_does_nothing() -> None:
    plain = muon(parameters())
    assert canzona_compile.unwrap(plain) is plain
    assert type(plain) is Muon


def test_state_of_plain_steps_before_wrap_is_adopted() -> None:
    pair = Pair()
    canzona_compile.unwrap(pair.wrapped)
    pair.steps(2)
    canzona_compile.wrap(pair.wrapped)
    pair.steps(2)


# -- what wrap refuses -------------------------------------------------------------------------


def test_second_wrap_with_equal_options_returns_the_object() -> None:
    wrapped: Any = canzona_compile.wrap(muon(parameters()), depth=3)
    session = wrapped.canzona.session
    assert canzona_compile.wrap(wrapped, depth=3) is wrapped
    assert wrapped.canzona.session is session


def test_second_wrap_with_other_options_raises_and_changes_nothing() -> None:
    pair = Pair()
    pair.step()
    with pytest.raises(CanzonaError, match="already wrapped, with different options"):
        canzona_compile.wrap(pair.wrapped, strategy="replicated")
    pair.step()


def test_lbfgs_is_refused() -> None:
    optimizer = LBFGS(parameters())
    with pytest.raises(UnsupportedOptimizer, match=r"LBFGS\.step requires closure"):
        canzona_compile.wrap(optimizer)
    assert type(optimizer) is LBFGS


def test_an_optimizer_that_shards_its_state_is_refused() -> None:
    with one_rank():
        optimizer = ZeroRedundancyOptimizer(parameters(), optimizer_class=Muon, lr=0.1)
        with pytest.raises(UnsupportedOptimizer, match="ZeroRedundancyOptimizer communicates by itself"):
            canzona_compile.wrap(optimizer)


BAD_OPTIONS: list[dict[str, Any]] = [{"strategy": "fastest"}, {"numerics": "loose"}, {"capacity": 0}, {"depth": 0}]
BAD_OPTIONS += [{"depth": 1.5}, {"micro_groups": -1}, {"micro_groups": True}, {"replicate": 4}]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda o: "=".join(map(str, *o.items())))
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    optimizer = muon(parameters())
    with pytest.raises(CanzonaError, match=next(iter(options))):
        canzona_compile.wrap(optimizer, **options)
    assert type(optimizer) is Muon


# -- schedulers --------------------------------------------------------------------------------


@pytest.mark.parametrize("when", first(["before", "after"]))
def test_schedulers_made_before_or_after_wrap(when: str) -> None:
    """Warnings of torch (a step that the scheduler did not see) are errors in this suite."""
    pair = Pair()
    if when == "before":
        canzona_compile.unwrap(pair.wrapped)
    schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in pair.both]
    share_captures(canzona_compile.wrap(pair.wrapped))
    for step in range(9):
        if step == 7:
            canzona_compile.unwrap(pair.wrapped)
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.wrapped.param_groups[0] | {"params": ()} == pair.plain.param_groups[0] | {"params": ()}


def test_a_scheduler_does_not_keep_the_optimizer_alive_after_wrap() -> None:
    optimizer = muon(parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    step = canzona_compile.wrap(optimizer).step
    alive = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert alive() is None
    assert callable(step)


# -- after the last reference ------------------------------------------------------------------


def stepped(optimizer: Any, count: int = 3) -> None:
    for step in range(count):
        feed(optimizer, step)
        optimizer.step()


def failed(optimizer: Any) -> None:
    """Its first step fails, and a later one."""
    for count in (0, 2):
        stepped(optimizer, count)
        params_of(optimizer)[0].grad = torch.ones(params_of(optimizer)[0].shape).to_sparse()
        with pytest.raises(CanzonaError):
            optimizer.step()


def loaded(optimizer: Any) -> None:
    stepped(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer)


def shown(optimizer: Any) -> None:
    stepped(optimizer)
    assert str(optimizer.canzona.report()) + str(optimizer.canzona.explain()) + optimizer.canzona.plan().to_json()


def measured(optimizer: Any) -> None:
    stepped(optimizer)
    optimizer.canzona.measure(2)
    stepped(optimizer, 1)


def unwrapped(optimizer: Any) -> None:
    stepped(optimizer)
    canzona_compile.unwrap(optimizer)


def in_chain() -> Any:
    own = parameters(((6, 4), (4, 6), (7,)))
    return canzona_compile.wrap(canzona_compile.chain(muon(own[:2]), AdamW(own[2:])))


MADE: dict[str, Callable[[], Any]] = {
    "muon": lambda: canzona_compile.wrap(muon(parameters())),
    "chain": in_chain,
    "objects": lambda: canzona_compile.wrap(muon(parameters()), one_per_matrix=muon),
    "eager": lambda: canzona_compile.wrap(toys.Breaking(parameters())),
    "shampoo": lambda: canzona_compile.wrap(Shampoo(parameters(), lr=0.1)),
}
USES: list[Callable[[Any], Any]] = [stepped, failed, loaded, unwrapped, shown, measured, lambda optimizer: None]


@pytest.fixture(scope="module")
def dynamo_at_work() -> None:
    """What Dynamo loads at its first use holds frames of its callers until Python looks for garbage."""
    stepped(MADE["muon"](), 1)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", first(MADE, 2))
@pytest.mark.usefixtures("dynamo_at_work", "captures_shared")
def test_nothing_is_left_of_an_optimizer_that_nobody_holds(made: str, use: Callable[[Any], Any]) -> None:
    """As of one of torch: people who sweep on one GPU would run out of memory."""
    if not (made == "objects" and use is unwrapped):  # which is refused
        assert left_after(MADE[made], use) == []


@pytest.mark.parametrize("made", ["muon", "eager", "shampoo"])
@pytest.mark.usefixtures("dynamo_at_work")
def test_captures_are_freed_with_their_optimizer(made: str) -> None:
    """Dynamo's caches, and the errors of trials, do not hold them."""
    recorders: list[Any] = []

    def use(optimizer: Any) -> None:
        stepped(optimizer)
        recorders.extend(weakref.ref(k.recorder) for k in optimizer.canzona.session.capture.kinds.values())

    assert left_after(MADE[made], use) == []
    assert [recorder() for recorder in recorders] == [None, None]


def freed_on_ranks() -> list[str]:
    """The same under FSDP2: what this rank shares with others does not hold its optimizer."""
    values, laid = parameters(), list[Laid]()

    def make() -> Any:
        laid.append(Laid([value.detach() for value in values], Case("fsdp", (2,))))
        wrapped = canzona_compile.wrap(muon(laid[0].params))
        share_captures(wrapped)
        return wrapped

    def use(optimizer: Any) -> None:
        for _ in range(3):
            for i, (param, value) in enumerate(zip(laid[0].params, values, strict=True)):
                param.grad = laid[0].like_param(value.detach(), i)
            optimizer.step()
        assert optimizer.state_dict()["state"]
        laid.clear()

    left_after(make, use)  # what torch loads at its first use
    return [what for what in left_after(make, use) if "parameter" not in what]  # FSDP2 holds those in cycles of its own


def test_nothing_is_left_on_ranks() -> None:
    assert run(2, freed_on_ranks) == [[], []]


def test_a_handle_says_that_its_optimizer_is_gone() -> None:
    handle = MADE["muon"]().canzona
    with pytest.raises(CanzonaError, match=r"was freed.*\n.*keep the optimizer"):
        handle.explain()


def test_threads_may_take_first_steps_at_once() -> None:
    """Each rehearses and captures, which looks at the generators and the modules of the process."""
    made: list[Callable[[list[Any]], Optimizer]] = [muon, AdamW, Shampoo, muon]
    pairs = [Pair(make) for make in made]
    start = threading.Barrier(len(made))

    def first_steps(pair: Pair) -> None:
        start.wait()
        pair.steps(2)

    with ThreadPoolExecutor(len(made)) as threads:
        assert list(threads.map(first_steps, pairs)) == [None] * len(made)


def test_what_other_threads_draw_in_captures_is_not_drawn_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures seed the generators of the process, while steps by the optimizer's own code watch them."""
    captured = threading.Event()

    @uninterrupted
    def capture() -> None:
        torch.rand(1)
        captured.set()

    others: list[threading.Thread] = []

    def slow_step(*args: Any) -> Any:
        others.append(threading.Thread(target=capture))
        others[-1].start()
        assert not captured.wait(0.2)
        return step_alone(*args)

    monkeypatch.setattr("canzona_compile.session.cells.step_alone", slow_step)
    param = torch.nn.Parameter(torch.ones(4, 6))
    param.grad = torch.ones(4, 6)
    canzona_compile.wrap(muon([param])).step()
    assert len(others) == 1
    others[0].join()


def test_another_thread_may_reset_dynamo_during_steps() -> None:
    """Torch's tests of ranks that are threads do so: a reset forgets what Dynamo calls when it begins to trace."""
    ended = threading.Event()

    def reset() -> None:
        while not ended.wait(0.0001):
            torch._dynamo.reset()

    with ThreadPoolExecutor(1) as threads:
        resets = threads.submit(reset)
        try:
            pair = Pair(muon)
            pair.steps(2)
        finally:
            ended.set()
    resets.result()
    assert all("dispatch" not in told.why for told in canzona_compile.explain(pair.wrapped).parameters)


# -- hooks and profiling -----------------------------------------------------------------------


def test_step_hooks_run_once_and_in_the_order_of_the_plain_optimizer() -> None:
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    seen = []
    pair = Pair()
    for optimizer in pair.both:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        calls.clear()
        for step in range(2):  # the first step is another program than the others
            feed(optimizer, step)
            optimizer.step()
        seen.append(list(calls))
    for handle in handles:
        handle.remove()
    assert seen[0] == ["global pre", "pre", "post", "global post"] * 2
    assert seen[1] == seen[0]


def test_a_pre_hook_may_change_gradients() -> None:
    pair = Pair()

    def double(optimizer: Optimizer, *_: Any) -> None:
        for param in params_of(optimizer):
            assert param.grad is not None
            param.grad = param.grad * 2 + 1

    for optimizer in pair.both:
        optimizer.register_step_pre_hook(double)
    pair.steps(2)


def test_state_dict_hooks_run_once() -> None:
    wrapped, calls = wrapped_muon(), []
    wrapped.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    wrapped.register_state_dict_post_hook(lambda *_: calls.append("after save"))
    wrapped.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    wrapped.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
    wrapped.load_state_dict(wrapped.state_dict())
    assert calls == ["before save", "after save", "before load", "after load"]


def test_one_profiler_range_per_step() -> None:
    wrapped = wrapped_muon()
    for step in range(2):
        feed(wrapped, step)
        wrapped.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        wrapped.step()
    ranges = {e.key: e.count for e in profile.key_averages() if e.key.startswith("Optimizer.step")}
    assert ranges == {"Optimizer.step#CanzonaMuon.step": 1}


# -- closures, zero_grad -----------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [False, True])
def test_closures_run_once_with_gradients_and_return_their_loss(keyword: bool) -> None:
    pair = Pair()
    losses: dict[int, list[float]] = {0: [], 1: []}
    for which, optimizer in enumerate(pair.both):
        calls: list[bool] = []

        def closure(optimizer: Optimizer = optimizer, calls: list[bool] = calls) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = torch.stack([(p**2).sum() for p in params_of(optimizer)]).sum()
            loss.backward()
            return loss

        with torch.no_grad():
            for _ in range(3):
                loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
                losses[which].append(float(loss))
        assert calls == [True] * 3
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][-1]
    assert different(*pair.both) == []


def test_step_without_closure_returns_none() -> None:
    wrapped = wrapped_muon()
    feed(wrapped, 0)
    assert wrapped.step() is None


def test_zero_grad() -> None:
    wrapped = wrapped_muon()
    feed(wrapped, 0)
    wrapped.step()
    wrapped.zero_grad(set_to_none=False)
    assert [p.grad is not None and float(p.grad.abs().sum()) for p in params_of(wrapped)] == [0.0, 0.0]
    wrapped.zero_grad()
    assert [p.grad for p in params_of(wrapped)] == [None, None]


# -- parameters that change --------------------------------------------------------------------


def test_add_param_group_after_steps() -> None:
    pair = Pair()
    pair.steps(2)
    for optimizer in pair.both:
        optimizer.add_param_group({"params": parameters([(8, 4)], seed=7), "lr": 0.3})
    pair.steps(2)
    assert [t.shape for t in pair.report.tasks] == [(6, 4), (4, 6), (8, 4)]


def test_a_parameter_that_moves_to_the_next_group() -> None:
    """The order of all parameters stays the same, and their groups do not."""
    pair = Pair(
        lambda params: torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.3}], lr=0.1),
        [(6, 4), (4, 6), (3, 5), (8,)],
    )
    pair.steps(2)
    for optimizer in pair.both:
        first, second = optimizer.param_groups
        second["params"].insert(0, first["params"].pop())
    pair.steps(2)
    for optimizer in pair.both:
        first, second = optimizer.param_groups
        first["params"] += second["params"]
        optimizer.param_groups.pop()
    pair.steps(2)


# Reads attributes of its parameters that need not be there.
Marked = toy("marked")("""
    sign = -1 if getattr(param, "flipped", None) is True else 1
    scale = 3 if getattr(param, "_scaled", False) else 1
    param.sub_(cube(grad), alpha=group["lr"] * sign * scale)
""")


def test_attributes_of_parameters_that_are_equal_and_not_the_same() -> None:
    pair = Pair(Marked, [(4, 4)] * 3)
    for values in [(True, 1, 1.0), (1, True, 1.0)]:
        for optimizer in pair.both:
            for param, value in zip(params_of(optimizer), values, strict=True):
                param.flipped = value  # type: ignore[attr-defined]
        pair.steps(2)


def test_private_attributes_of_parameters() -> None:
    """A plan gives none to a step of one parameter, so an optimizer that reads one is refused."""
    wrapped = canzona_compile.wrap(Marked(parameters([(4, 4)] * 2)))
    params_of(wrapped)[0]._scaled = True  # type: ignore[attr-defined]
    feed(wrapped, 0)
    with pytest.raises(UnsupportedOptimizer):
        wrapped.step()


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "afterwards"])
def test_parameters_may_be_replaced(steps: int) -> None:
    pair = Pair()
    pair.steps(steps)
    for optimizer in pair.both:
        optimizer.param_groups[0]["params"][:] = parameters([(5, 3), (3, 5)], seed=8)
    for optimizer in pair.both:  # as frameworks do that replace them: the old state is gone
        optimizer.state.clear()
    pair.steps(3)
    assert [t.shape for t in pair.report.tasks] == [(5, 3), (3, 5)]


def test_parameters_without_gradients_are_skipped_until_they_have_some() -> None:
    pair = Pair()
    for missing in ((0, 1), (0,), (), (1,), (0, 1), ()):
        pair.step(*missing)


# -- state -------------------------------------------------------------------------------------


def test_state_dict_round_trip() -> None:
    pair = Pair()
    pair.steps(2)
    kept = [copy.deepcopy((params_of(o), o.state_dict())) for o in pair.both]
    pair.steps(2)
    for optimizer, (params, state) in zip(pair.both, kept, strict=True):
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for param, old in zip(params_of(optimizer), params, strict=True):
                param.copy_(old)
    pair.steps(2)


def test_state_dicts_of_plain_and_wrapped_optimizers_are_interchangeable() -> None:
    pair = Pair()
    pair.steps(2)
    plain, wrapped = (copy.deepcopy(o.state_dict()) for o in pair.both)
    assert plain.keys() == wrapped.keys()
    assert plain["param_groups"] == wrapped["param_groups"]
    fresh = Pair(lambda params: muon(params, lr=99.0))  # the rate comes with the state
    for target, source in zip(fresh.both, pair.both, strict=True):
        for param, old in zip(params_of(target), params_of(source), strict=True):
            param.data.copy_(old.data)
    fresh.plain.load_state_dict(wrapped)
    fresh.wrapped.load_state_dict(plain)
    fresh.steps(2)
    assert fresh.wrapped.param_groups[0]["lr"] == 0.1


@pytest.mark.full
@pytest.mark.parametrize("how", first(["pickle", "deepcopy"]))
def test_copies_are_wrapped_and_independent(how: str) -> None:
    def copied(optimizer: Optimizer) -> Any:
        return copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))

    pair, twins = Pair(), Pair()
    pair.steps(2)
    twins.plain, twins.wrapped, twins.number = *map(copied, pair.both), 2
    assert type(twins.wrapped) is type(pair.wrapped)
    assert twins.wrapped.canzona is not pair.wrapped.canzona
    before = [p.detach().clone() for p in params_of(pair.wrapped)]
    twins.steps(2)
    assert all(map(same_bits, before, params_of(pair.wrapped)))
    pair.steps(2)


def test_a_process_group_is_lost_in_a_pickle_and_says_so() -> None:
    with one_rank():
        wrapped = canzona_compile.wrap(muon(parameters()), replicate=dist.group.WORLD, depth=1)
        share_captures(wrapped)
        feed(wrapped, 0)
        wrapped.step()
        loaded = pickle.loads(pickle.dumps(wrapped))
        before = [p.detach().clone() for p in params_of(loaded)]
        feed(loaded, 1)
        with pytest.raises(CanzonaError, match="replicate= is lost") as caught:
            loaded.step()
        assert "wrap(optimizer, replicate=" in str(caught.value)
        assert all(map(same_bits, before, params_of(loaded)))
        canzona_compile.wrap(loaded, replicate=dist.group.WORLD, depth=1)
        copied = copy.deepcopy(loaded)  # in one process groups stay
        for optimizer in (loaded, copied):
            share_captures(optimizer)
        for optimizer in (wrapped, loaded, copied):
            feed(optimizer, 1)
            optimizer.step()
        assert different(wrapped, loaded) == different(wrapped, copied) == []


def test_the_names_of_options() -> None:
    for call in (
        lambda **given: canzona_compile.wrap(muon(parameters()), **given),
        lambda **given: canzona_compile.plan({"a": (4, 4)}, mesh="fsdp=2", **given),
        lambda **given: canzona_compile.muon_adamw(torch.nn.Linear(4, 4), **given),
    ):
        for name in ("dept", "names"):  # the second is a field, but no option
            with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'"):
                call(**{name: 1})
