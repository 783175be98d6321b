"""Harmless optimizers and edits: they look suspicious, and have to be followed. Refusing all would be easy."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EQUAL, Family, Said

harmless = Family("harmless", EQUAL)

# -- what surrounds the step, and nobody changes ----------------------------------------------------

harmless("nested-functions")("""
    param:
        lr = group["lr"]

        def turned(value):
            return value.T if value.shape[0] > value.shape[1] else value

        def scaled(value):
            return cube(value) * lr

        update = scaled(turned(grad))
        param.sub_(update if update.shape == param.shape else update.T)
    update:
""")
harmless("global-numbers")("""
    outside:
        POWER = 3
        COEFFICIENTS = (1.0, -0.1, 0.01)
        RULES = {"tall": 0.5, "wide": 2.0}

        def powers(grad, coefficients=COEFFICIENTS):
            total, power = torch.zeros_like(grad), grad
            for coefficient in coefficients:
                power = power @ grad.T @ grad
                total = total + coefficient * power
            return total
    param: rule = RULES["tall" if param.shape[0] > param.shape[1] else "wide"]
    update: powers(grad) / POWER
    scale: rule
""")
harmless("global-tensor", outside="SCALE = torch.tensor(0.5)", times="SCALE")
harmless("constant-closure")("""
    outside:
        def make_scaling(factor):
            def scaled(value):
                return value * factor
            return scaled

        HALVED = make_scaling(0.5)
    update: HALVED(cube(grad))
""")
# It calls what it inherits, by `super`.
harmless("subclass")("""
    outside:
        class Base(PerParameter):
            def decay(self, param, group):
                param.mul_(1 - group["lr"] * 0.1)

            def direction(self, grad):
                return cube(grad)

            def update(self, param, grad, group, state):
                self.decay(param, group)
                param.add_(self.direction(grad), alpha=-group["lr"])
    base: Base
    body:
        def direction(self, grad):
            return super().direction(grad) * 0.5

        def step(self, closure=None):
            return super().step(closure)
""")

# -- how it goes through parameters and state -------------------------------------------------------

# It collects lists first, as torch does.
harmless("lists-first")("""
    whole:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            averages = [self.state[p].setdefault("average", torch.zeros_like(p)) for p in params]
            for param, grad, average in zip(params, grads, averages, strict=True):
                average.lerp_(grad, 0.3)
                param.add_(cube(average), alpha=-group["lr"])
""")
AT_ONCE = """
    for group in self.param_groups:
        for param in group["params"]:
            self.state[param].update(sum=torch.full_like(param, 0.1), step=torch.tensor(0.0))
"""  # as Adagrad does
harmless("state-at-once", begin=AT_ONCE)("""
    param:
        state["step"] += 1
        state["sum"].addcmul_(grad, grad)
        param.addcdiv_(grad, state["sum"].sqrt(), value=-group["lr"])
    update:
""")
# Every level is a new one, and the logger remembers of each whether it is on.
harmless("logging")("""
    outside: LOG = logging.Logger("of an optimizer")
    param: LOG.log(-time.perf_counter_ns(), "a step")
""")

# -- what users do every day between steps ----------------------------------------------------------

AVERAGE = """
average = state.setdefault("average", torch.zeros_like(param))
average.lerp_(grad, 1 - group["beta"])
"""


def talking(name: str, **others: Any) -> Said:
    """Has flags, a log and a name that its step does not read, and a mode; and what its user does."""
    return harmless(
        name,
        hypers="beta=0.7",
        begin='self.verbose, self.log, self.label = False, [], "one"',
        body="""
            training = True

            def train(self, mode=True):
                self.training = mode

            def eval(self):
                self.train(False)
        """,
        update="cube(average)",
        **{"param": AVERAGE, **others},
    )


EMA = {"then": 'state.setdefault("ema", param.clone()).lerp_(param, 0.3)'}
VALIDATED = "optimizer.eval()\noptimizer.train()"
SCHEDULED = """
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)
        group["beta"] = 0.7 + 0.01 * step
"""
RATE = 'optimizer.param_groups[0]["lr"]'
SCHEDULER = "optimizer.note = {'scheduler': LambdaLR(optimizer, lambda epoch: 0.5**epoch)}"
talking("flag-flipped", every="optimizer.verbose = step % 2 == 0")
talking("log-written", every='optimizer.log.append(f"step {step}")\noptimizer.note = {"step": step}')
talking("validated", every=VALIDATED)
talking("validated-and-asserted", param=f"assert self.training\n{AVERAGE}", every=VALIDATED)
talking("scheduled", every=SCHEDULED)
STEP = 'optimizer.note["scheduler"].step()'
talking("scheduled-by-torch", edit={0: SCHEDULER, 1: STEP, 2: STEP, 3: STEP})
harmless("one-group-changed", times="1.0", given="halves(params)", edit='optimizer.param_groups[1]["lr"] = 0.3')
TENSOR = {"hypers": "lr=torch.tensor(0.1)", "times": "1.0"}
harmless("rate-tensor", **TENSOR)
harmless("rate-tensor-halved", **TENSOR, every=f"{RATE}.mul_(0.5)")
harmless("rate-becomes-tensor", times="1.0", edit=f"{RATE} = torch.tensor(0.05)")
harmless("rate-becomes-zero", times="1.0", edit=f"{RATE} = 0.0")
talking("parameters-written", **EMA, every="with torch.no_grad():\n    for param in params:\n        param.mul_(0.9)")
talking("parameter-data-written", **EMA, every="for param in params:\n    param.data.mul_(0.9)")
talking("own-state-loaded", **EMA, edit="optimizer.load_state_dict(optimizer.state_dict())")
talking("hooks-that-change-nothing")("""
    after:
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: None)
        optimizer.register_step_post_hook(lambda opt, args, kwargs: opt.log.append("done"))
    seen: list(optimizer.log)
""")
