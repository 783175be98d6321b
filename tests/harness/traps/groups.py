"""Other groups: what a step reads or writes of a group that its parameter is not in, and what becomes of groups."""

from __future__ import annotations

from tests.harness.traps.grammar import AVERAGE, EITHER, EQUAL, REFUSED, Family

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

# -- the step sees all groups at once --------------------------------------------------------------

GRADS = 'for g in self.param_groups for p in g["params"]'
others("number-of-group", times="1.0 / (1 + number)", **TWO)
others("norm-of-all", REFUSED, step=f"norm = torch.stack([p.grad.norm() {GRADS}]).norm()", **TWO)("""
    times: 1.0 / (1.0 + norm)
""")
others("norm-of-group", REFUSED, **TWO)("""
    group: norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
    times: 1.0 / (1.0 + norm)
""")
HANDED_ON = {"step": 'self.param_groups[1]["lr"] = self.param_groups[0]["lr"] * 0.5', "times": "1.0", **TWO}
others("rate-handed-on", **HANDED_ON)
others("rate-of-its-own", group='group["lr"] *= 0.9', times="1.0", **TWO)
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
