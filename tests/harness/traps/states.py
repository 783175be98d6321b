"""State: what the user clears, replaces, edits or loads, and state that is a parameter or a gradient."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import Feed, Params, Trap

FAMILY = "state"


class Momentum(PerParameter):
    """Averages gradients, and counts."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        state["step"] = state.get("step", 0) + 1
        average.lerp_(grad, 0.3)
        param.add_(self.direction(average), alpha=-group["lr"] * state.get("boost", 1.0) / state["step"])

    def direction(self, average: Tensor) -> Tensor:
        return cube(average)


class MomentumElementwise(Momentum):
    """The same without a matrix product."""

    def direction(self, average: Tensor) -> Tensor:
        return average * 1.0


class MomentumOnHost(Momentum):
    """The same, and nobody can trace it."""

    def direction(self, average: Tensor) -> Tensor:
        update = cube(average)
        return update / update.norm() if update.norm().item() > 2 else update


class Nesterov(Momentum):
    """Gives old groups a default, as torch's optimizers do in `__setstate__`."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", True)
            group["loads"] = group.get("loads", 0) + 1

    def direction(self, average: Tensor) -> Tensor:
        return cube(average) * (0.5 if "loads" in self.param_groups[0] else 1.0)


class ExtraInDict(Momentum):
    """Its `state_dict` has one entry more."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": 3}

    def load_state_dict(self, state_dict: Any) -> None:
        assert state_dict["version"] == 3
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "version"})


# -- edits -----------------------------------------------------------------------------------------


def at_step(number: int, change: Callable[[Any, Params], None]) -> Callable[[Any, Params, int], None]:
    def edit(optimizer: Any, params: Params, step: int) -> None:
        if step == number:
            change(optimizer, params)

    return edit


def clear(optimizer: Any, params: Params) -> None:
    optimizer.state.clear()


def replace(optimizer: Any, params: Params) -> None:
    optimizer.state = defaultdict(dict)


def delete(optimizer: Any, params: Params) -> None:
    del optimizer.state[params[1]]


def clear_one(optimizer: Any, params: Params) -> None:
    optimizer.state[params[1]].clear()


def replace_one(optimizer: Any, params: Params) -> None:
    optimizer.state[params[1]] = {}


def pop_key(optimizer: Any, params: Params) -> None:
    del optimizer.state[params[1]]["average"]


def zero_average(optimizer: Any, params: Params) -> None:
    optimizer.state[params[1]]["average"].zero_()


def halve_averages(optimizer: Any, params: Params) -> None:
    for state in optimizer.state.values():
        state["average"].mul_(0.5)


def replace_average(optimizer: Any, params: Params) -> None:
    optimizer.state[params[1]]["average"] = torch.ones_like(params[1].detach())


def reset_count(optimizer: Any, params: Params) -> None:
    for state in optimizer.state.values():
        state["step"] = 0


def add_key(optimizer: Any, params: Params) -> None:
    optimizer.state[params[1]]["boost"] = 2.0


def swap_states(optimizer: Any, params: Params) -> None:
    first, second = params[0], params[2]
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]


def share_average(optimizer: Any, params: Params) -> None:
    """From here on two parameters have one average."""
    optimizer.state[params[2]]["average"] = optimizer.state[params[0]]["average"]


def load_own(optimizer: Any, params: Params) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_empty(optimizer: Any, params: Params) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def set_own_state(optimizer: Any, params: Params) -> None:
    optimizer.__setstate__(optimizer.__getstate__())


def set_no_state(optimizer: Any, params: Params) -> None:
    optimizer.__setstate__({**optimizer.__getstate__(), "state": defaultdict(dict)})


def go_back(optimizer: Any, params: Params, step: int) -> None:
    """Save early, load late, as one does after a spike."""
    if step == 1:
        optimizer.saved = copy.deepcopy(optimizer.state_dict())
    if step == 3:
        optimizer.load_state_dict(optimizer.saved)


def step_and_clear(optimizer: Any, feed: Feed, step: int) -> None:
    """Restart momentum after every other step."""
    optimizer.step()
    if step % 2 == 1:
        optimizer.state.clear()


# -- state that is something else ------------------------------------------------------------------


class IsParameter(PerParameter):
    """The state holds the parameter itself, and writes it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state.setdefault("weight", param)
        state["weight"].mul_(0.9)
        param.add_(cube(grad), alpha=-group["lr"])


class SeesParameter(PerParameter):
    """The state holds a view of the parameter, and reads what it was not told."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["row"] = param.detach()[:1]
        param.add_(cube(grad), alpha=-group["lr"])
        param.sub_(state["row"] * 0.1)


class IsGradient(PerParameter):
    """The state holds the last gradient itself, not a copy."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad) + cube(state["last"]) if "last" in state else cube(grad)
        param.add_(update, alpha=-group["lr"])
        state["last"] = grad


class GrowsOnGradient(PerParameter):
    """The first gradient becomes the buffer of momentum, not a copy of it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if "buffer" in state:
            state["buffer"].mul_(0.5).add_(grad)
        else:
            state["buffer"] = grad
        param.add_(cube(state["buffer"]), alpha=-group["lr"])


