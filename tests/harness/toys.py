"""Small optimizers by the grammar of traps, each with one trait that wrapping has to live with."""

from __future__ import annotations

from tests.harness.traps.grammar import toy

# -- state -----------------------------------------------------------------------------------------

Cubic = toy("cubic")('param.sub_(cube(grad) * group["lr"])')  # none at all
# The gradient of the step before, whole: a view of what was gathered. Wide matrices travel in bfloat16.
Keeping = toy("keeping")("""
    grad = grad.to(torch.bfloat16 if param.shape[0] < param.shape[1] else torch.float32, copy=True)
    last = state.get("last", torch.zeros_like(grad.T))
    param.sub_((grad @ last @ grad).float() * group["lr"])
    state["last"] = grad.T
""")
Counting = toy("counting", scale='1 / state["step"]', param='state["step"] = state.get("step", 0) + 1')()
# The count is a tensor whose number each step reads, as in timm's optimizers and older ones of torch.
COUNT = {
    "param": 'if not state:\n    state["step"] = torch.tensor(0.0)\nstate["step"] += 1',
    "scale": '1 / (1 - 0.9 ** state["step"].item())',
}
CountingInATensor = toy("counting-in-a-tensor", **COUNT)()
CountingElementwise = toy("counting-elementwise", update="grad * 1.0", **COUNT)()
# Every third step does more, as SOAP and Shampoo do.
Refreshing = toy("refreshing")("""
    if not state:
        state.update(step=0, basis=torch.eye(len(param), dtype=param.dtype))
    state["step"] += 1
    if state["step"] % 3 == 0:
        state["basis"].copy_(torch.linalg.qr(grad @ grad.T + state["basis"])[0])
    param.add_(state["basis"] @ grad, alpha=-group["lr"])
""")
# State that no step reads or writes.
Untouching = toy("untouching")("""
    if not state:
        state.update(spare=torch.zeros(()), table=torch.arange(5.0), like=param.clone())
    param.add_(cube(grad), alpha=-group["lr"])
""")
# Elementwise on every other step.
Alternating = toy("alternating")("""
    if not state:
        state.update(step=0, average=torch.zeros_like(param))
    state["step"] += 1
    state["average"].lerp_(grad, 0.1)
    update = cube(state["average"]) if state["step"] % 2 == 0 else state["average"]
    param.add_(update, alpha=-group["lr"])
""")
# A list of factors, one per side, as many Shampoos keep them, and a counter inside a dict.
Listing = toy("listing")("""
    if not state:
        state["factors"] = [torch.eye(n) for n in param.shape]
        state["counts"] = {"step": 0}
    state["counts"]["step"] += 1
    left, right = state["factors"]
    left.lerp_(grad @ grad.T, 0.1)
    state["factors"][1] = right * 0.9 + grad.T @ grad * 0.1
    param.add_(left @ grad @ state["factors"][1], alpha=-group["lr"] / state["counts"]["step"])
""")
# A Python object, as preconditioner classes are.
ObjectKeeping = toy("object-keeping")("""
    tally = state.setdefault("tally", Clock())
    tally.ticks += 1
    param.add_(cube(grad), alpha=-group["lr"] / tally.ticks)
""")
Nesting = toy("nesting")("""
    inner = state.setdefault("sides", {"left": torch.zeros(len(param), len(param))})
    inner["left"].lerp_(grad @ grad.T, 0.1)
    param.add_(inner["left"] @ grad, alpha=-group["lr"])
""")
# Every step puts a new tensor in the state.
Replacing = toy("replacing")("""
    state["average"] = state["average"] * 0.9 + grad if state else grad.clone()
    param.add_(cube(state["average"]), alpha=-group["lr"])
""")
# Eigenvectors as LAPACK returns them, in columns; strided products may round otherwise.
Columns = toy("columns")("""
    if not state:
        state["basis"] = torch.linalg.eigh(grad.T @ grad).eigenvectors
    param.add_(grad @ state["basis"], alpha=-group["lr"])
""")
# A hyperparameter decides at the first step what there is in the state.
Optional = toy("optional", hypers="averaged=True")("""
    if not state:
        state["scale"] = torch.full_like(param, 0.5)
        if group["averaged"]:
            state["average"] = torch.zeros_like(param)
    update = cube(grad)
    if "average" in state:
        update = state["average"].lerp_(update, 0.1)
    param.add_(update * state["scale"], alpha=-group["lr"])
""")
# Something in the state that later steps never read.
FreshAverage = toy("fresh-average", param='state["norm"] = grad.norm()', update='cube(grad) / state["norm"]')()
# A word in the state decides what the next step does, and two averages stand in a tuple.
Wording = toy("wording")("""
    if not state:
        state.update(next="add", averages=(torch.zeros_like(param), torch.zeros_like(param, dtype=torch.float64)))
    sign = {"add": -1, "take": 1}[state["next"]]
    for average in state["averages"]:
        average.lerp_(grad.to(average.dtype), 0.1)
    state["next"] = "take" if state["next"] == "add" else "add"
    param.add_(cube(sum(state["averages"]).to(param.dtype)), alpha=sign * group["lr"])
""")
# A momentum in the dtype of the parameter and a preconditioner in float32.
WideFactors = toy("wide-factors")("""
    if not state:
        state.update(momentum=torch.zeros_like(param), factor=torch.zeros(len(param), len(param)))
    state["momentum"].lerp_(grad, 0.1)
    state["factor"].lerp_(grad.float() @ grad.float().T, 0.1)
    param.add_((state["factor"] @ state["momentum"].float()).to(param.dtype), alpha=-group["lr"])
""")
# Elementwise, and it assigns to `.data`, of the parameter or of its state.
NewData = toy("new-data")("""
    if group["of"] == "param":
        param.data = param.data - group["lr"] * grad
        return
    if not state:
        state["mean"] = torch.zeros_like(param)
    state["mean"].data = 0.9 * state["mean"].data + grad
    param.sub_(state["mean"], alpha=group["lr"])
""")

