"""Where a parameter stands: its attributes, its identity, its place among others, how it lies, who stands beside it."""

from __future__ import annotations

from tests.harness.traps.grammar import AVERAGE, EITHER, EQUAL, IN_COLUMNS, REFUSED, Family, pieces_of
from tests.harness.traps.trap import DDP, PLAIN

standing = Family("standing", EITHER)

# -- attributes of parameters ----------------------------------------------------------------------

RATE = {"scale": 'getattr(param, "lr_mul", 1.0)'}  # as in modded-nanogpt
GIVEN = "param.lr_mul = 1.0 + place"
CHANGED = "params[1].lr_mul = 3.0"
standing("lr-mul", EQUAL, **RATE, prepare=GIVEN)
standing("lr-mul-changed", EQUAL, **RATE, prepare=GIVEN, edit=CHANGED)
standing("lr-mul-elementwise", EQUAL, **AVERAGE, **RATE, prepare=GIVEN)
standing("use-muon-of-parameter", EQUAL)("""
    update: cube(grad) if getattr(param, "use_muon", False) else grad.sign()
    prepare: param.use_muon = place % 2 == 0
""")
SPEC = pieces_of("""
    says: spec
    param: param.mul_(1 - group["lr"] * param.spec.decay)
    scale: param.spec.rate
    prepare: param.spec = SimpleNamespace(rate=1.0 + place, decay=0.1 * place)
""")
standing("spec-of-parameter", **SPEC)
standing("count-on-parameter")("""
    says: steps_taken
    param: param.steps_taken += 1
    scale: 1 / param.steps_taken
    prepare: param.steps_taken = place
""")
standing("tensor-on-parameter", says="gain", times="param.gain", prepare="param.gain = torch.tensor(1.0 + place)")

OPTIONS = pieces_of("""
    says: options
    param: options = getattr(param, "options", {})
    times: options.get("scale", 2.0 if options.get("twice") else 1.0)
""")
TWICE = 'params[1].options = {"twice": True}'
# A new plan is made for another reason, and the attributes are looked at there.
LOADED = "optimizer.load_state_dict(optimizer.state_dict())"
standing("options-of-parameter-loaded", EITHER, **OPTIONS, edit=f"{LOADED}\n{TWICE}")

# -- its identity: what the constructor keeps, and how the step finds a parameter there --------------

SCALES = "1.0 + i for i, p in enumerate(params)"
WEAK = f"WeakTensorKeyDictionary()\nself.special.update({{p: {SCALES}}})"
for name, special, scale in (
    ("known-by-id", "{id(params[1])}", "0.3 if id(param) in self.special else 1.0"),
    ("known-in-set", "{params[1], params[2]}", "0.3 if param in self.special else 1.0"),
    ("scales-by-parameter", f"{{p: {SCALES}}}", "float(self.special.get(param, 1.0))"),
    ("scales-by-weak-reference", WEAK, "float(self.special.get(param, 1.0))"),
):
    standing(name, EITHER, says="one_per_matrix=", begin=f"self.special = {special}", scale=scale)

# -- its place -------------------------------------------------------------------------------------

standing("index-in-group", scale="1.0 / (1 + place)")
standing("count-of-group", scale='1.0 / len(group["params"])')
standing("count-of-same-shape")("""
    whole:
        for group in self.param_groups:
            buckets = {}
            for param in group["params"]:
                buckets.setdefault(tuple(param.shape), []).append(param)
            for bucket in buckets.values():
                for param in bucket:
                    param.add_(cube(param.grad), alpha=-group["lr"] / len(bucket))
""")

# -- how it lies, and its neighbours ---------------------------------------------------------------

# FSDP2 takes no parameter that lies in columns.
standing("strides", scale="1.0 if param.is_contiguous() else 0.5", start=IN_COLUMNS, layouts=(PLAIN, DDP))
standing("value-of-neighbour", REFUSED, times='group["params"][place - 1].abs().mean()')
standing("gradient-of-neighbour", REFUSED)("""
    group: after = group["params"][1:] + group["params"][:1]
    times: after[place].grad.abs().max()
""")
standing("buffer-by-shape")("""
    says: buffers
    begin: self.buffers = {}
    param:
        shape = tuple(param.shape)
        if shape not in self.buffers:
            self.buffers[shape] = torch.zeros_like(param)
        self.buffers[shape].lerp_(grad, 0.3)
    update: cube(self.buffers[shape])
""")
