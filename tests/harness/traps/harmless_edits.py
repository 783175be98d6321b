"""Harmless edits: what users do every day between steps. It has to be followed bit for bit."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.harness.toy_optimizers import Cubic, PerParameter, State, cube
from tests.harness.traps.trap import Params, Trap, halves, set_attribute, set_group

FAMILY = "harmless"


class Talking(PerParameter):
    """Has flags, a log and a name that its step does not read, and a mode that it does."""

    training = True

    def __init__(self, params: Params) -> None:
        super().__init__(params, beta=0.7)
        self.verbose = False
        self.log: list[str] = []
        self.label = "one"

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def eval(self) -> None:
        self.train(False)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        average = state.setdefault("average", torch.zeros_like(param))
        average.lerp_(grad, 1 - group["beta"])
        param.add_(cube(average), alpha=-group["lr"])


class Asserting(Talking):
    """Its step asserts that it is in training."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        assert self.training
        super().update(param, grad, group, state)


class TensorRate(PerParameter):
    """Has its learning rate as a tensor."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=torch.tensor(0.1))  # type: ignore[arg-type]

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(cube(grad) * group["lr"])


class Averaging(Talking):
    """Averages parameters in the state."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        super().update(param, grad, group, state)
        state.setdefault("ema", param.clone()).lerp_(param, 0.3)


def flip_flag(optimizer: Any, params: Params, step: int) -> None:
    optimizer.verbose = step % 2 == 0


def write_log(optimizer: Any, params: Params, step: int) -> None:
    optimizer.log.append(f"step {step}")
    optimizer.note = {"step": step}


def validate(optimizer: Any, params: Params, step: int) -> None:
    """Go to `eval` and back before every step."""
    optimizer.eval()
    optimizer.train()


def schedule(optimizer: Any, params: Params, step: int) -> None:
    """What a scheduler by hand does."""
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)
        group["beta"] = 0.7 + 0.01 * step


def scheduler_of_torch(optimizer: Any, params: Params, step: int) -> None:
    """Make one of torch's schedulers before the first step, and use it before the others."""
    if step == 0:
        scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        optimizer.note = {"scheduler": scheduler}
    else:
        optimizer.note["scheduler"].step()


def halve_rate(optimizer: Any, params: Params, step: int) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)


def write_parameters(optimizer: Any, params: Params, step: int) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.9)


def write_data(optimizer: Any, params: Params, step: int) -> None:
    for param in params:
        param.data.mul_(0.9)


def watch(optimizer: Any, params: Params, step: int) -> None:
    """Keep a weak reference, as schedulers do."""
    optimizer.watcher = weakref.ref(params[0])


def add_key_to_group(optimizer: Any, params: Params, step: int) -> None:
    for group in optimizer.param_groups:
        group[f"note{step}"] = step


def load_own_groups(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.load_state_dict(optimizer.state_dict())


def look_at_state(optimizer: Any, params: Params, step: int) -> None:
    """Read what there is, and change nothing."""
    found = [*optimizer.state.items(), *optimizer.param_groups, repr(optimizer)]
    assert len(found) >= 2


def name_parameters(params: Params) -> None:
    """Give parameters attributes that no step reads."""
    for i, param in enumerate(params):
        param.label = f"layer{i}"
        param.sequence_parallel = i % 2 == 0


def change_names(optimizer: Any, params: Params, step: int) -> None:
    params[0].label = f"step{step}"


def with_hooks(params: Params) -> Any:
    """Hooks that change nothing."""
    optimizer = Talking(params)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: None)
    optimizer.register_step_post_hook(lambda opt, args, kwargs: opt.log.append("done"))
    return optimizer


TRAPS = (
    Trap("flag-flipped", FAMILY, Talking, "equal", edit=flip_flag),
    Trap("log-written", FAMILY, Talking, "equal", edit=write_log),
    Trap("label-changed", FAMILY, Talking, "equal", edit=set_attribute("label", "two")),
    Trap("attribute-unknown-to-step", FAMILY, Cubic, "equal", edit=set_attribute("spare", object())),
    Trap("validated", FAMILY, Talking, "equal", edit=validate),
    Trap("validated-and-asserted", FAMILY, Asserting, "equal", edit=validate),
    Trap("scheduled", FAMILY, Talking, "equal", edit=schedule),
    Trap("scheduled-by-torch", FAMILY, Talking, "equal", edit=scheduler_of_torch),
    Trap("scheduled-in-two-groups", FAMILY, lambda params: Talking(halves(params)), "equal", edit=schedule),
    Trap("one-group-changed", FAMILY, lambda p: Cubic(halves(p)), "equal", edit=set_group("lr", 0.3, at=2, group=1)),
    Trap("rate-tensor", FAMILY, TensorRate, "equal"),
    Trap("rate-tensor-halved", FAMILY, TensorRate, "equal", edit=halve_rate),
    Trap("rate-becomes-tensor", FAMILY, Cubic, "equal", edit=set_group("lr", torch.tensor(0.05), at=2)),
    Trap("rate-becomes-zero", FAMILY, Cubic, "equal", edit=set_group("lr", 0.0, at=2)),
    Trap("parameters-written", FAMILY, Averaging, "equal", edit=write_parameters),
    Trap("parameter-data-written", FAMILY, Averaging, "equal", edit=write_data),
    Trap("parameter-watched", FAMILY, Talking, "equal", edit=watch),
    Trap("key-added-to-group", FAMILY, Talking, "equal", edit=add_key_to_group),
    Trap("own-state-loaded", FAMILY, Averaging, "equal", edit=load_own_groups),
    Trap("state-looked-at", FAMILY, Averaging, "equal", edit=look_at_state),
    Trap("parameters-named", FAMILY, Talking, "equal", prepare=name_parameters, edit=change_names),
    Trap("hooks-that-change-nothing", FAMILY, with_hooks, "equal", seen=lambda o: list(o.log)),
)