# -- where it counts -------------------------------------------------------------------------------

CountingOnItself = toy("counting-on-itself", body="steps = 0", step="self.steps += 1", scale="1 / self.steps")()
CountingInGroup = toy("counting-in-group", hypers="steps=0", group='group["steps"] += 1', scale='1 / group["steps"]')()
# The group gets its counter at the first step, as in several packages; it decides about the work.
LateCounting = toy(
    "late-counting",
    group='group["step"] = group.get("step", 0) + 1',
    update='(cube(grad) if group["step"] % 3 else grad)',
    scale='1 / group["step"]',
)()
# The group's counter counts parameters, so that they depend on one another.
CountingPerParameter = toy(
    "counting-per-parameter", param='group["steps"] = group.get("steps", 0) + 1', scale='1 / group["steps"]'
)()
# Under a key that is no parameter, as MADGRAD does.
CountingInState = toy(
    "counting-in-state",
    step='count = self.state.setdefault("k", 0)',
    scale="1 / (count + 1)",
    end='self.state["k"] = count + 1',
)()
# In the group from the first step on; it corrects with `math.pow`.
DEBIASING = {
    "group": 'group["step"] = group["step"] + 1 if "step" in group else 1\n'
    'correction = 1.0 - math.pow(0.9, group["step"])',
    "param": 'if not state:\n    state["average"] = torch.zeros_like(param)\nstate["average"].lerp_(grad, 0.1)',
    "update": 'cube(state["average"])',
    "scale": "1 / correction",
}
Debiasing = toy("debiasing", **DEBIASING)()
DebiasingOnHost = toy(  # and nobody can trace it
    "debiasing-on-host",
    step="""
    if any(p.grad is not None and p.grad.norm().item() < 0 for g in self.param_groups for p in g["params"]):
        raise AssertionError
    """,
    **DEBIASING,
)()

# -- how it computes -------------------------------------------------------------------------------

# Prints in the midst of its work, so that Dynamo sees two graphs.
Breaking = toy("breaking")('update = cube(grad)\nprint(end="")\nparam.add_(update, alpha=-group["lr"])')
ConstantMaking = toy("constant-making", update="cube(grad / torch.tensor(3.0))")()  # a tensor of a number
# Rounds otherwise when compiled, as torch's own Adam does.
CompilationAware = toy(
    "compilation-aware", update="(cube(grad) / 3 if torch.compiler.is_compiling() else cube(grad) * (1 / 3))"
)()
Caching = toy(  # makes something at the first step and keeps it
    "caching", body="made = None", param="if self.made is None:\n    self.made = cube", update="self.made(grad)"
)()
Subtracting = toy("subtracting")('param.sub_(cube(grad), alpha=group["lr"])')  # its shape rule asks for the scale
Squaring = toy("squaring")("""
    second = state.setdefault("second", torch.zeros_like(param))
    second.lerp_(grad.square(), 0.1)
    param.addcdiv_(grad, second.sqrt().add_(1e-8), value=-group["lr"])
""")
# `foreach` chooses another formula here, not another implementation.
AnyForeach = toy(
    "any-foreach", hypers="foreach=None", update='cube(grad) * (0.5 if group["foreach"] is None else 0.7)'
)()
RootOfNorm = toy("root-of-norm", update="grad / grad.square().sum().sqrt()")()  # of a tensor without dims

