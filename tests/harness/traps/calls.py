"""The call: what `step` returns, what it is given, when closures run, and what else the user calls."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, Family, Said, nested, pieces_of
from tests.harness.traps.trap import DDP, PLAIN

calls = Family("the call", EITHER)


def called(name: str, arguments: str = "closure=None", **others: Any) -> Said:
    """A trap of a method `step` with these arguments."""
    said = calls(name, base="Calling", **others)
    return lambda text: said(nested("body:", nested(f"def step(self, {arguments}):", text)))


# -- what it returns -------------------------------------------------------------------------------

LOSS = pieces_of("""
    body:
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            super().step()
            return loss

        def update(self, param, grad, group, state):
            param.add_(cube(grad), alpha=-group["lr"])
""")
CLOSURE = {"call": "optimizer.step(feed)"}
called("returns-number")("""
    self.take()
    return len(self.param_groups) + self.param_groups[0]["lr"]
""")
calls("returns-loss", EQUAL, **LOSS, **CLOSURE)

# -- closures --------------------------------------------------------------------------------------

# The closure computes gradients for the next step.
called("closure-late", "closure", **CLOSURE)("""
    self.take()
    return closure()
""")
# Sharpness-aware methods do so.
called("closure-twice", "closure", **CLOSURE)("""
    closure()
    self.take(0.1)
    loss = closure()
    self.take()
    return loss
""")
calls("closure-dropped", times="1.0", **CLOSURE)
# Polyak's rule has it so.
called("loss-scales", "closure", **CLOSURE)("""
    loss = closure()
    self.take(float(loss))
    return loss
""")

# -- arguments and other methods -------------------------------------------------------------------

called("takes-rate", "closure=None, lr=0.1", call="optimizer.step(lr=0.1 / (1 + step))")("""
    self.take(lr * 10)
""")
# Under FSDP2 the second method is not ours: DTensors compute it, and their sums are others.
calls("two-methods", layouts=(PLAIN, DDP))("""
    base: Calling
    body:
        def step(self, closure=None):
            self.take()

        def second_step(self):
            self.take(0.5)
    call:
        optimizer.step()
        optimizer.second_step()
""")
# The user swaps averages with parameters to validate, and back.
AVERAGES = pieces_of("""
    then: state.setdefault("ema", param.clone()).lerp_(param, 0.3)
    body:
        @torch.no_grad()
        def swap(self):
            for param, state in self.state.items():
                kept = param.clone()
                param.copy_(state["ema"])
                state["ema"].copy_(kept)
""")
calls("averages-swapped-twice", **AVERAGES, edit="optimizer.swap()\noptimizer.swap()")
calls("step-under-no-grad", EQUAL, times="1.0", call="with torch.no_grad():\n    return optimizer.step()")
