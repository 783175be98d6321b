"""State: what the user clears, replaces, edits or loads, and state that is a parameter or a gradient."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EITHER, EQUAL, REFUSED, Family, Said, pieces_of
from tests.harness.traps.trap import Expected

states, aliases = Family("state", EITHER), Family("aliases", EQUAL)

# -- edits of an average of gradients and a count ---------------------------------------------------

DIRECTIONS = {
    "": "cube(average)",
    "-elementwise": "average * 1.0",
    "-on-host": "update / update.norm() if (update := cube(average)).norm().item() > 2 else update",
}


def momentum(name: str, expected: Expected, form: str = "", direction: str = "", **others: Any) -> Said:
    """An optimizer with state, in one of three forms, and what its user does."""
    return states(
        name + form,
        expected,
        param="""
            average = state.setdefault("average", torch.zeros_like(param))
            state["step"] = state.get("step", 0) + 1
            average.lerp_(grad, 0.3)
        """,
        update=direction or DIRECTIONS[form],
        scale='state.get("boost", 1.0) / state["step"]',
        **others,
    )


HALVED = 'for state in optimizer.state.values():\n    state["average"].mul_(0.5)'
RESET = 'for state in optimizer.state.values():\n    state["step"] = 0'
SWAPPED = """
    first, second = params[0], params[2]
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]
"""
LOADED = "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"
ONE = "optimizer.state[params[1]]"
SET = "optimizer.__setstate__"
PLAIN, LOCAL, HOST = "", "-elementwise", "-on-host"
for name, expected, edit, forms in (
    ("state-cleared", EITHER, "optimizer.state.clear()", (PLAIN, LOCAL, HOST)),
    ("state-replaced", EITHER, "optimizer.state = defaultdict(dict)", (PLAIN, LOCAL)),
    ("state-of-one-deleted", EITHER, f"del {ONE}", (PLAIN, LOCAL)),
    ("state-of-one-cleared", EITHER, f"{ONE}.clear()", (PLAIN,)),
    ("state-of-one-replaced", EITHER, f"{ONE} = {{}}", (PLAIN,)),
    ("state-key-deleted", EITHER, f'del {ONE}["average"]', (PLAIN,)),
    ("state-tensor-replaced", EITHER, f'{ONE}["average"] = torch.ones_like(params[1].detach())', (PLAIN, LOCAL)),
    ("state-tensor-zeroed", EQUAL, f'{ONE}["average"].zero_()', (PLAIN, LOCAL)),
    ("state-tensors-halved", EQUAL, HALVED, (PLAIN, HOST)),
    ("state-count-reset", EQUAL, RESET, (PLAIN, HOST)),
    ("state-key-added", EITHER, f'{ONE}["boost"] = 2.0', (PLAIN,)),
    ("states-swapped", EITHER, SWAPPED, (PLAIN,)),
    ("state-shared-by-user", EITHER, f'{ONE}["average"] = optimizer.state[params[3]]["average"]', (PLAIN,)),
    ("state-loaded", EQUAL, LOADED, (PLAIN, HOST)),
    ("state-loaded-empty", EQUAL, 'optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})', (PLAIN,)),
    ("setstate", EITHER, f"{SET}(optimizer.__getstate__())", (PLAIN,)),
    ("setstate-of-nothing", EITHER, f'{SET}({{**optimizer.__getstate__(), "state": defaultdict(dict)}})', (PLAIN,)),
):
    for form in forms:
        momentum(name, expected, form, edit=edit)

momentum("state-cleared-now-and-then", EITHER, steps=6)("""
    call:
        optimizer.step()
        if step % 2 == 1:
            optimizer.state.clear()
""")
# The user saves early and loads late, as one does after a spike.
momentum("state-of-before-loaded", EQUAL, steps=6)("""
    edit 1: optimizer.saved = copy.deepcopy(optimizer.state_dict())
    edit 3: optimizer.load_state_dict(optimizer.saved)
""")
# Old groups get a default, as in the `__setstate__` of torch's optimizers.
momentum(
    "state-loaded-with-defaults",
    EITHER,
    direction='cube(average) * (0.5 if "loads" in self.param_groups[0] else 1.0)',
    edit=LOADED,
)("""
    body:
        def __setstate__(self, state):
            super().__setstate__(state)
            for group in self.param_groups:
                group.setdefault("nesterov", True)
                group["loads"] = group.get("loads", 0) + 1
""")
momentum("state-dict-of-its-own", EITHER, edit=LOADED)("""
    body:
        def state_dict(self):
            return {**super().state_dict(), "version": 3}

        def load_state_dict(self, state_dict):
            assert state_dict["version"] == 3
            super().load_state_dict({k: v for k, v in state_dict.items() if k != "version"})
""")

# -- state that is something else ------------------------------------------------------------------

states("state-is-parameter", param='state.setdefault("weight", param)\nstate["weight"].mul_(0.9)')
states("state-sees-parameter")("""
    param:
        if not state:
            state["row"] = param.detach()[:1]
    then: param.sub_(state["row"] * 0.1)