# Muon-like for groups with use_muon, Adam for the others: as many public Muons do it.
TwoKinds = toy("two-kinds", hypers="lr=0.05, beta=0.9, beta2=0.99, eps=1e-8, use_muon=False")("""
    if group["use_muon"]:
        if not state:
            state["momentum"] = torch.zeros_like(param)
        state["momentum"].lerp_(grad, 1 - group["beta"])
        update = grad.lerp(state["momentum"], group["beta"]).bfloat16()
        update = update / (update.norm() + 1e-7)
        param.add_(update + cube(update), alpha=-group["lr"])
        return
    if not state:
        state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
    state["step"] += 1
    state["mean"].lerp_(grad, 1 - group["beta"])
    state["square"].mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
    first, second = 1 - group["beta"] ** state["step"], 1 - group["beta2"] ** state["step"]
    root = (state["square"] / second).sqrt().add_(group["eps"])
    param.addcdiv_(state["mean"], root, value=-group["lr"] / first)
""")
# Raises errors of its own for what it does not take.
Choosy = toy(
    "choosy",
    step="""
    if closure is not None:
        raise ValueError("closures are not supported")
    """,
    param="""
    if param.ndim != 2:
        raise TypeError(f"only matrices are supported, not {param.ndim} dims")
    """,
)()

# -- what is beside parameters ---------------------------------------------------------------------

# A record on the host, so that it can only be found by running it.
MemoByParameter = toy("memo-by-parameter", begin="self.memo = {}", param='self.memo.setdefault(param, ("ij", "j"))')()
ChosenInASet = toy("chosen-in-a-set", begin="self.chosen = {*params[:1]}")("""
    param.sub_((cube(grad) if param in self.chosen else grad.sign()) * group["lr"])
""")
# An object for each parameter that is large enough, which those of a rehearsal may not be.
HelperById = toy(
    "helper-by-id",
    begin="self.helpers = {}",
    outside="""
    class Helper:
        def __init__(self, size):
            self.basis = torch.eye(size)
""",
)("""
    if min(grad.shape) >= 8:
        if id(param) not in self.helpers:
            self.helpers[id(param)] = Helper(len(grad))
        grad = self.helpers[id(param)].basis @ grad
    param.add_(grad, alpha=-group["lr"])
""")
AveragingProducts = toy("averaging-products")("""
    state.setdefault("left", torch.eye(len(grad))).lerp_(grad @ grad.T, 0.1)
    param.add_(grad, alpha=-group["lr"])
""")
CountingInAList = toy("counting-in-a-list", begin="self.norms = []", param="self.norms.append(grad.norm().item())")()
AveragingOnItself = toy(
    "averaging-on-itself", begin="self.average = torch.zeros(())", param="self.average.lerp_(grad.mean(), 0.1)"
)()
Communicating = toy("communicating")("""
    average = grad.clone()
    dist.all_reduce(average)
    param.sub_(average * group["lr"])
""")
# Writes a product of every parameter into the same memory, whole each time.
Scratch = toy(
    "scratch",
    whole="""
    product = torch.empty(6, 6)
    for param in self.param_groups[0]["params"]:
        torch.mm(param.grad, param.grad.mT, out=product)
        param.sub_(product @ param.grad)
    """,
)()

# Scales every update by the norm of all gradients: parameters are coupled.
GlobalNorm = toy(
    "global-norm",
    whole="""
    params = [p for group in self.param_groups for p in group["params"]]
    norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
    for param in params:
        param.sub_(param.grad / norm * self.defaults["lr"])
    """,
)()
# The same, but read on the host, so that it can only be found by running it.
GlobalNormOnHost = toy(
    "global-norm-on-host",
    whole="""
    params = [p for group in self.param_groups for p in group["params"]]
    norm = sum(p.grad.norm().item() for p in params)
    scale = 1 / norm if norm > 1 else 1.0
    for param in params:
        param.sub_(param.grad * scale * self.defaults["lr"])
    """,
)()