class Halves(PerParameter):
    """Two entries of the state are views of a third."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["both"] = torch.zeros(2, len(param), len(param))
            state["first"], state["second"] = state["both"]
        state["first"].lerp_(grad @ grad.T, 0.1)
        state["second"].lerp_(state["first"], 0.5)
        param.add_(state["both"].sum(0) @ grad, alpha=-group["lr"])


class Twins(PerParameter):
    """Two entries of the state are one tensor."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state["one"] = state["other"] = torch.zeros_like(param)
        state["one"].lerp_(grad, 0.3)
        state["other"].mul_(0.9)
        param.add_(cube(state["one"]), alpha=-group["lr"])


class SharedByAll(PerParameter):
    """All states hold one tensor of the optimizer, and all write it."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.mean = torch.zeros(())

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        state.setdefault("mean", self.mean).lerp_(grad.abs().mean(), 0.3)
        param.sub_(cube(grad) * (state["mean"] * group["lr"]))


class Swapping(PerParameter):
    """Two entries change places at every step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if not state:
            state.update(now=torch.zeros_like(param), before=torch.zeros_like(param))
        state["now"], state["before"] = state["before"], state["now"]
        state["now"].copy_(grad)
        param.add_(cube(state["now"] - 0.3 * state["before"]), alpha=-group["lr"])


class Remembering(PerParameter):
    """Keeps the last three gradients in a list."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        history = state.setdefault("history", [])
        history.append(grad.clone())
        del history[:-3]
        param.add_(cube(torch.stack(history).mean(0)), alpha=-group["lr"])


class Restarting(PerParameter):
    """Clears its own state at every third step."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if state.get("step") == 3:
            state.clear()
        if not state:
            state.update(step=0, average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 0.5)
        param.add_(cube(state["average"]), alpha=-group["lr"])


def edited(name: str, kind: Any, expected: Any, change: Callable[[Any, Params], None]) -> Trap:
    """A trap: an edit of the state before the third step."""
    return Trap(name, FAMILY, kind, expected, edit=at_step(2, change))


TRAPS = (
    edited("state-cleared", Momentum, "either", clear),
    edited("state-cleared-elementwise", MomentumElementwise, "either", clear),
    edited("state-cleared-on-host", MomentumOnHost, "either", clear),
    Trap("state-cleared-now-and-then", FAMILY, Momentum, "either", steps=6, call=step_and_clear),
    edited("state-replaced", Momentum, "either", replace),
    edited("state-replaced-elementwise", MomentumElementwise, "either", replace),
    edited("state-of-one-deleted", Momentum, "either", delete),
    edited("state-of-one-deleted-elementwise", MomentumElementwise, "either", delete),
    edited("state-of-one-cleared", Momentum, "either", clear_one),
    edited("state-of-one-replaced", Momentum, "either", replace_one),
    edited("state-key-deleted", Momentum, "either", pop_key),
    edited("state-tensor-replaced", Momentum, "either", replace_average),
    edited("state-tensor-replaced-elementwise", MomentumElementwise, "either", replace_average),
    edited("state-tensor-zeroed", Momentum, "equal", zero_average),
    edited("state-tensor-zeroed-elementwise", MomentumElementwise, "equal", zero_average),
    edited("state-tensors-halved", Momentum, "equal", halve_averages),
    edited("state-tensors-halved-on-host", MomentumOnHost, "equal", halve_averages),
    edited("state-count-reset", Momentum, "equal", reset_count),
    edited("state-count-reset-on-host", MomentumOnHost, "equal", reset_count),
    edited("state-key-added", Momentum, "either", add_key),
    edited("states-swapped", Momentum, "either", swap_states),
    edited("state-shared-by-user", Momentum, "either", share_average),
    edited("state-loaded", Momentum, "equal", load_own),
    edited("state-loaded-on-host", MomentumOnHost, "equal", load_own),
    edited("state-loaded-empty", Momentum, "equal", load_empty),
    Trap("state-of-before-loaded", FAMILY, Momentum, "equal", steps=6, edit=go_back),
    edited("state-loaded-with-defaults", Nesterov, "either", load_own),
    edited("state-dict-of-its-own", ExtraInDict, "either", load_own),
    edited("setstate", Momentum, "either", set_own_state),
    edited("setstate-of-nothing", Momentum, "either", set_no_state),
    Trap("state-is-parameter", FAMILY, IsParameter, "either"),
    Trap("state-sees-parameter", FAMILY, SeesParameter, "either"),
    Trap("state-is-gradient", FAMILY, IsGradient, "either"),
    Trap("state-grows-on-gradient", FAMILY, GrowsOnGradient, "either"),
    Trap("state-grows-on-gradient-seen", FAMILY, GrowsOnGradient, "either", compares_grads=True),
    Trap("state-in-halves", FAMILY, Halves, "either"),
    Trap("state-twice-the-same", FAMILY, Twins, "either"),
    Trap("state-shared-by-all", FAMILY, SharedByAll, "either"),
    Trap("state-entries-swap", FAMILY, Swapping, "either"),
    Trap("state-remembers-gradients", FAMILY, Remembering, "either"),
    Trap("state-restarts-itself", FAMILY, Restarting, "equal", steps=8),
)
