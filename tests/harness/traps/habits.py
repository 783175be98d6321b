"""Habits of optimizers: what they show in groups and attributes, closures over parameters, optimizers inside."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Optimizer

from tests.harness.traps.grammar import EITHER, EQUAL, REFUSED, Family, pieces_of

habits = Family("habits", EQUAL)
ONE_EACH = {"given": '[{"params": [param]} for param in params]'}
RATE_BY_NORM = "0.1 / (1 + float(grad.norm()))"

# -- what a step shows of the last parameter --------------------------------------------------------

BY_NORM = {"param": f'group["lr"] = {RATE_BY_NORM}'}
habits("group-shows-rate-by-norm", REFUSED, **BY_NORM)
habits("group-shows-rate-by-norm-in-one-each", REFUSED, **BY_NORM, **ONE_EACH)
habits("group-shows-rate-elementwise", REFUSED, **BY_NORM, update="grad")
habits("group-hands-on-a-rate", REFUSED, rate='group.get("used", 0.1)', then=f'group["used"] = {RATE_BY_NORM}')
# The factor is 1 unless a gradient is huge.
habits("group-shows-clamped-factor", REFUSED)("""
    param: group["factor"] = min(1.0, 1000.0 / (1e-12 + float(grad.norm())))
    update: cube(grad * group["factor"])
    grads: grad * 1e4 if step == 2 else grad
""")
OF_GROUP = pieces_of("""
    group:
        norms = [float(p.grad.norm()) for p in group["params"] if p.grad is not None]
        group["lr"] = 0.1 / (1 + sum(norms))
""")
habits("group-shows-rate-of-group", REFUSED, **OF_GROUP)
habits("group-shows-last-gradient", REFUSED, param='group["last"] = grad.clone()')


def shows(name: str, shown: str, **others: Any) -> None:
    """Leaves something of the last gradient as an attribute."""
    habits(name, REFUSED, body="last = None", param=f"self.last = {shown}", seen="optimizer.last", **others)


shows("attribute-shows-norm", "float(grad.norm())")
shows("attribute-shows-list", "[float(grad.norm())]")
# A map by parameter, and a counter of steps next to it.
MAP = pieces_of("""
    begin:
        self.moments = {}
        self.count = 0
    step: self.count += 1
    param:
        moment = self.moments.setdefault(param, torch.zeros_like(param))
        moment.lerp_(grad, 0.1)
    update: cube(moment)
    scale: 1 / self.count
    seen: optimizer.count
""")
habits("attribute-counts-beside-a-map", REFUSED, **MAP)

# -- closures --------------------------------------------------------------------------------------

STEPPED = "None if param.grad is None else param.sub_(cube(param.grad) * 0.1)"
OWN = 'own = [p for group in self.param_groups for p in group["params"]]'
STEPPING = {"outside": f"def stepping(param):\n    return lambda: {STEPPED}"}
habits("closure-steps-parameters", REFUSED)(f"""
    begin:
        {OWN}
        def work():
            for param in own:
                if param.grad is not None:
                    param.sub_(cube(param.grad) * 0.1)
        self.work = work
    whole: self.work()
""")
habits("closure-default-argument", EITHER)(f"""
    begin:
        {OWN}
        self.updates = [lambda rate, p=p: None if p.grad is None else p.sub_(cube(p.grad) * rate) for p in own]
    whole:
        for update in self.updates:
            update(0.1)
""")
habits("closure-on-parameter", EITHER, **STEPPING)(f"""
    begin:
        {OWN}
        for param in own:
            param.work = stepping(param)
    param: param.work()
    update:
    end: pass
""")
habits("closure-in-group", EITHER, **STEPPING)("""
    begin:
        for group in self.param_groups:
            group["work"] = list(map(stepping, group["params"]))
    whole:
        for group in self.param_groups:
            for work in group["work"]:
                work()
""")

# -- optimizers inside of optimizers ----------------------------------------------------------------


class Holder(Optimizer):
    """Stands for another optimizer: has its groups and its state, and steps it."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Halving(Holder):
    """Halves gradients before that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None:
                param.grad.mul_(0.5)
        super().step()


def holder(name: str, momentum: float, kind: Any = Holder) -> None:
    """An optimizer that has one of torch's inside."""
    making: Any = {"make": lambda params: kind(SGD(params, lr=0.1, momentum=momentum))}
    habits(name, REFUSED, says=("wrap that one", "self.base"), **making)


holder("optimizer-inside", 0.0)
holder("optimizer-inside-with-momentum", 0.9)
holder("optimizer-inside-halved", 0.0, Halving)
# It makes an optimizer of its own parameters, and steps that before it does its own work.
habits("optimizer-inside-lookahead", REFUSED, says="self.fast")("""
    begin: self.fast = SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)
    step: self.fast.step()
    param:
        slow = state.setdefault("slow", param.clone())
        slow.lerp_(param, 0.5)
        param.copy_(slow)
    update:
""")
