"""Where a parameter stands: its attributes, its identity, its place among others, how it lies, who stands beside it."""

from __future__ import annotations

from tests.harness.traps.grammar import AVERAGE, EITHER, EQUAL, IN_COLUMNS, ON_HOST, REFUSED, Family, pieces_of
from tests.harness.traps.trap import DDP, PLAIN

standing = Family("standing", EITHER)

# -- attributes of parameters ----------------------------------------------------------------------

RATE = {"scale": 'getattr(param, "lr_mul", 1.0)'}  # as in modded-nanogpt
GIVEN = "param.lr_mul = 1.0 + place"
CHANGED = "params[1].lr_mul = 3.0"
standing("lr-mul", EQUAL, **RATE, prepare=GIVEN)
standing("lr-mul-of-one", EQUAL, **RATE, edit=CHANGED)
standing("lr-mul-changed", EQUAL, **RATE, prepare=GIVEN, edit=CHANGED)
standing("lr-mul-elementwise", EQUAL, **AVERAGE, **RATE, prepare=GIVEN)
standing("lr-mul-elementwise-changed", EQUAL, **AVERAGE, **RATE, prepare=GIVEN, edit=CHANGED)
standing("lr-mul-on-host", EQUAL, **ON_HOST, **RATE, prepare=GIVEN)
standing("use-muon-of-parameter", EQUAL)("""
    update: cube(grad) if getattr(param, "use_muon", False) else grad.sign()
    prepare: param.use_muon = place % 2 == 0
""")
standing("label-of-parameter", EQUAL)("""
    scale: 0.5 if "head" in getattr(param, "label", "") else 1.0
    prepare: param.label = "head" if place == 1 else f"layers.{place}"
""")
SPEC = pieces_of("""
    says: spec
    param: param.mul_(1 - group["lr"] * param.spec.decay)
    scale: param.spec.rate
    prepare: param.spec = SimpleNamespace(rate=1.0 + place, decay=0.1 * place)
""")
standing("spec-of-parameter", **SPEC)
standing("spec-of-parameter-changed", **SPEC, edit="params[1].spec.rate = 5.0")
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
ALL = "for param in params:\n    param.options = "
standing("options-of-parameter-given", **OPTIONS, edit=TWICE)
standing(
    "options-of-parameter-changed",
    **OPTIONS,
    edit={0: ALL + '{"twice": False}', 2: 'params[1].options["twice"] = True'},
)
standing(
    "options-of-parameter-rescaled", **OPTIONS, edit={0: ALL + '{"scale": 1.0}', 2: 'params[1].options["scale"] = 3.0'}
)
standing("options-of-parameter-rescaled-late", **OPTIONS, steps=7)("""
    every: params[1].options = {"scale": 3.0} if step == 5 else {"note": "x" * step}
""")
# A new plan is made for other reasons, too, and the attributes are looked at there.
for name, edit in {
    "explained": {0: f'if hasattr(optimizer, "canzona"):\n    optimizer.canzona.explain()\n{TWICE}'},
    "and-rates": f"params[0].lr_mul = 3.0\n{TWICE}",
    "loaded": f"optimizer.load_state_dict(optimizer.state_dict())\n{TWICE}",
}.items():
    standing(f"options-of-parameter-{name}", EITHER, **OPTIONS, edit=edit)

# -- its identity: what the constructor keeps, and how the step finds a parameter there --------------

SCALES = "1.0 + i for i, p in enumerate(params)"
WEAK = f"WeakTensorKeyDictionary()\nself.special.update({{p: {SCALES}}})"
for name, special, scale in (
    ("known-by-id", "{id(params[1])}", "0.3 if id(param) in self.special else 1.0"),
    ("known-by-address", "{params[1].data_ptr()}", "0.3 if param.data_ptr() in self.special else 1.0"),
    ("known-in-set", "{params[1], params[2]}", "0.3 if param in self.special else 1.0"),
    ("known-as-attribute", "params[1]", "0.3 if param is self.special else 1.0"),
    ("scales-by-id", f"{{id(p): {SCALES}}}", "float(self.special.get(id(param), 1.0))"),
    ("scales-by-parameter", f"{{p: {SCALES}}}", "float(self.special.get(param, 1.0))"),
    ("scales-by-weak-reference", WEAK, "float(self.special.get(param, 1.0))"),
):
    # A DTensor has no address: all of them say 0.
    where = {"layouts": (PLAIN, DDP)} if "address" in name else {}
    standing(name, EITHER, says="special", begin=f"self.special = {special}", scale=scale, **where)

# -- its place -------------------------------------------------------------------------------------

ELEMENTS = 'sum(p.numel() for group in self.param_groups for p in group["params"])'
standing("index-in-group", scale="1.0 / (1 + place)")
standing("depth-in-group", scale='float(0.5 ** (place / len(group["params"])))')
standing("first-of-group", scale='0.3 if param is group["params"][0] else 1.0')
standing("last-of-group", scale='0.3 if param is group["params"][-1] else 1.0')
standing("count-of-group", scale='1.0 / len(group["params"])')
standing("count-of-elements", scale=f"float(10.0 / {ELEMENTS})")
standing("count-of-elements-at-first", EQUAL, begin=f"self.elements = {ELEMENTS}", scale="float(10.0 / self.elements)")
standing("count-of-groups", scale="1.0 / len(self.param_groups)", given="halves(params)")
standing("place-among-all")("""
    step: count = 0
    param: count += 1
    update: grad.sign()
    times: 1 / count
    given: halves(params)
""")
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
standing("names-in-group")("""
    groups: [(f"layer{i}", p) for i, p in enumerate(params)]
    scale: 0.3 if group["param_names"][place].endswith("1") else 1.0
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
standing("constant-by-shape")("""
    says: identities
    begin: self.identities = {}
    param:
        rows = len(param)
        if rows not in self.identities:
            self.identities[rows] = torch.eye(rows)
    update: (grad @ grad.T + self.identities[rows]) @ grad
""")
