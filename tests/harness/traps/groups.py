"""Other groups: what a step reads or writes of a group that its parameter is not in, and what becomes of groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import Cubic, PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap, halves, set_group

FAMILY = "other groups"
TWO_RATES = ({"lr": 0.1}, {"lr": 0.02})


class Rates(PerParameter):
    """Base of optimizers that take the learning rate from several groups."""

    def __init__(self, params: Params) -> None:
        super().__init__(halves(params, *TWO_RATES))

    def rate(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-self.rate(group))


class RateOfFirst(Rates):
    """Takes the first group's learning rate for all."""

    def rate(self, group: dict[str, Any]) -> float:
        return float(self.param_groups[0]["lr"])


class LargestRate(Rates):
    """Takes the largest learning rate of all groups."""

    def rate(self, group: dict[str, Any]) -> float:
        return float(max(other["lr"] for other in self.param_groups))


class RelativeRate(Rates):
    """Divides by the sum of all learning rates."""

    def rate(self, group: dict[str, Any]) -> float:
        return float(0.1 * group["lr"] / sum(other["lr"] for other in self.param_groups))


class RateByIdentity(Rates):
    """Is this the first group?"""

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"] * (0.5 if group is self.param_groups[0] else 1.0))


class LargestRateElementwise(LargestRate):
    """The same without a matrix product."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(grad, 0.1)
        param.add_(average, alpha=-self.rate(group))


class LargestRateOnHost(LargestRate):
    """The same, and nobody can trace it."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        update = cube(grad)
        if update.norm().item() > 2:
            update = update / update.norm()
        param.add_(update, alpha=-self.rate(group))


class Whole(Optimizer):
    """Base of optimizers whose step sees all groups at once."""

    def __init__(self, params: Params) -> None:
        super().__init__(halves(params, *TWO_RATES), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.step_all()

    def step_all(self) -> None:
        raise NotImplementedError

    def take(self, group: dict[str, Any], scale: Any) -> None:
        for param in group["params"]:
            param.sub_(cube(param.grad) * (group["lr"] * scale))


class NumberOfGroup(Whole):
    """Later groups take smaller steps."""

    def step_all(self) -> None:
        for number, group in enumerate(self.param_groups):
            self.take(group, 1.0 / (1 + number))


class RateOfNext(Whole):
    """Every group looks at the next one's learning rate."""

    def step_all(self) -> None:
        for group, after in zip(self.param_groups, self.param_groups[1:] + self.param_groups[:1], strict=True):
            self.take(group, after["lr"] * 10)


class NormOfAll(Whole):
    """Clips by the norm of all gradients of all groups."""

    def step_all(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            self.take(group, 1.0 / (1.0 + norm))


class NormOfGroup(Whole):
    """Clips by the norm of the gradients of one group."""

    def step_all(self) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            self.take(group, 1.0 / (1.0 + norm))


class NormOfFirstGroup(Whole):
    """Clips the first group only, as one does for embeddings."""

    def step_all(self) -> None:
        norm = sum(p.grad.norm().item() for p in self.param_groups[0]["params"])
        self.take(self.param_groups[0], 1.0 / max(1.0, norm))
        self.take(self.param_groups[1], 1.0)


class StatisticsOfFirstGroup(Whole):
    """What the first group finds scales the second."""

    def step_all(self) -> None:
        found = torch.stack([p.grad.square().mean() for p in self.param_groups[0]["params"]]).mean()
        self.take(self.param_groups[0], 1.0)
        self.take(self.param_groups[1], found)


class RateHandedOn(Whole):
    """The step writes another group's learning rate."""

    def step_all(self) -> None:
        self.param_groups[1]["lr"] = self.param_groups[0]["lr"] * 0.5
        for group in self.param_groups:
            self.take(group, 1.0)


class RateOfItsOwn(Whole):
    """The step lets each group's learning rate decay."""

    def step_all(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.9
            self.take(group, 1.0)


class PausedTogether(Whole):
    """One group that pauses makes all pause."""

    def step_all(self) -> None:
        if any(group.get("paused", False) for group in self.param_groups):
            return
        for group in self.param_groups:
            self.take(group, 1.0)


class SharedSchedule(Whole):
    """Both groups hold one and the same dict, and the step counts in it."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        schedule = {"ticks": 0}
        for group in self.param_groups:
            group["schedule"] = schedule

    def step_all(self) -> None:
        for group in self.param_groups:
            group["schedule"]["ticks"] += 1
            self.take(group, 1.0 / group["schedule"]["ticks"])


class CountOfGroups(Rates):
    """Divides by how many groups there are."""

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"] / len(self.param_groups))


class AllButLast:
    """Makes an optimizer that gets its last parameter later."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __call__(self, params: Params) -> Any:
        return self.kind(params[:-1])


def add_group(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})


def remove_group(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        for param in optimizer.param_groups.pop(1)["params"]:
            optimizer.state.pop(param, None)


def reverse_groups(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.param_groups.reverse()


def move_parameter(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def replace_group(optimizer: Any, params: Params, step: int) -> None:
    """Put an equal dict in the place of a group."""
    if step == 2:
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3}


def two_groups(params: Params) -> Any:
    return Cubic(halves(params, *TWO_RATES))


TRAPS = (
    Trap("rate-of-first-group", FAMILY, RateOfFirst, "either"),
    Trap("rate-of-first-group-changed", FAMILY, RateOfFirst, "either", edit=set_group("lr", 0.5, at=2)),
    Trap("largest-rate", FAMILY, LargestRate, "either"),
    Trap("largest-rate-changed", FAMILY, LargestRate, "either", edit=set_group("lr", 0.5, at=2, group=1)),
    Trap("largest-rate-elementwise", FAMILY, LargestRateElementwise, "either"),
    Trap("largest-rate-on-host", FAMILY, LargestRateOnHost, "either"),
    Trap("relative-rate", FAMILY, RelativeRate, "either"),
    Trap("first-group-by-identity", FAMILY, RateByIdentity, "either"),
    Trap("number-of-group", FAMILY, NumberOfGroup, "either"),
    Trap("rate-of-next-group", FAMILY, RateOfNext, "either"),
    Trap("norm-of-all", FAMILY, NormOfAll, "equal"),
    Trap("norm-of-group", FAMILY, NormOfGroup, "equal"),
    Trap("norm-of-first-group", FAMILY, NormOfFirstGroup, "equal"),
    Trap("statistics-of-first-group", FAMILY, StatisticsOfFirstGroup, "equal"),
    Trap("rate-handed-on", FAMILY, RateHandedOn, "either"),
    Trap("rate-handed-on-changed", FAMILY, RateHandedOn, "either", edit=set_group("lr", 0.5, at=2)),
    Trap("rate-of-its-own", FAMILY, RateOfItsOwn, "either"),
    Trap("paused-together", FAMILY, PausedTogether, "either", edit=set_group("paused", True, at=2, group=1)),
    Trap("shared-schedule", FAMILY, SharedSchedule, "either", ("schedule",)),
    Trap("group-added-midway", FAMILY, AllButLast(Cubic), "equal", edit=add_group),
    Trap("group-added-midway-and-counted", FAMILY, AllButLast(CountOfGroups), "either", edit=add_group),
    Trap("group-removed", FAMILY, two_groups, "either", edit=remove_group),
    Trap("groups-reversed", FAMILY, two_groups, "either", edit=reverse_groups),
    Trap("parameter-moved-to-other-group", FAMILY, two_groups, "either", edit=move_parameter),
    Trap("group-replaced", FAMILY, two_groups, "either", edit=replace_group),
)