# -- written for people: Dynamo cannot trace it, and dispatch captures it ----------------------------

# Nested functions, a partial, a number made a tensor, a float counter.
DecoratedMuon = toy("decorated-muon", hypers="beta=0.9, decay=0.01")("""
    if not state:
        state.update(step=0, momentum=torch.zeros_like(param))
    state["step"] += 1
    state["momentum"].lerp_(grad, 1 - group["beta"])
    update = functools.partial(orthogonal, steps=3)(state["momentum"], eps=1e-7)
    update = update / torch.tensor(1 - group["beta"] ** state["step"])
    param.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"])
""")
# All of its products are in one precision, which is not that of the user.
OnePrecision = toy("one-precision")("""
    with matmul_precision("medium"):
        update = orthogonal(grad, 2, 1e-7)
    param.add_(update, alpha=-group["lr"])
""")
# One product in the user's precision, another one in its own.
TwoPrecisions = toy("two-precisions")("""
    gram = grad @ grad.T
    with matmul_precision("high"):
        update = gram @ grad
    param.add_(update, alpha=-group["lr"])
""")
# Sets the precision itself, in what Dynamo can trace.
PlainPrecision = toy("plain-precision")("""
    torch.set_float32_matmul_precision("high")
    update = grad @ grad.T @ grad
    torch.set_float32_matmul_precision("highest")
    param.add_(update, alpha=-group["lr"])
""")
# A counter that becomes an input only when it has changed, and a factor that stays a constant of graphs.
LateInput = toy("late-input")("""
    state["step"] = state.get("step", 0) + 1
    print(end="")
    moved = param.sub(grad @ grad.T @ grad, alpha=group["lr"])
    param.copy_(moved * (1 - 0.1 / state["step"]))
""")
# A basis that is laid out by rows at first, and by columns from its first refresh on.
TURNING = """
    if not state:
        state.update(step=0, basis=torch.eye(len(param)))
    state["step"] += 1
    if state["step"] % group["every"] == 0:
        state["basis"] = torch.linalg.qr(grad @ grad.T + state["basis"])[0]
    param.add_(state["basis"] @ grad, alpha=-group["lr"])
"""
TurningBasis = toy("turning-basis", hypers="every=3")(TURNING)
DecoratedBasis = toy("decorated-basis", hypers="every=3")(f'    print(end=""){TURNING}    print(end="")')
# A basis whose layout changes on every step.
FloppingBasis = toy("flopping-basis")("""
    if not state:
        state.update(step=0, basis=torch.ones(len(param), len(param)))
    state["step"] += 1
    new = torch.linalg.qr(grad @ grad.T + state["basis"])[0]
    state["basis"] = new if state["step"] % 2 else new.contiguous()
    param.add_(state["basis"] @ grad, alpha=-group["lr"])
""")
# Catches that a matrix has no Cholesky factor, and takes another way then.
Retrying = toy("retrying")("""
    print(end="")
    gram = grad @ grad.T - 4 * torch.eye(len(grad))
    try:
        factor = torch.linalg.cholesky(gram)
    except torch.linalg.LinAlgError:
        factor = torch.eye(len(grad))
    param.add_(factor @ grad, alpha=-group["lr"])
""")
# Finds its update with autograd.
Differentiating = toy("differentiating")("""
    print(end="")
    with torch.enable_grad():
        x = grad.clone().requires_grad_()
        (slope,) = torch.autograd.grad((x @ x.T @ x).square().sum(), x)
    param.add_(slope / (1 + slope.norm()), alpha=-group["lr"])
""")
# Gives the parameter other memory in place of writing to it.
MemorySwapping = toy("memory-swapping")("""
    gram = grad @ grad.T
    print(end="")
    param.data = param - group["lr"] * gram @ grad
""")
# Looks at a global number on every step, with `globals()`, so that nothing can follow its code there.
Looking = toy("looking", outside='SCALE = {"of": 1.0}')("""
    update = grad @ grad.T
    print(end="")
    update, scale = update @ grad, globals()["SCA" + "LE"]["of"]
    param.add_(update if scale < 3 else update.sign(), alpha=-group["lr"] * scale)
""")
