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
holding("own-parameter-written-by-module", EITHER, "nn.ParameterList(params)", (), end="self.held[0].mul_(0.9)")
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
holding("module-mode", EITHER, "linear()")("""
    scale: 1.0 if self.held.training else 0.1
    every: optimizer.held.train(step < 2)
""")
holding("module-with-statistics", REFUSED, "nn.BatchNorm1d(1, affine=False)")("""
    update: self.held(grad.reshape(-1, 1)).reshape(grad.shape)
    times: 1.0
""")
holding("module-learns-rate", REFUSED, "linear()", param="self.held.weight.add_(grad.mean() * 0.1)", times=WEIGHT)
holding("module-ties-parameters", EITHER, "nn.ParameterList(params[:1])", (), times="self.held[0].abs().mean()")
COPIES = "[p.detach().clone() for p in params]"
holding("averages-in-list", EITHER, COPIES)(f"""
    end:
        {PARAMS}
        for average, param in zip(self.held, params, strict=True):
            average.lerp_(param, 0.1)
    seen: optimizer.held
""")
holding("averages-by-id", EITHER, "{id(p): p.detach().clone() for p in params}")("""
    param:
        average = self.held[id(param)]
        average.lerp_(param, 0.1)
    then: param.lerp_(average, 0.1)
    seen: list(optimizer.held.values())
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
holding("slow-weights-by-place", EITHER, "{i: p.detach().clone() for i, p in enumerate(params)}")(f"""
    end:
        {PARAMS}
        for i, param in enumerate(params):
            self.held[i].lerp_(param, 0.5)
            param.copy_(self.held[i])
    seen: optimizer.held
""")
holding("inner-optimizer", EITHER, "SGD(params, lr=0.01, momentum=0.9)", (), end="self.held.step()")
# HeavyBall keeps its compiled maps so.
holding("module-per-parameter", EITHER, "{id(p): linear(i) for i, p in enumerate(params)}")("""
    times: self.held[id(param)].weight.mean()
""")
SCALER = {"held": "SimpleNamespace(scale=torch.tensor(2.0))", "update": "cube(grad / self.held.scale)"}
holding("scaler-written", EITHER, **SCALER, every="optimizer.held.scale.fill_(2.0 + step)")
holding("scaler-replaced", EITHER, **SCALER, every="optimizer.held.scale = torch.tensor(2.0 + step)")
modules("factor-in-state")("""
    param:
        if not state:
            state["factor"] = Factor(len(param))
    update: state["factor"].apply(grad)
""")
holding("factor-on-itself", EITHER, "{id(p): Factor(len(p)) for p in params}")("""
    update: self.held[id(param)].apply(grad)
""")
LOG = {"held": "SimpleNamespace(total=torch.zeros(()), norms=[])"}  # which the step never reads
holding("norms-summed", EITHER, **LOG, param="self.held.total.add_(grad.abs().max())", seen="optimizer.held.total")
holding("norms-logged", EITHER, **LOG)("""
    param: self.held.norms.append(grad.abs().max().item())
    seen: list(optimizer.held.norms)
""")
