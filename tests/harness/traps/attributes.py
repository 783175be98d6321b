"""Attributes changed between steps: what the user, or a hook of the user's, sets on the optimizer."""

from __future__ import annotations

from tests.harness.traps.grammar import AVERAGE, EITHER, EQUAL, ON_HOST, REFUSED, Family, pieces_of

attributes = Family("attributes", EQUAL)

# -- a number --------------------------------------------------------------------------------------

BEGIN = {"begin": "self.factor = 1.0"}
SCALED = {**BEGIN, "scale": "float(self.factor)"}
BY_LOSS = "optimizer.factor = 1.0 / (1.0 + 0.7 * step)"  # another number at every step
attributes("attribute-float", **SCALED, edit="optimizer.factor = 2.0")
attributes("attribute-elementwise", **AVERAGE, **BEGIN, scale="self.factor", every=BY_LOSS)
attributes("attribute-on-host", **ON_HOST, **BEGIN, scale="self.factor", every=BY_LOSS)
TENSOR = {"says": "factor", "begin": "self.factor = torch.tensor(1.0)", "times": "self.factor"}
attributes("attribute-tensor-written", EITHER, **TENSOR, edit="optimizer.factor.mul_(2.0)")
attributes("attribute-tensor-replaced", EITHER, **TENSOR, edit="optimizer.factor = torch.tensor(2.0)")

# -- what else may be there ------------------------------------------------------------------------

attributes("attribute-word")("""
    begin: self.mode = "cube"
    update: cube(grad) if self.mode == "cube" else grad.sign()
    edit: optimizer.mode = "sign"
""")
TRANSFORMING = {"begin": "self.transform = cube", "update": "self.transform(grad)"}
attributes("attribute-function", **TRANSFORMING)("""
    outside:
        def square(grad):
            return grad @ grad.T @ grad @ grad.T @ grad
    edit: optimizer.transform = square
""")
CONFIGURED = pieces_of("""
    begin: self.config = {"factor": 1.0, "inner": {"decay": 0.0}}
    param: param.mul_(1 - group["lr"] * self.config["inner"]["decay"])
    scale: self.config["factor"]
""")
attributes("attribute-dict-entry", **CONFIGURED, edit='optimizer.config["factor"] = 2.0')
attributes("attribute-dict-in-dict", **CONFIGURED, edit='optimizer.config["inner"]["decay"] = 0.5')
OBJECT = {"begin": "self.config = SimpleNamespace(factor=1.0)", "scale": "self.config.factor"}
attributes("attribute-object", **OBJECT, edit="optimizer.config.factor = 2.0")
BOOSTED = {"scale": 'self.boost if hasattr(self, "boost") else 1.0'}
attributes("attribute-appears", **BOOSTED, edit="optimizer.boost = 2.0")
attributes("attribute-goes", **BOOSTED, edit={0: "optimizer.boost = 2.0", 2: "del optimizer.boost"})
attributes("method-replaced", EITHER, **SCALED)("""
    says: update
    edit:
        def update(self, param, grad, group, state):
            param.add_(grad.sign(), alpha=-group["lr"])
        optimizer.update = types.MethodType(update, optimizer)
""")
attributes("defaults", EITHER, says="defaults", rate='self.defaults["lr"]', edit='optimizer.defaults["lr"] = 0.3')

# -- modes and hooks -------------------------------------------------------------------------------

attributes("mode-flag")("""
    body:
        training = True

        def train(self):
            self.training = True

        def eval(self):
            self.training = False
    scale: 1.0 if self.training else 0.1
    edit: optimizer.eval()
""")
# Between `train` and `eval` parameters move to their average and back, as one does to validate.
SCHEDULE_FREE = pieces_of("""
    hypers: beta=0.9
    body:
        training = True

        @torch.no_grad()
        def swap(self, weight):
            for group in self.param_groups:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
            self.training = not self.training

        def train(self):
            if not self.training:
                self.swap(0.1)

        def eval(self):
            if self.training:
                self.swap(-1 / 9)
    edit:
        optimizer.eval()
        optimizer.train()
""")
for name, direction, expected in (
    ("schedule-free", "cube(grad)", EITHER),
    ("schedule-free-elementwise", "grad", EQUAL),
):
    attributes(
        name,
        expected,
        **SCHEDULE_FREE,
        param=f"""
            if not state:
                state.update(z=param.clone(), step=0)
            state["step"] += 1
            update = {direction}
            param.lerp_(state["z"], 1 / state["step"])
        """,
        scale='1 - group["beta"]',
        then='state["z"].sub_(update * group["lr"])',
    )
