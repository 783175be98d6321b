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
sizes("coupled-from-1000-elements", REFUSED, **coupled(BIG), **LARGE)
# The next parameter reads the norm of a large one.
sizes(
    "coupled-on-itself-from-1000-elements", REFUSED, then=f"if {BIG}:\n    self.last = float(grad.norm())", **MIXED
)("""
    begin: self.last = 1.0
    update: cube(grad) / self.last
    times: 1.0
""")
sizes("coupled-on-the-device-from-1000-elements", REFUSED, **coupled(BIG, ON_DEVICE), **MIXED)
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
HEADS = """
    for group in self.param_groups:
        alike = {}
        for param in group["params"]:
            alike.setdefault(param.shape, []).append(param)
        for (rows, columns), params in alike.items():
            heads = torch.stack([p.grad for p in params]).view(-1, rows // group["heads"], columns)
            NORM
            updates = (heads / heads.abs().amax((1, 2), keepdim=True)).view(-1, rows, columns)
            for param, update in zip(params, updates.unbind(), strict=True):
                param.sub_(update, alpha=group["lr"])
"""
EVEN = {"shapes": ((20, 6), (10, 8), (20, 6), (10, 8))}
sizes("stacks-of-heads", hypers="heads=5", whole=HEADS.replace("NORM", ""), **EVEN)
ONE_NORM = "if rows * columns > 1000: heads = heads.clamp(max=heads.norm() / 100)"
sizes(
    "stacks-with-a-norm-from-1000-elements", REFUSED, hypers="heads=5", whole=HEADS.replace("NORM", ONE_NORM), **LARGE
)
sizes("blocks-of-16-rows", **MIXED)("""
    param:
        if not state:
            state["factors"] = [torch.zeros(len(block), len(block)) for block in grad.split(16)]
        for own, block, factor in zip(param.split(16), grad.split(16), state["factors"], strict=True):
            factor.add_(block @ block.T)
            own.sub_(factor @ block / factor.trace() * group["lr"])
    update:
""")

# Steps that small parameters of any size would not do for. They count, so that a tiny parameter takes each of them.
COUNTED = {"hypers": "ticks=0", "group": 'group["ticks"] += 1'}
FUSED = {"shapes": ((24, 6), (12, 9), (24, 6), (12, 9))}
sizes("heads-that-divide-rows", **{**COUNTED, "hypers": "ticks=0, heads=4"}, **FUSED)("""
    param:
        if len(param) % group["heads"]:
            raise ValueError(f"{group['heads']} heads do not divide {tuple(param.shape)}")
        heads = grad.view(group["heads"], -1, grad.shape[1])
        update = torch.cat([cube(head) for head in heads])
""")
PARTS = "halves(params, {'parts': (8, 2, 2)}, {'parts': [5, 4]})"
sizes("parts-that-sum-to-rows", groups=PARTS, **COUNTED, shapes=((12, 6), (12, 9), (9, 6), (9, 12)))("""
    param:
        if sum(group["parts"]) != len(param):
            raise ValueError(f"the parts {group['parts']} are not {tuple(param.shape)}")
        update = torch.cat([cube(part) for part in grad.split(tuple(group["parts"]))])
""")
sizes("rows-of-eight", **COUNTED, shapes=((24, 6), (16, 9), (24, 6), (16, 9)))("""
    param:
        assert len(param) % 8 == 0, "blocks have eight rows"
        update = torch.cat([cube(block) for block in grad.split(8)])
""")


def outside(name: str, says: str, **pieces: Any) -> Said:
    """Large matrices change what lies outside."""
    return sizes(name, REFUSED, says=(says, "outside"), **pieces, **LARGE)


outside("global-list-big", "LOG", param=f"if {BIG}:\n    LOG.append(1)")("""
    outside: LOG = []
    begin: LOG.clear()
    times: 1 / max(len(LOG), 1)
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
