"""Later: what begins at a step, at every few steps, below a learning rate, or at a rare gradient."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, REFUSED, Family, Said
from tests.harness.traps.trap import Expected

later = Family("later", EQUAL)
LARGE = "grad * 1000 if (step, place) == (4, 1) else grad"
NAN = "with_nan(grad) if (step, place) == (2, 1) else grad"
PARAMS = 'params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]'
NORM = "torch.stack([p.grad.norm() for p in params]).norm()"
COUNTED = 'state["step"] = state.get("step", 0) + 1'

# -- coupling that begins late: all gradients count, sometimes --------------------------------------


def coupled(name: str, when: str, **others: Any) -> Said:
    """Divides by the norm of all gradients, if something is so."""
    return later(
        name,
        REFUSED,
        groups="halves(params)",
        hypers="coupled=False",
        begin="self.count = 0",
        step=f"self.count += 1\n{PARAMS}\nnorm = {NORM} if {when} else 1.0",
        update="cube(grad) / norm",
        times="1.0",
        **others,
    )


coupled("coupled-from-step-5", "self.count >= 5", steps=7)
coupled("coupled-below-rate", 'bool(self.param_groups[0]["lr"] < 0.05)', steps=5)("""
    edit 3: optimizer.param_groups[0]["lr"] = 0.01
""")
coupled("coupled-at-large-gradient", "any(p.grad.norm().item() > 100 for p in params)", steps=6, grads=LARGE)
later("largest-rate-later", EITHER, param=COUNTED, steps=6)("""
    rate: (group["lr"] if state["step"] < 4 else max(g["lr"] for g in self.param_groups))
    given: halves(params, {"lr": 0.1}, {"lr": 0.02})
""")
later("nan-skips-all", EITHER, times="1.0", grads=NAN)(f"""
    step:
        {PARAMS}
        if not all(bool(torch.isfinite(p.grad).all()) for p in params):
            return
""")

# -- what a parameter does alone -------------------------------------------------------------------

later("large-gradient-clipped", steps=6, grads=LARGE)("""
    param:
        average = state.setdefault("average", torch.zeros_like(param))
        norm = grad.norm().item()
        average.lerp_(grad / norm if norm > 100 else grad, 0.1)
    update: cube(average)
""")


FACTOR = 'if not state:\n    state.update(step=0, factor=torch.eye(len(param)))\nstate["step"] += 1'
EVERY = 'state["step"] % group["every"] == 0'


def periodic(name: str, every: int, expected: Expected = EQUAL, due: str = EVERY, **others: Any) -> Said:
    """Makes a factor anew at some steps."""
    return later(
        name,
        expected,
        hypers=f"every={every}",
        param=f"{FACTOR}\nif {due}:\n    state['factor'].lerp_(grad @ grad.T, 0.5)",
        update='state["factor"] @ grad',
        **others,
    )


periodic("every-7", 7, steps=15)
periodic("period-changed", 3, steps=9, edit={4: 'optimizer.param_groups[0]["every"] = 2'})
later("matrix-from-step-5", steps=7)("""
    param:
        if not state:
            state.update(step=0, average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 0.1)
    update: cube(state["average"]) if state["step"] >= 5 else state["average"]
""")
later("elementwise-below-rate")("""
    update: cube(grad) if group["lr"] > 0.05 else grad
    edit: optimizer.param_groups[0]["lr"] = 0.01
""")
