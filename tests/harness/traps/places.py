"""Where a parameter stands: its place among others, how it lies, and who stands beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import DDP, PLAIN, Params, Trap, halves

FAMILY = "standing"

# -- its place -------------------------------------------------------------------------------------


class Places(Optimizer):
    """Base of optimizers that know the place of a parameter in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                if param.grad is not None:
                    param.add_(cube(param.grad), alpha=-group["lr"] * self.scale(i, param, group["params"]))

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        raise NotImplementedError


class Index(Places):
    """Later parameters take smaller steps."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return 1.0 / (1 + i)


class Depth(Places):
    """Decays the learning rate by relative depth."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return float(0.5 ** (i / len(params)))


class First(Places):
    """The first of a group is the embedding."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return 0.3 if param is params[0] else 1.0


class Last(Places):
    """The last of a group is the head."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return 0.3 if param is params[-1] else 1.0


class Count(Places):
    """Divides by how many parameters the group has."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return 1.0 / len(params)


class Elements(Places):
    """Divides by how many elements all parameters have, counted at every step."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return float(10.0 / sum(p.numel() for group in self.param_groups for p in group["params"]))


class ElementsAtFirst(Places):
    """Divides by how many elements all parameters have, counted when it is made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.elements = sum(p.numel() for group in self.param_groups for p in group["params"])

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return float(10.0 / self.elements)


class GroupCount(Places):
    """Divides by how many groups there are."""

    def scale(self, i: int, param: Tensor, params: Params) -> float:
        return 1.0 / len(self.param_groups)


class PlaceAmongAll(Optimizer):
    """Numbers the parameters across groups within a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                number += 1
                param.sub_(param.grad.sign() * group["lr"] / number)


class SameShape(Optimizer):
    """Divides by how many parameters have the same shape, as bucketing optimizers may."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            buckets: dict[Any, list[Tensor]] = {}
            for param in group["params"]:
                buckets.setdefault(tuple(param.shape), []).append(param)
            for bucket in buckets.values():
                for param in bucket:
                    param.add_(cube(param.grad), alpha=-group["lr"] / len(bucket))  # type: ignore[arg-type]


class GivenNames(Optimizer):
    """Reads the names that torch keeps in the group."""

    def __init__(self, params: Params) -> None:
        super().__init__([(f"layer{i}", p) for i, p in enumerate(params)], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                scale = 0.3 if name.endswith("1") else 1.0
                param.add_(cube(param.grad), alpha=-group["lr"] * scale)


# -- how it lies, and its neighbours ---------------------------------------------------------------


class Strided(PerParameter):
    """A parameter that lies in columns takes smaller steps."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.add_(cube(grad), alpha=-group["lr"] * (1.0 if param.is_contiguous() else 0.5))


class Neighbour(Optimizer):
    """Every parameter is pulled towards the size of the one before it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                param.sub_(cube(param.grad) * group["lr"] * group["params"][i - 1].abs().mean())


class GradientOfNeighbour(Optimizer):
    """Every parameter is scaled by the gradient of the one after it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        for param, after in zip(params, params[1:] + params[:1], strict=True):
            param.sub_(cube(param.grad) * 0.1 * after.grad.abs().max())


class BufferByShape(PerParameter):
    """Parameters of one shape share a buffer of momentum, so that they are coupled."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.buffers: dict[Any, Tensor] = {}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        shape = tuple(param.shape)
        if shape not in self.buffers:
            self.buffers[shape] = torch.zeros_like(param)
        self.buffers[shape].lerp_(grad, 0.3)
        param.add_(cube(self.buffers[shape]), alpha=-group["lr"])


class ConstantByShape(PerParameter):
    """Parameters of one shape share a constant; nobody writes it again."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.identities: dict[int, Tensor] = {}

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        rows = len(param)
        if rows not in self.identities:
            self.identities[rows] = torch.eye(rows)
        param.add_((grad @ grad.T + self.identities[rows]) @ grad, alpha=-group["lr"])


def lie_in_columns(value: Tensor, place: int) -> Tensor:
    return value.t().contiguous().t() if place == 1 else value


TRAPS = (
    Trap("index-in-group", FAMILY, Index, "either"),
    Trap("depth-in-group", FAMILY, Depth, "either"),
    Trap("first-of-group", FAMILY, First, "either"),
    Trap("last-of-group", FAMILY, Last, "either"),
    Trap("count-of-group", FAMILY, Count, "either"),
    Trap("count-of-elements", FAMILY, Elements, "either"),
    Trap("count-of-elements-at-first", FAMILY, ElementsAtFirst, "equal"),
    Trap("count-of-groups", FAMILY, lambda params: GroupCount(halves(params)), "either"),
    Trap("place-among-all", FAMILY, lambda params: PlaceAmongAll(halves(params)), "either"),
    Trap("count-of-same-shape", FAMILY, SameShape, "either"),
    Trap("names-in-group", FAMILY, GivenNames, "either"),
    # FSDP2 takes no parameter that lies in columns.
    Trap("strides", FAMILY, Strided, "either", start=lie_in_columns, layouts=(PLAIN, DDP)),
    Trap("value-of-neighbour", FAMILY, Neighbour, "equal"),
    Trap("gradient-of-neighbour", FAMILY, GradientOfNeighbour, "equal"),
    Trap("buffer-by-shape", FAMILY, BufferByShape, "either", ("buffers",)),
    Trap("constant-by-shape", FAMILY, ConstantByShape, "either", ("identities",)),
)
