"""`plan`: plans an optimizer's step on a mesh, and predicts it, without ranks, tensors or devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from canzona_compile.analysis.flops import bytes_of_wires
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.hardware import Hardware, Machine, named_hardware
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Step
from canzona_compile.options import Numerics, Options, StrategyOption
from canzona_compile.passes import lowering_passes, planning_passes
from canzona_compile.tools.planning.forecast import forecast
from canzona_compile.tools.planning.gc_pause import paused
from canzona_compile.tools.planning.mesh import Mesh, parse_mesh
from canzona_compile.tools.planning.offline import captured_step, optimizer_named, optimizer_of
from canzona_compile.tools.planning.request import Request
from canzona_compile.tools.planning.result import OfflinePlan
from canzona_compile.tools.planning.weights import Model, from_module, from_shapes, parse_split, preset

Updates = Literal["ddp", "zero1"]
ALTERNATIVES = ("static", "alpha", "lpt", "joint", "permuted")
Say = Callable[[str], None]


@paused()
def plan(
    model: str | nn.Module | Mapping[str, Any] | Model,
    *,
    mesh: str | Mapping[str, int],
    optimizer: str | type[Optimizer] | Optimizer = "muon",
    arguments: Mapping[str, Any] | None = None,
    hardware: str | Path | Hardware = "h100",
    split: str = "qkv,gate-up",
    strategy: StrategyOption = "auto",
    planner: str = "joint",
    alpha: float = 1.0,
    capacity: int | None = None,
    micro_groups: int | None = None,
    depth: int = 2,
    numerics: Numerics = "exact",
    updates: Updates = "ddp",
    rank: int | None = None,
    alternatives: bool = True,
    say: Say = lambda _: None,
) -> OfflinePlan:
    """Plan a step as the runtime would, and predict it.

    Args:
        model: a preset ("qwen3-32b"), {name: shape} of the matrices, or a module, for example on the meta device; the
            plan takes its parameters of two or more dims, except embeddings and the head.
        mesh: sizes of named dims, "fsdp=32,tp=8": dp, hsdp, fsdp, ep, tp, pp.
        optimizer: "muon", "soap", "shampoo", "module:Class", a class, or an optimizer; the plan takes the
            hyperparameters of its first parameter group.
        arguments: the arguments of the class, beside the parameters.
        hardware: a name (h100, h200, gb300, a100, cpu), or a file that `canzona-compile calibrate` wrote.
        split: the fused weights of a preset to take apart into matrices: "qkv", "gate-up", both, or "none".
        strategy, planner, capacity, micro_groups, depth, numerics: options of `wrap`; the planner may also be "exact".
        alpha: the parameter of the planner "alpha", from 0 (even communication) to 1 (even load).
        updates: who applies updates over `dp`: every replica ("ddp", what the runtime does), or the owner's replica
            alone, with parameters gathered under the next forward pass ("zero1", as frameworks with ZeRO-1 do).
        rank: a rank whose timeline to show.
        alternatives: whether to predict the plans of other planners too.
        say: called with words that tell the progress.

    Returns:
        The plan and its figures, which can be written in several formats.

    Raises:
        CanzonaError: an argument is unknown, absurd or does not fit; the message names it and the remedy.
    """
    sizes = parse_mesh(mesh)
    rates = hardware if isinstance(hardware, Hardware) else named_hardware(str(hardware))
    found = model_of(model, split)
    code = optimizer_from(optimizer, arguments or {})
    if updates not in get_args(Updates):
        raise CanzonaError(f"updates={updates!r} is none of {', '.join(map(repr, get_args(Updates)))}", at="plan")
    if rank is not None and not 0 <= rank < sizes.ranks:
        raise CanzonaError(f"rank {rank} is none of the {sizes.ranks} ranks of {sizes}", at="plan(..., rank=)")
    options = Options(
        strategy=strategy,
        numerics=numerics,
        capacity=Options().capacity if capacity is None else capacity,
        micro_groups=micro_groups,
        depth=depth,
        planner=planner,
        alpha=alpha,
    )
    say("capturing the optimizer's step")
    captured = captured_step(found, sizes, code, machine_of(rates, sizes))
    say(f"planning {len(captured.tasks)} matrices on {sizes.ranks} ranks")
    owned, _ = run(captured, planning_passes(options))
    if capacity is not None:
        check_capacity(owned, capacity)
    scheduled, _ = run(owned, lowering_passes(options))
    request = Request(found, sizes, rates, options, updates, rank, len(captured.tasks) - len(owned.tasks))
    others: dict[str, Callable[[], Step]] = {}
    if alternatives and any(t.layout.grid.size > 1 for t in owned.tasks):
        others = alternative_steps(captured, options)
    file = PlanFile.of(scheduled)
    return OfflinePlan(scheduled, file, forecast(scheduled, file.fingerprint, request, others, say))


def model_of(given: str | nn.Module | Mapping[str, Any] | Model, split: str) -> Model:
    if isinstance(given, Model):
        return given
    if isinstance(given, str):
        return preset(given, parse_split(split))
    if isinstance(given, nn.Module):
        return from_module(given, hidden_matrix)
    return from_shapes(given, "shapes", "model")


def hidden_matrix(name: str, _: nn.Parameter) -> bool:
    """Tell by the usual names whether a parameter is neither an embedding nor the head."""
    parts = name.lower().split(".")
    known = ("lm_head", "wte", "wpe")
    return parts[:1] != ["output"] and not any(part in known or "embed" in part for part in parts)


def optimizer_from(given: str | type[Optimizer] | Optimizer, arguments: Mapping[str, Any]) -> Optimizer:
    if isinstance(given, Optimizer):
        return given
    return optimizer_named(given, arguments) if isinstance(given, str) else optimizer_of(given, arguments)


def machine_of(rates: Hardware, mesh: Mesh) -> Machine:
    """Describe this hardware as a run on it would; leave out rates that the run would assume anyway."""
    assumed = rates in (named_hardware("cpu"), named_hardware("h100"))
    return Machine(rates.device, rates.backend if mesh.ranks > 1 else "", 1, None if assumed else rates)


def check_capacity(owned: Step, capacity: int) -> None:
    """Raise CanzonaError for the first matrix that alone exceeds the capacity."""
    placed = {p.name: p for p in owned.placed}
    for task in owned.tasks:
        needed = bytes_of_wires(placed[task.placed].gather)
        if needed > capacity:
            raise CanzonaError(
                f"capacity {capacity} is below the {needed} bytes that its owner gathers",
                at=task.name,
                hint=f"at least {max(bytes_of_wires(p.gather) for p in owned.placed)} holds the largest matrix",
            )


def alternative_steps(captured: Step, options: Options) -> dict[str, Callable[[], Step]]:
    """Return functions that plan the same step with other planners, and with every rank computing everything."""

    def by(changed: Options) -> Callable[[], Step]:
        return lambda: run(captured, [*planning_passes(changed), *lowering_passes(changed)])[0]

    found = {name: by(replace(options, planner=name, strategy="owner")) for name in ALTERNATIVES}
    return {**found, "replicated": by(replace(options, strategy="replicated"))}
