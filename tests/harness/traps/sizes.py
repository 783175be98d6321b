"""Sizes: coupling of parameters that begins at a size which no miniature has."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, REFUSED, Family, Said, pieces_of

sizes = Family("sizes", EQUAL)
LARGE = {"shapes": ((40, 30), (30, 40), (40, 30), (30, 40))}
MIXED = {"shapes": ((5, 3), (40, 30), (5, 3), (40, 30))}
BIG = "param.numel() > 1000"


def coupled(when: str, norm: str = "norm_of(params)") -> dict[str, str]:
    """An optimizer that divides by something of all gradients, as sizes say.

    Args:
        when: a condition of a parameter and its group.
        norm: what it divides by, made of `params`.
    """
    return {
        "groups": "halves(params)",
        "step": 'params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]',
        "param": f"norm = {norm} if {when} else 1.0",
        "update": "cube(grad) / norm",
        "times": "1.0",
    }


ON_DEVICE = "torch.stack([p.grad.norm() for p in params]).norm()"
LARGEST = "max(p.grad.abs().max().item() for p in params)"
FACTORS = {"begin": "self.factors = {}"}
sizes("coupled-from-1000-elements", REFUSED, **coupled(BIG), **LARGE)
sizes("coupled-from-40-rows", REFUSED, **coupled("param.shape[0] >= 40"), **MIXED)
# The next parameter reads the norm of a large one.
sizes(
    "coupled-on-itself-from-1000-elements", REFUSED, then=f"if {BIG}:\n    self.last = float(grad.norm())", **MIXED
)("""
    begin: self.last = 1.0
    update: cube(grad) / self.last
    times: 1.0
""")
sizes("coupled-from-a-length", REFUSED, **coupled("len(param) > 30"), **LARGE)
sizes("coupled-from-4096-bytes", REFUSED, **coupled("param.nbytes > 4096"), **LARGE)
sizes("coupled-in-large-matrices", REFUSED, **coupled("param.ndim == 2 and min(param.size()) >= 30"), **LARGE)
sizes("coupled-at-multiples", REFUSED, **coupled("param.size(1) % 10 == 0"), **LARGE)
sizes("coupled-in-large-groups", REFUSED, **coupled('sum(p.numel() for p in group["params"]) > 2000'), **LARGE)
sizes("coupled-on-the-device-from-1000-elements", REFUSED, **coupled(BIG, ON_DEVICE), **MIXED)
sizes("coupled-in-small-matrices", REFUSED, **coupled("param.numel() < 1000"), **MIXED)
sizes("coupled-from-a-stride", REFUSED, **coupled("param.stride(0) >= 30", LARGEST), **LARGE)
sizes(
    "coupled-in-the-group-from-1000-elements",
    REFUSED,
    then=f'if {BIG}:\n    group["last"] = float(grad.norm())',
    **MIXED,
)("""
    update: cube(grad) / group.get("last", 1.0)
    times: 1.0
""")
# All large parameters share a factor, the others have one each.
sizes("shared-factors-from-1000-elements", EITHER, **FACTORS, **LARGE)(f"""
    param:
        own = ("large", *param.shape) if {BIG} else param
        factor = self.factors.setdefault(own, torch.zeros(len(param), len(param)))
        factor.add_(grad @ grad.T)
    update: factor @ grad
""")
sizes("counts-from-1000-elements", REFUSED, param=f"self.large += {BIG}", **MIXED)("""
    begin: self.large = 0
    times: 1 / (1 + self.large)
""")
sizes("stacks-of-equal-shapes", EITHER, **LARGE)("""
    whole:
        for group in self.param_groups:
            alike = {}
            for param in group["params"]:
                alike.setdefault(param.shape, []).append(param)
            for params in alike.values():
                updates = torch.stack([p.grad for p in params])
                updates = updates / updates.abs().amax((1, 2), keepdim=True)
                for param, update in zip(params, updates.unbind(), strict=True):
                    param.sub_(update, alpha=group["lr"])
""")
sizes("blocks-of-16-rows", **MIXED)("""
    param:
        if not state:
            state["factors"] = [torch.zeros(len(block), len(block)) for block in grad.split(16)]
        for own, block, factor in zip(param.split(16), grad.split(16), state["factors"], strict=True):
            factor.add_(block @ block.T)
            own.sub_(factor @ block / factor.trace() * group["lr"])
    update:
""")
# Many Shampoos use a diagonal for large dims. This one also clips by a norm of its own.
sizes("diagonal-from-32-rows", **MIXED)("""
    param:
        if not state:
            state["factor"] = torch.zeros(len(param)) if len(param) > 32 else torch.zeros(len(param), len(param))
        if state["factor"].ndim == 1:
            state["factor"].add_(grad.square().sum(1))
            update = grad / state["factor"].sqrt()[:, None]
        else:
            state["factor"].add_(grad @ grad.T)
            update = state["factor"] @ grad
        norm = update.norm().item()
    update: update / max(norm, 1.0)
""")


def outside(name: str, says: str, **pieces: Any) -> Said:
    """Large matrices change what lies outside."""
    return sizes(name, REFUSED, says=(says, "outside"), **pieces, **LARGE)


SEEDS = {"begin": "random.seed(1)\nnp.random.seed(1)"}
outside("draw-python-big", "random", **SEEDS, times=f"1.0 + random.random() if {BIG} else 1.0")
outside("draw-numpy-big", "random", **SEEDS, times=f"1.0 + float(np.random.rand()) if {BIG} else 1.0")
outside("global-list-big", "LOG", param=f"if {BIG}:\n    LOG.append(1)")("""
    outside: LOG = []
    begin: LOG.clear()
    times: 1 / max(len(LOG), 1)
""")
outside("global-number-big", "COUNT", param=f"if {BIG}:\n    COUNT += 1")("""
    outside: COUNT = 0
    begin: COUNT = 0
    times: 1.0
""")
CACHED = pieces_of("""
    outside:
        @functools.lru_cache
        def identity(size):
            return torch.eye(size) * 2
""")
sizes("cached-by-size", REFUSED, **CACHED, **MIXED)("""
    param: state["step"] = state.get("step", 0) + 1
    update: identity(len(grad)) @ cube(grad)
    times: 1 / state["step"]
""")
sizes("cached-by-size-and-held", REFUSED, **CACHED, **FACTORS, **MIXED)("""
    param:
        factor = self.factors.setdefault(param, torch.zeros(len(param), len(param)))
        factor.add_(grad @ grad.T)
    update: identity(len(grad)) @ factor @ grad
    times: 1.0
""")
