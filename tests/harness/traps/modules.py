"""Modules, optimizers and other holders of tensors on the optimizer, which the step reads or writes."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, REFUSED, Family, Said
from tests.harness.traps.trap import Expected

modules = Family("modules", EITHER)
PARAMS = 'params = [p for group in self.param_groups for p in group["params"]]'


def holding(name: str, expected: Expected, held: str, says: str | tuple[str, ...] = "held", **others: Any) -> Said:
    """The optimizer holds something with tensors, made of `params`."""
    return modules(name, expected, says=says, begin=f"self.held = {held}", **others)


WEIGHT = "self.held.weight.mean()"
# MuonClip shrinks queries and keys so.
holding("module-written", REFUSED, "linear()")("""
    end: self.held.weight.mul_(0.9)
    seen: optimizer.held.weight
""")
# The model sets the attribute.
modules("logits-on-parameter", EQUAL)("""
    then:
        logit = getattr(param, "max_logit", 0.0)
        if logit > 10:
            param.mul_((10 / logit) ** 0.5)
    every:
        for i, param in enumerate(params):
            param.max_logit = 10.0 * i * step
""")
holding("module-read", EITHER, "linear()", times=WEIGHT, edit="optimizer.held.weight.data.mul_(3)")
holding("module-learns-rate", REFUSED, "linear()", param="self.held.weight.add_(grad.mean() * 0.1)", times=WEIGHT)
COPIES = "[p.detach().clone() for p in params]"
holding("averages-in-list", EITHER, COPIES)(f"""
    end:
        {PARAMS}
        for average, param in zip(self.held, params, strict=True):
            average.lerp_(param, 0.1)
    seen: optimizer.held
""")
holding("momentum-in-dict-on-itself", EITHER, "{}")("""
    param: average = self.held.setdefault(param, torch.zeros_like(param))
    update: cube(average.lerp_(grad, 0.3))
""")
# Lookahead: every other step parameters go back half way
holding("slow-weights", EITHER, COPIES)(f"""
    body: steps = 0
    end:
        {PARAMS}
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, param in zip(self.held, params, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)
    seen: optimizer.held
""")
holding("inner-optimizer", EITHER, "SGD(params, lr=0.01, momentum=0.9)", (), end="self.held.step()")
# HeavyBall keeps its compiled maps so.
holding("module-per-parameter", EITHER, "{id(p): linear(i) for i, p in enumerate(params)}")("""
    times: self.held[id(param)].weight.mean()
""")
modules("factor-in-state")("""
    param:
        if not state:
            state["factor"] = Factor(len(param))
    update: state["factor"].apply(grad)
""")