# -- scratch: a tensor that each step fills before it reads it, so that a kernel is not compiled for every number -----

SCRATCH = {"begin": "self.rate = torch.tensor(0.0)", "times": "self.rate", "rate": "1.0"}
TWO_RATES = {"groups": "halves(params, {'lr': 0.1}, {'lr': 0.03})"}
FILLED = 'self.rate.fill_(group["lr"] * len(param) ** 0.5)'
LOWERED = 'optimizer.param_groups[-1]["lr"] = 0.1 / (1 + step)'
attributes("scratch-filled", **SCRATCH, **TWO_RATES, param=FILLED, every=LOWERED)
attributes("scratch-in-a-dict", **TWO_RATES, param=FILLED.replace("self.rate", 'self.held["rate"]'), every=LOWERED)("""
    begin: self.held = {"rate": torch.tensor(0.0), "factors": [1.0, 2.0]}
    rate: self.held["factors"][1]
    times: self.held["rate"]
""")
attributes("scratch-made-anew", **SCRATCH, **TWO_RATES, param='self.rate = torch.tensor(group["lr"])', every=LOWERED)
# What looks like it, and is not.
attributes("scratch-filled-after-use", REFUSED, **SCRATCH, then=FILLED, says="changes self.rate")
attributes("scratch-filled-once", REFUSED, **SCRATCH, **TWO_RATES, step='self.rate.fill_(self.param_groups[0]["lr"])')
attributes("scratch-counts", REFUSED, **SCRATCH, says="changes self.ticks")("""
    begin:
        self.rate, self.ticks = torch.tensor(0.0), torch.tensor(0.0)
    step: self.ticks.add_(1.0)
    param: self.rate.fill_(group["lr"] if self.ticks < 1000 else 0.0)
""")
attributes("scratch-holds-a-norm", EITHER, **SCRATCH, param="self.rate.copy_(0.1 / grad.norm())")
attributes("scratch-sums-norms", REFUSED, **SCRATCH, says="changes self.rate")("""
    step:
        self.rate.zero_()
        for other in self.param_groups[0]["params"]:
            self.rate.add_(other.grad.norm() if other.grad is not None else 0.0)
        self.rate.copy_(0.1 / self.rate.clamp(min=1e20))
""")

# -- a hyperparameter that the step makes a tensor -------------------------------------------------

TENSOR_RATE = {"group": 'if not isinstance(group["lr"], torch.Tensor): group["lr"] = torch.tensor(group["lr"])'}
attributes("rate-made-a-tensor", **TENSOR_RATE, rate="1.0", times='group["lr"]', **TWO_RATES, every=LOWERED, steps=5)
# It fills a tensor of its own with it, and finds that by the number of the group, which a copy may not have.
attributes("rate-in-a-tensor-of-its-own", rate="1.0", times='group["lr"]', **TWO_RATES, every=LOWERED, steps=5)("""
    begin: self.rates = {}
    group:
        own = self.rates.get(number)
        if group["lr"] is not own:
            own = self.rates.setdefault(number, torch.tensor(0.0))
            own.copy_(group["lr"]) if isinstance(group["lr"], torch.Tensor) else own.fill_(group["lr"])
            group["lr"] = own
""")

attributes("hook-before-step", **SCALED)("""
    after:
        handed = iter(range(1, 100))
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: setattr(opt, "factor", 1.0 / next(handed)))
""")
