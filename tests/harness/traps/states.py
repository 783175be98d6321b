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
    ("state-replaced", EITHER, "optimizer.state = defaultdict(dict)", (PLAIN,)),
    ("state-of-one-deleted", EITHER, f"del {ONE}", (PLAIN, LOCAL)),
    ("state-of-one-cleared", EITHER, f"{ONE}.clear()", (PLAIN,)),
    ("state-key-deleted", EITHER, f'del {ONE}["average"]', (PLAIN,)),
    ("state-tensor-replaced", EITHER, f'{ONE}["average"] = torch.ones_like(params[1].detach())', (PLAIN, LOCAL)),
    ("state-tensor-zeroed", EQUAL, f'{ONE}["average"].zero_()', (PLAIN, LOCAL)),
    ("state-tensors-halved", EQUAL, HALVED, (PLAIN, HOST)),
    ("state-key-added", EITHER, f'{ONE}["boost"] = 2.0', (PLAIN,)),
    ("states-swapped", EITHER, SWAPPED, (PLAIN,)),
    ("state-shared-by-user", EITHER, f'{ONE}["average"] = optimizer.state[params[3]]["average"]', (PLAIN,)),
    ("state-loaded", EQUAL, LOADED, (PLAIN, HOST)),
    ("state-loaded-empty", EQUAL, 'optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})', (PLAIN,)),
    ("setstate-of-nothing", EITHER, f'{SET}({{**optimizer.__getstate__(), "state": defaultdict(dict)}})', (PLAIN,)),
):
    for form in forms:
        momentum(name, expected, form, edit=edit)

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

# -- state that is something else ------------------------------------------------------------------

states("state-is-parameter", param='state.setdefault("weight", param)\nstate["weight"].mul_(0.9)')
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
states("state-shared-by-all")("""
    begin: self.mean = torch.zeros(())
    param: state.setdefault("mean", self.mean).lerp_(grad.abs().mean(), 0.3)
    times: state["mean"]
""")
states("state-remembers-gradients")("""
    param:
        history = state.setdefault("history", [])
        history.append(grad.clone())
        del history[:-3]
    update: cube(torch.stack(history).mean(0))
""")

# -- state that is no memory of its own: the gradient, the parameter, or a part of other state --------

FIRST = 'if not state:\n    state["momentum"] = grad\nelse:\n    state["momentum"].mul_(0.9).add_(grad)'
AS_MOMENTUM = {"param": FIRST, "update": 'cube(state["momentum"])'}
CHANGE = 'change = grad - state["last"] if state else grad'
LAST = {"param": CHANGE, "update": "cube(change) + change", "then": 'state["last"] = grad'}


def in_place(since: int = 0) -> dict[str, str]:
    """An edit: since a step gradients are written where that step's were."""
    return {"outside": f"written_in_place = WrittenInPlace({since})", "every": "written_in_place(params, step)"}


aliases("first-gradient-as-momentum", **AS_MOMENTUM)
WRITTEN = "written over an earlier gradient"
PLACE = (WRITTEN, "self.state[param]['last']", "zero_grad")
aliases("last-gradient-in-place", REFUSED, says=PLACE, **LAST, **in_place())
aliases("last-gradient", **LAST)
aliases("first-gradient-in-place", REFUSED, says=WRITTEN, **AS_MOMENTUM, **in_place())
# The gradient goes by way of the state, as in code of two halves.
aliases("gradient-passed-on-in-place", **in_place())("""
    param: state["grad"] = grad
    update: cube(state["grad"])
""")
aliases("parameter-in-state", EITHER)("""
    param:
        if not state:
            state["slow"] = param.data
    then: param.sub_(state["slow"] * 0.1)
""")
