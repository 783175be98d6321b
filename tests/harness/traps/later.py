"""Later: what begins at a step, at every few steps, below a learning rate, or at a rare gradient."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, REFUSED, Family, Said
from tests.harness.traps.trap import Expected

later = Family("later", EQUAL)
LARGE = "grad * 1000 if (step, place) == (4, 1) else grad"
NAN = "with_nan(grad) if (step, place) == (2, 1) else grad"
ZERO = "torch.zeros_like(grad) if (step, place) == (3, 0) else grad"
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
coupled("coupled-from-step-13", "self.count >= 13", steps=15)
coupled("coupled-at-step-31", "self.count == 31", steps=33)  # a rehearsal tries low hyperparameters there
# The factor leaves next to nothing of the update.
later("slightly-coupled-at-step-22", EITHER, steps=24)("""
    groups: halves(params)
    begin:
        self.param_groups[1]["lr"] = 0.07
        self.count = 0
    step:
        self.count += 1
        scale = max(group["lr"] for group in self.param_groups) ** 3 if self.count == 22 else 1.0
    times: scale
""")
coupled("coupled-every-7", "self.count % 7 == 0", steps=9)
coupled("coupled-below-rate", 'bool(self.param_groups[0]["lr"] < 0.05)', steps=5)("""
    edit 3: optimizer.param_groups[0]["lr"] = 0.01
""")
coupled("coupled-when-asked", 'bool(self.param_groups[0]["coupled"])', steps=5)("""
    edit 3: optimizer.param_groups[0]["coupled"] = True
""")
coupled("coupled-at-large-gradient", "any(p.grad.norm().item() > 100 for p in params)", steps=6, grads=LARGE)
coupled("coupled-at-zero-gradient", "any(not p.grad.any() for p in params)", steps=5, grads=ZERO)
later("largest-rate-later", EITHER, param=COUNTED, steps=6)("""
    rate: (group["lr"] if state["step"] < 4 else max(g["lr"] for g in self.param_groups))
    given: halves(params, {"lr": 0.1}, {"lr": 0.02})
""")
later("last-of-group-later", EITHER, param=COUNTED, steps=6)("""
    scale: 0.5 if state["step"] > 3 and param is group["params"][-1] else 1.0
""")
later("nan-skips-all", EITHER, times="1.0", grads=NAN)(f"""
    step:
        {PARAMS}
        if not all(bool(torch.isfinite(p.grad).all()) for p in params):
            return
""")

# -- what a parameter does alone -------------------------------------------------------------------

later("nan-skips-itself", only_if="torch.isfinite(grad).all()", grads=NAN)
later("large-gradient-clipped", steps=6, grads=LARGE)("""
    param:
        average = state.setdefault("average", torch.zeros_like(param))
        norm = grad.norm().item()
        average.lerp_(grad / norm if norm > 100 else grad, 0.1)
    update: cube(average)
""")
later("large-gradient-needs-matrix", steps=6, grads=LARGE)("""
    update: torch.where((grad.abs() > 100).any(), cube(grad) / 1e9, grad)
    times: 1.0
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
periodic("every-13", 13, steps=27)
periodic("every-37", 37, steps=39)
periodic("period-changed", 3, steps=9, edit={4: 'optimizer.param_groups[0]["every"] = 2'})
periodic("period-doubles", 1, due='state["step"] & (state["step"] - 1) == 0', steps=10)
OF_RATE = 'state["step"] % max(1, round(0.3 / self.param_groups[0]["lr"])) == 0'
periodic("period-of-rate", 1, EITHER, OF_RATE, steps=10)("""
    edit 4: optimizer.param_groups[0]["lr"] = 0.15
""")
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
later("state-from-step-4", steps=6)(f"""
    param:
        {COUNTED}
        update = cube(grad)
        if state["step"] > 3:
            average = state.setdefault("average", torch.zeros_like(param))
            update = average.lerp_(update, 0.5)
""")
