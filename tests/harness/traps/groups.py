"""Other groups: what a step reads or writes of a group that its parameter is not in, and what becomes of groups."""

from __future__ import annotations

from tests.harness.traps.grammar import AVERAGE, EITHER, EQUAL, ON_HOST, REFUSED, Family

others = Family("other groups", EITHER)
TWO_RATES = 'halves(params, {"lr": 0.1}, {"lr": 0.02})'
TWO = {"groups": TWO_RATES}
FIRST, OTHER = 'optimizer.param_groups[0]["lr"] = 0.5', 'optimizer.param_groups[1]["lr"] = 0.5'

# -- rates -----------------------------------------------------------------------------------------

RATE_OF_FIRST = {"rate": 'float(self.param_groups[0]["lr"])', **TWO}
LARGEST = {"rate": 'float(max(other["lr"] for other in self.param_groups))', **TWO}
others("rate-of-first-group", **RATE_OF_FIRST)
others("rate-of-first-group-changed", **RATE_OF_FIRST, edit=FIRST)
others("largest-rate", **LARGEST)
others("largest-rate-changed", **LARGEST, edit=OTHER)
others("largest-rate-elementwise", **AVERAGE, **LARGEST)
others("largest-rate-on-host", **ON_HOST, **LARGEST)
others("relative-rate", scale='0.1 / sum(other["lr"] for other in self.param_groups)', **TWO)
others("first-group-by-identity", scale="0.5 if group is self.param_groups[0] else 1.0", **TWO)

# -- the step sees all groups at once --------------------------------------------------------------

GRADS = 'for g in self.param_groups for p in g["params"]'
others("number-of-group", times="1.0 / (1 + number)", **TWO)
others("rate-of-next-group", **TWO)("""
    step: after = self.param_groups[1:] + self.param_groups[:1]
    times: after[number]["lr"] * 10
""")
others("norm-of-all", REFUSED, step=f"norm = torch.stack([p.grad.norm() {GRADS}]).norm()", **TWO)("""
    times: 1.0 / (1.0 + norm)
""")
others("norm-of-group", REFUSED, **TWO)("""
    group: norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
    times: 1.0 / (1.0 + norm)
""")
others("norm-of-first-group", REFUSED, **TWO)("""
    step: norm = sum(p.grad.norm().item() for p in self.param_groups[0]["params"])
    times: 1.0 / max(1.0, norm) if number == 0 else 1.0
""")
others("statistics-of-first-group", REFUSED, **TWO)("""
    step: found = torch.stack([p.grad.square().mean() for p in self.param_groups[0]["params"]]).mean()
    times: 1.0 if number == 0 else found
""")
HANDED_ON = {"step": 'self.param_groups[1]["lr"] = self.param_groups[0]["lr"] * 0.5', "times": "1.0", **TWO}
others("rate-handed-on", **HANDED_ON)
others("rate-handed-on-changed", **HANDED_ON, edit=FIRST)
others("rate-of-its-own", group='group["lr"] *= 0.9', times="1.0", **TWO)
others("paused-together", **TWO)("""
    step:
        if any(group.get("paused", False) for group in self.param_groups):
            return
    times: 1.0
    edit: optimizer.param_groups[1]["paused"] = True
""")
others("shared-schedule", **TWO)("""
    says: schedule
    begin:
        schedule = {"ticks": 0}
        for group in self.param_groups:
            group["schedule"] = schedule
    group: group["schedule"]["ticks"] += 1
    times: 1.0 / group["schedule"]["ticks"]
""")

# -- what becomes of groups ------------------------------------------------------------------------

ADDED = {"given": "params[:-1]", "edit": 'optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})'}
others("group-added-midway", EQUAL, times="1.0", **ADDED)
others("group-added-midway-and-counted", scale="1 / len(self.param_groups)", **TWO, **ADDED)
for name, edit in {
    "group-removed": """
        for param in optimizer.param_groups.pop(1)["params"]:
            optimizer.state.pop(param, None)
    """,
    "groups-reversed": "optimizer.param_groups.reverse()",
    "parameter-moved-to-other-group": """
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    """,
    "group-replaced": 'optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.3}',
}.items():
    others(name, EITHER, times="1.0", given=TWO_RATES, edit=edit)
