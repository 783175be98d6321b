"""Gradients that the step writes, replaces, clears or finds elsewhere, and those that are missing."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, Family, Said, pieces_of

gradients, missing = Family("gradients", EITHER), Family("no gradient", EITHER)
SEEN, ADDED = {"compares_grads": True}, {"accumulates": True}

# -- written by the step ---------------------------------------------------------------------------

DECAY = {"param": "grad.add_(param, alpha=0.1)"}
gradients("decay-in-gradient", **DECAY, **SEEN)
gradients("decay-in-gradient-elementwise", **DECAY, update="grad", **SEEN)
gradients("gradient-zeroed", then="grad.zero_()", **ADDED)
gradients("gradient-replaced", param="param.grad = cube(grad)", update="param.grad", **SEEN)
gradients("gradients-cleared-by-step", end="self.zero_grad()", **SEEN)

# -- found elsewhere, or handed over by the user ----------------------------------------------------

MAIN = {"says": "line 2 or 3", "update": 'cube(getattr(param, "main_grad", grad))'}  # as Megatron has it
GIVEN = "for param in params:\n    param.main_grad = param.grad * 2"
gradients("main-gradient", **MAIN, every=GIVEN)
gradients("gradient-scaled-by-user", EQUAL, times="1.0", every="for param in params:\n    param.grad.mul_(0.25)")
gradients("same-gradient-twice", EQUAL, times="1.0", call="optimizer.step()\noptimizer.step()")

# -- missing: something is done to every parameter, with a gradient or without ----------------------

ODD = {"grads": "None if place == 1 and step % 2 == 1 else grad"}
NEVER = {"grads": "None if place == 0 else grad"}
LATE = {"grads": "None if place == 3 and step < 2 else grad"}
NONE = {"grads": "None if step == 1 else grad"}


def going_on(name: str, **pieces: Any) -> Said:
    """Something goes on without a gradient."""
    pieces = {"only_if": "grad is not None", **pieces}
    return missing(name, EITHER, always=True, hypers="decay=0.5", **pieces)


DECAYS = 'param.mul_(1 - group["lr"] * group["decay"])'
going_on("decay-without-gradient", param=DECAYS, **ODD)
going_on("decay-without-any-gradient", param=DECAYS, **NONE)
going_on("momentum-without-gradient", **ODD)("""
    param:
        average = state.setdefault("average", torch.zeros_like(param))
        average.mul_(0.7)
        if grad is not None:
            average.add_(grad)
    only_if:
    update: cube(average)
    scale: 0.1
""")
TICKS = {"param": 'state["step"] = state.get("step", 0) + 1', "scale": '1 / state["step"]'}
going_on("count-without-gradient", **TICKS, **ODD)
going_on("count-until-first-gradient", **TICKS, **LATE)
going_on("going-on-with-all-gradients", param=DECAYS)

# -- frozen parameters: who asks for `requires_grad` ------------------------------------------------

FROZEN = {"prepare": "param.requires_grad_(place != 1)"}
THAWED = pieces_of("""
    param:
        if not param.requires_grad:
            param.mul_(0.9)
    only_if: param.requires_grad and grad is not None
""")
going_on("frozen-decays", **THAWED, **FROZEN)
LEARNS = {"only_if": "param.requires_grad"}
missing("frozen-does-not-learn", **LEARNS, **FROZEN)
# Parameters without gradients are left alone, as torch does.
USUAL = pieces_of("""
    param:
        average = state.setdefault("average", torch.zeros_like(param))
        state["step"] = state.get("step", 0) + 1
    update: cube(average.lerp_(grad, 0.3))
    scale: 1 / state["step"]
""")
# Users freeze so: the gradient is missing as well.
missing("frozen-for-a-step", EQUAL, **USUAL)("""
    edit: params[1].grad = None
    every: params[1].requires_grad_(step != 2)
""")

# -- missing gradients of others matter ------------------------------------------------------------

THERE = 'for p in group["params"]'
missing("count-of-gradients", group=f"count = max(1, sum(p.grad is not None {THERE}))", scale="1 / count", **ODD)
missing("count-of-steps-without-gradients", body="steps = 0", step="self.steps += 1", scale="1 / self.steps", **NONE)
missing("gradient-missing-now-and-then", EQUAL, **USUAL, **ODD)
missing("gradient-never-there", EQUAL, **USUAL, **NEVER)
missing("gradient-there-later", EQUAL, **USUAL, **LATE)
missing("gradients-all-zero-once", EQUAL, times="1.0", grads="torch.zeros_like(grad) if step == 1 else grad")
