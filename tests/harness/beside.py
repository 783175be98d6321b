"""Beside each wrapped optimizer of a process: the plain one on whole tensors, given the same gradients, bit for bit."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from canzona_compile.api.chain import Chain
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.ir.split import chosen, rows_of
from tests.harness.pairs import different, same_bits
from tests.harness.verdicts import ways_of


class BesidePlain:
    """Follows the steps of code that knows nothing of it, by a hook of torch for all optimizers.

    Whatever the parallelism is, each rank gathers gradients and parameters, and steps a plain optimizer on its
    own. Parameters are compared just before the next step, when every collective of the last one is over. Of a
    chain, the optimizers are followed one by one.

    Attributes:
        compared: how many parameters were compared.
        differing: where bits were not equal.
        ways: how parameters ran, by class of the optimizer.
    """

    def __init__(self) -> None:
        self.plain: dict[int, Optimizer] = {}
        self.seen: list[Optimizer] = []  # which keeps the ids
        self.compared = 0
        self.differing: list[str] = []
        self.ways: dict[str, set[str]] = {}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Torch's hook; it may change the arguments. A closure makes the gradients, so its turn is first."""
        if "canzona" not in vars(optimizer) or isinstance(optimizer, Chain):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._step(optimizer)
            return None

        def then_step() -> Any:
            loss = closure()
            with torch.no_grad():
                self._step(optimizer)
            return loss

        return args[:1], {"closure": then_step}

    def _step(self, optimizer: Any) -> None:
        whole = self._values(optimizer)
        if id(optimizer) not in self.plain:
            self.seen.append(optimizer)
            self.plain[id(optimizer)] = plain_optimizer(optimizer, whole)
        else:
            self.ways.setdefault(plain_class(optimizer).__name__, set()).update(ways_of(optimizer))
        plain = self.plain[id(optimizer)]
        self._compare(optimizer, whole)
        for group, own, values in zip(optimizer.param_groups, plain.param_groups, whole, strict=True):
            own.update({key: v for key, v in group.items() if key not in ("params", "param_names")})
            for (i, param), expected in zip(params_of(group), in_turn(own["params"], values), strict=True):
                if param.grad is not None:
                    for mine, grad in zip(expected, self._whole(optimizer, group, i, param.grad), strict=True):
                        mine.grad = grad
                else:
                    for mine in expected:
                        mine.grad = None
        plain.step()

    def _compare(self, optimizer: Any, whole: list[list[list[Tensor]]]) -> None:
        for own, values in zip(self.plain[id(optimizer)].param_groups, whole, strict=True):
            for i, (expected, value) in enumerate(zip(in_turn(own["params"], values), values, strict=True)):
                self.compared += len(value)
                if not all(same_bits(a.detach(), b) for a, b in zip(expected, value, strict=True)):
                    self.differing.append(f"{type(optimizer).__name__}, parameter {i}, comparison {self.compared}")

    def finish(self) -> list[str]:
        """Compare what all optimizers hold after their last steps, states as well: all that differed, ever."""
        for optimizer in self.seen:
            self._compare(optimizer, self._values(optimizer))
            self.differing += different(self.plain[id(optimizer)], optimizer)
        assert self.compared > 0
        return self.differing

    def _values(self, optimizer: Any) -> list[list[list[Tensor]]]:
        return [[self._whole(optimizer, g, i, p) for i, p in params_of(g)] for g in optimizer.param_groups]

    def _whole(self, optimizer: Any, group: dict[str, Any], place: int, tensor: Tensor) -> list[Tensor]:
        """A parameter or gradient gathered, as the logical matrices that it consists of."""
        options, name = optimizer.canzona.session.options, group.get("param_names", {place: ""})[place]
        value: Any = tensor.detach() if not hasattr(tensor, "full_tensor") else tensor
        for pattern, given in () if options.layout is None else options.layout.patterns:
            if fnmatchcase(name, pattern):
                value = DTensor.from_local(value, given[0], given[1], run_check=False)
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        split = chosen(options.split, name, value.shape)
        pieces = [value] if split is None else [value[rows] for rows in rows_of(split).values()]
        return [piece.detach().clone() for piece in pieces]


def params_of(group: dict[str, Any]) -> list[tuple[int, Any]]:
    return list(enumerate(group["params"]))


def in_turn(params: list[nn.Parameter], values: list[list[Tensor]]) -> list[list[nn.Parameter]]:
    """Parameters dealt out as values are."""
    left = iter(params)
    return [[next(left) for _ in value] for value in values]


def plain_optimizer(optimizer: Any, whole: list[list[list[Tensor]]]) -> Optimizer:
    """The same class without its constructor, which may take other arguments than groups."""
    groups = []
    for group, values in zip(optimizer.param_groups, whole, strict=True):
        params = [nn.Parameter(piece.clone()) for value in values for piece in value]
        groups.append({**{k: v for k, v in group.items() if k != "param_names"}, "params": params})
    assert not optimizer.state  # it has not stepped yet
    made: Any = object.__new__(plain_class(optimizer))
    Optimizer.__init__(made, groups, dict(optimizer.defaults))
    return made  # type: ignore[no-any-return]
