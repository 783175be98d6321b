"""What a user may give to `verify`: good builds, one that breaks the compiler, and bad ones."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile.ir.fx_utils import outputs
from canzona_compile.ir.step import Step, Strategy, Template
from canzona_compile.passes import Canonicalize
from canzona_compile.session.step_driver import StepDriver
from canzona_compile.tensors import local_part
from tests.harness.own_objects import ByAddress as ByViews
from tests.harness.traps.grammar import toy

Plain = tuple[nn.Module, Optimizer]


def net(*widths: int, bias: bool = False) -> nn.Sequential:
    """Linear layers called 0, 1, ..."""
    return nn.Sequential(*(nn.Linear(n, m, bias=bias) for n, m in pairwise(widths)))


def muon() -> Plain:
    """Rows that two ranks share unevenly, and one row less than there are ranks."""
    model = net(24, 33, 1)
    return model, Muon(model.parameters(), lr=2e-2)


def square_muon() -> Plain:
    """Two matrices of one shape, that ranks have little to capture."""
    model = net(24, 24, 24)
    return model, Muon(model.parameters(), lr=2e-2)


def named_muon() -> Plain:
    """The same with names in the groups, by which plans know parameters."""
    model, _ = muon()
    return model, Muon(model.named_parameters(), lr=2e-2)


def muon_with_loss() -> tuple[nn.Module, Optimizer, Any]:
    """Real gradients, drawn dropout, a matrix that the loss does not use, and a frozen one."""
    model = net(8, 8, 8, 8)
    model[1].weight.requires_grad_(False)

    def loss(model: nn.Module, step: int) -> Tensor:
        print("a loss that talks")
        inputs = nn.functional.dropout(torch.full((4, 8), float(step)), 0.5)
        return model.get_submodule("0")(inputs).square().sum()

    return model, Muon(model.named_parameters(), lr=2e-2), loss


def kept_by_parameter() -> Plain:
    """An optimizer that tells parameters apart by their addresses."""
    model = net(12, 7, 3)
    return model, ByViews(model.parameters())


# -- a bug -----------------------------------------------------------------------------------------


def sabotaged() -> Plain:
    """On ranks, a pass that scales the update of one shape."""
    if dist.is_initialized():
        original = Canonicalize.__call__

        def broken(self: Canonicalize, step: Step) -> Step:
            step = original(self, step)
            return replace(step, templates=tuple(map(scaled, step.templates)))

        Canonicalize.__call__ = broken  # type: ignore[method-assign]
    return muon()


def sabotaged_owners() -> Plain:
    """On ranks, steps that are wrong where a matrix has one owner."""
    if dist.is_initialized():
        original = StepDriver.step

        def broken(self: StepDriver) -> bool:
            new = original(self)
            if any(task.strategy is Strategy.OWNER for task in self.plan.owned.tasks):
                with torch.no_grad():
                    local_part(self.capture.optimizer.param_groups[0]["params"][0]).add_(1)
            return new

        StepDriver.step = broken  # type: ignore[method-assign]
    return square_muon()


def scaled(template: Template) -> Template:
    if template.shape == (33, 24):
        value = outputs(template.graph)[template.writes.index("param")]
        with template.graph.inserting_after(value):
            made = template.graph.call_function(torch.ops.aten.mul.Tensor, (value, 1.001))
        made.meta.update(value.meta)
        value.replace_all_uses_with(made, delete_user_cb=lambda user: user.op == "output")
    return template


# -- bad ones --------------------------------------------------------------------------------------

not_callable = 3


def another_every_time() -> Plain:
    model = net(4, 4)
    with torch.no_grad():
        model[0].weight.fill_(float(os.getpid()))
    return model, Muon(model.parameters())


# Reads where its parameter lies.
ByAddress = toy("by-address", update="grad", scale="1 + param.data_ptr() % 7")()


def by_address() -> Plain:
    model = net(4, 6, 4)
    return model, ByAddress(model.parameters())


def raises() -> Plain:
    raise KeyError("no such layer")


def leaves() -> Plain:
    raise SystemExit(3)


def one_thing() -> nn.Module:
    return net(4, 4)


def swapped() -> tuple[Optimizer, nn.Module]:
    model, optimizer = muon()
    return optimizer, model


def loss_is_a_number() -> Any:
    return *muon(), 3.0


def wrapped() -> Plain:
    model, optimizer = muon()
    return model, canzona_compile.wrap(optimizer)


def no_params() -> Plain:
    model, optimizer = muon()
    optimizer.param_groups.clear()
    return model, optimizer


def elsewhere() -> Plain:
    model = net(4, 4).to("meta")
    return model, Muon(model.parameters())


def closure() -> Plain:
    model = net(4, 4)
    return model, LBFGS(model.parameters())


def loss_without_gradient() -> Any:
    return *muon(), lambda model, step: torch.zeros(())


def sparse() -> Any:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    return model, AdamW(model.parameters()), lambda model, step: model(torch.tensor([step])).sum()