""")
states("state-is-gradient")("""
    update: cube(grad) + cube(state["last"]) if "last" in state else cube(grad)
    then: state["last"] = grad
""")
GROWS = pieces_of("""
    param:
        if "buffer" in state:
            state["buffer"].mul_(0.5).add_(grad)
        else:
            state["buffer"] = grad
    update: cube(state["buffer"])
""")
states("state-grows-on-gradient", **GROWS)
states("state-grows-on-gradient-seen", **GROWS, compares_grads=True)
# Two entries are views of a third.
states("state-in-halves")("""
    param:
        if not state:
            state["both"] = torch.zeros(2, len(param), len(param))
            state["first"], state["second"] = state["both"]
        state["first"].lerp_(grad @ grad.T, 0.1)
        state["second"].lerp_(state["first"], 0.5)
    update: state["both"].sum(0) @ grad
""")
states("state-twice-the-same")("""
    param:
        if not state:
            state["one"] = state["other"] = torch.zeros_like(param)
        state["one"].lerp_(grad, 0.3)
        state["other"].mul_(0.9)
    update: cube(state["one"])
""")
states("state-shared-by-all")("""
    begin: self.mean = torch.zeros(())
    param: state.setdefault("mean", self.mean).lerp_(grad.abs().mean(), 0.3)
    times: state["mean"]
""")
states("state-entries-swap")("""
    param:
        if not state:
            state.update(now=torch.zeros_like(param), before=torch.zeros_like(param))
        state["now"], state["before"] = state["before"], state["now"]
        state["now"].copy_(grad)
    update: cube(state["now"] - 0.3 * state["before"])
""")
states("state-remembers-gradients")("""
    param:
        history = state.setdefault("history", [])
        history.append(grad.clone())
        del history[:-3]
    update: cube(torch.stack(history).mean(0))
""")
states("state-restarts-itself", EQUAL, steps=8)("""
    param:
        if state.get("step") == 3:
            state.clear()
        if not state:
            state.update(step=0, average=torch.zeros_like(param))
        state["step"] += 1
        state["average"].lerp_(grad, 0.5)
    update: cube(state["average"])
""")

# -- state that is no memory of its own: the gradient, the parameter, or a part of other state --------

FIRST = 'if not state:\n    state["momentum"] = grad\nelse:\n    state["momentum"].mul_(0.9).add_(grad)'
AS_MOMENTUM = {"param": FIRST, "update": 'cube(state["momentum"])'}
CHANGE = 'change = grad - state["last"] if state else grad'
LAST = {"param": CHANGE, "update": "cube(change) + change", "then": 'state["last"] = grad'}
LAST_ELEMENTWISE = {**LAST, "update": "change"}


def in_place(since: int = 0) -> dict[str, str]:
    """An edit: since a step gradients are written where that step's were."""
    return {"outside": f"written_in_place = WrittenInPlace({since})", "every": "written_in_place(params, step)"}


aliases("first-gradient-as-momentum-elementwise", param=FIRST, update='state["momentum"]')
aliases("first-gradient-as-momentum", **AS_MOMENTUM)
WRITTEN = "written over an earlier gradient"
PLACE = (WRITTEN, "self.state[param]['last']", "zero_grad")
aliases("last-gradient-in-place", REFUSED, says=PLACE, **LAST, **in_place())
aliases("last-gradient", **LAST)
aliases("last-gradient-elementwise", **LAST_ELEMENTWISE)
aliases("last-gradient-elementwise-in-place", **LAST_ELEMENTWISE, **in_place())
aliases("first-gradient-in-place", REFUSED, says=WRITTEN, **AS_MOMENTUM, **in_place())
# The gradient goes by way of the state, as in code of two halves.
aliases("gradient-passed-on-in-place", **in_place())("""
    param: state["grad"] = grad
    update: cube(state["grad"])
""")
aliases("last-gradient-in-place-at-new-plan", REFUSED, says=WRITTEN, **LAST, **in_place(since=1))("""
    edit: params[0].lr_mul = 1.0
""")
# Gradients are collected before they are used, as some do for `foreach`.
aliases("gradients-on-itself-in-place", REFUSED, **in_place())("""
    begin: self.collected = []
    whole:
        pairs = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.collected = [param.grad for param, _ in pairs]
        for (param, lr), grad in zip(pairs, self.collected, strict=True):
            param.add_(cube(grad), alpha=-lr)
""")
aliases("parameter-in-state", EITHER)("""
    param:
        if not state:
            state["slow"] = param.data
    then: param.sub_(state["slow"] * 0.1)
""")
aliases("row-of-average")("""
    param:
        if not state:
            state["average"] = torch.zeros_like(param)
            state["row"] = state["average"][0]
        state["average"].lerp_(grad, 0.1)
    update: cube(grad) + state["row"]
""")
