"""`plan`: plans an optimizer's step on a mesh, and predicts it, without ranks, tensors or devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, get_args

from torch import nn
from torch.optim import Optimizer

from canzona_compile.analysis.flops import bytes_of_wires
from canzona_compile.api.chain import Chain
from canzona_compile.compat.garbage import not_collecting
from canzona_compile.data_parallel.engine import GatherAt
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import BUCKET_BYTES
from canzona_compile.ir.options import CAPACITY, Options, PlanningOptions, StrategyOption, made_options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Step
from canzona_compile.machine.hardware import Hardware, Machine, named_hardware
from canzona_compile.ownership import NAMES
from canzona_compile.passes import planning_passes
from canzona_compile.simulation.simulate import simulate
from canzona_compile.tools.planning.configs import configured_module, preset_module
from canzona_compile.tools.planning.forecast import forecast, period_forecast
from canzona_compile.tools.planning.held import dealt, held_by, hidden_names, model_of_chain, with_held
from canzona_compile.tools.planning.local import local_forecast
from canzona_compile.tools.planning.lowered import TOKENS, LoweredPlan, Lowering, Request, Updates, check_zero1
from canzona_compile.tools.planning.mesh import Mesh, parse_mesh
from canzona_compile.tools.planning.offline import captured_model, optimizer_named, optimizer_of
from canzona_compile.tools.planning.result import OfflinePlan
from canzona_compile.tools.planning.weights import Model, arranged, from_module, from_shapes, parse_split

ALPHAS = (0.0, 0.5, 1.0)  # of the alternatives under ZeRO-1
Say = Callable[[str], None]


@not_collecting()
def plan(
    model: str | Path | nn.Module | Mapping[str, Any] | Model,
    *,
    mesh: str | Mapping[str, int],
    optimizer: str | type[Optimizer] | Optimizer = "muon",
    arguments: Mapping[str, Any] | None = None,
    hardware: str | Path | Hardware = "h100",
    split: str = "qkv,gate-up",
    strategy: StrategyOption = "auto",
    updates: Updates = "ddp",
    bucket_bytes: int = BUCKET_BYTES,
    tokens: int = TOKENS,
    gather: GatherAt = "step",
    rank: int | None = None,
    alternatives: bool = True,
    say: Say = lambda _: None,
    **options: Unpack[PlanningOptions],
) -> OfflinePlan:
    """Plan a step as a run would, and predict its time and memory, without GPUs.

    Args:
        model: a preset ("qwen3-32b"), the Path of a Hugging Face config.json, {name: shape} of the matrices, or a
            module, for example on the meta device. transformers builds the models of presets and configs. An optimizer
            plans the parameters that it holds: of this module, or of another copy, known by names or shapes. Without
            an optimizer, or if it holds none of them, these are the hidden matrices, stacks of experts included. With
            ZeRO-1 the other parameters lie in buckets too.
        mesh: sizes of named dims, "fsdp=32,tp=8": dp, hsdp, fsdp, ep, tp, pp.
        optimizer: "muon", "normuon", "soap", "shampoo", "module:Class", a class, or an optimizer; parameters that it
            does not hold get the hyperparameters of its first parameter group. "muon+adamw" is the chain that
            `muon_adamw` makes: Muon updates the matrices and AdamW all else. Of another `chain` that holds none of the
            parameters, the first optimizer updates the matrices, the second one all else.
        arguments: the arguments of the class, except the parameters; for "muon+adamw" those of `muon_adamw`.
        hardware: a name (h100, h200, gb300, a100, cpu), or a file that `canzona-compile calibrate` wrote.
        split: the matrices of a preset or config that are apart: "qkv", "gate-up", both, or "none". Without them
            q, k, v and gate, up are fused; with "gate-up", packed weights of experts are split.
        strategy: what `canzona_compile.Options` describes.
        updates: what happens over `dp`: every replica applies updates that travel within the step ("ddp", as under
            `wrap`), or the owner's replica alone, between a reduction of gradients and a gather ("zero1", as under
            `canzona_compile.zero1`; the mesh may have `dp` and `tp`, and first `hsdp`: replicas over
            which gradients are summed, of which one is planned; the strategy is "owner").
        bucket_bytes: option of `zero1`, for "zero1" alone.
        gather: option of `zero1`, for "zero1" alone.
        tokens: how many a data-parallel rank trains on per step. "zero1" takes the time of the passes from it.
        rank: a rank whose timeline to show.
        alternatives: whether to predict the plans of other planners too.
        say: called with words that tell the progress.
        options: likewise: `numerics`, `capacity`, `micro_groups`, `depth`, `planner`, `alpha`.

    Returns:
        The plan and its figures, which can be written in several formats.

    Raises:
        CanzonaError: an argument is unknown, absurd or does not fit; the message names it and the remedy.
        TypeError: there is no such option.
    """
    sizes, replicas = parse_mesh(mesh), 1
    rates = hardware if isinstance(hardware, Hardware) else named_hardware(str(hardware))
    code = optimizer_from(optimizer, arguments or {})
    found = model_of(model, split, code if isinstance(code, Chain) else optimizer, updates)
    if updates not in get_args(Updates):
        raise CanzonaError(f"updates={updates!r} is not one of {', '.join(map(repr, get_args(Updates)))}", at="plan")
    if updates == "zero1":
        check_zero1(sizes, strategy, bucket_bytes)
        replicas, sizes = sizes.size("hsdp"), Mesh(tuple(dim for dim in sizes.dims if dim[0] != "hsdp"))
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise CanzonaError(f"tokens={tokens!r} is not a positive integer", at="plan(..., tokens=)")
    if gather not in get_args(GatherAt):
        raise CanzonaError(f"gather={gather!r} is neither 'step' nor 'forward'", at="plan(..., gather=)")
    if rank is not None and not 0 <= rank < sizes.ranks:
        raise CanzonaError(f"rank {rank} is not one of the {sizes.ranks} ranks of {sizes}", at="plan(..., rank=)")
    capacity = options.get("capacity")
    wanted = made_options(
        "plan",
        PlanningOptions.__optional_keys__,
        {**options, "capacity": CAPACITY if capacity is None else capacity},
        strategy="owner" if updates == "zero1" else strategy,
    )
    request = Request(found, sizes, rates, wanted, updates, bucket_bytes, tokens, gather, rank, replicas)
    say("capturing the optimizer's step")
    begun = captured_model(found, sizes, code, machine_of(rates, sizes), request.zero1, capacity)
    say(f"planning {len(begun.step.tasks)} parameters on {sizes.ranks} ranks")
    owned, _ = run(begun.step, planning_passes(wanted))
    if capacity is not None:
        check_capacity(owned, capacity)
    lowering = Lowering(begun, sizes, bucket_bytes if request.zero1 else None)
    made = lowering.scheduled(owned, wanted)
    others: dict[str, Callable[[], LoweredPlan]] = {}
    if alternatives and any(t.layout.grid.size > 1 for t in owned.tasks):
        others = alternative_plans(lowering, wanted)
    file = PlanFile.of(made.scheduled)
    figures = forecast(made, file.fingerprint, request, others, say)
    say("simulating the steps of a period")
    period = period_forecast(
        owned, begun.periods, lambda step: simulate(lowering.scheduled(step, wanted).scheduled, rates).seconds
    )
    local = local_forecast(begun, owned, made.scheduled.buckets, rates) if isinstance(code, Chain) else None
    return OfflinePlan(made.scheduled, file, replace(figures, period=period, local=local))


def model_of(
    given: str | Path | nn.Module | Mapping[str, Any] | Model,
    split: str = "qkv,gate-up",
    optimizer: object = None,
    updates: Updates = "ddp",
) -> Model:
    """Return the facts of a model; of a module, the weights are those that the optimizer holds."""
    if isinstance(given, str | Path):
        kinds = parse_split(split)
        module = preset_module(given) if isinstance(given, str) else configured_module(given)
        name = given if isinstance(given, str) else str(getattr(module.config, "model_type", given.stem))
        return replace(arranged(model_of(module, split, optimizer, updates), kinds), name=name)
    if isinstance(optimizer, Chain):
        if isinstance(given, nn.Module):
            return model_of_chain(given, optimizer, in_order=updates == "zero1")
        return dealt(model_of(given, split, None, updates), optimizer)
    if isinstance(given, Model):
        return given
    if isinstance(given, nn.Module):
        held = held_by(optimizer, given) if isinstance(optimizer, Optimizer) else None
        if held is None:
            return from_module(given, hidden_names(given))
        return with_held(from_module(given, held), held, in_order=updates == "zero1")
    return from_shapes(given, "shapes", "model")


def optimizer_from(given: str | type[Optimizer] | Optimizer, arguments: Mapping[str, Any]) -> Optimizer:
    if isinstance(given, Optimizer):
        return given
    return optimizer_named(given, arguments) if isinstance(given, str) else optimizer_of(given, arguments)


def machine_of(rates: Hardware, mesh: Mesh) -> Machine:
    """Describe this hardware as a run on it would."""
    return Machine(rates.device, rates.backend if mesh.ranks > 1 else "", 1, rates)


def check_capacity(owned: Step, capacity: int) -> None:
    """Raise CanzonaError for the first matrix that alone exceeds the capacity."""
    placed = {p.name: p for p in owned.placed}
    for task in owned.tasks:
        needed = bytes_of_wires(placed[task.placed].gather)
        if needed > capacity:
            raise CanzonaError(
                f"capacity={capacity} is less than the {needed} bytes that the owner of this matrix gathers",
                at=task.name,
                hint=f"pass at least {max(bytes_of_wires(p.gather) for p in owned.placed)}, the size of the largest "
                "matrix",
            )


def alternative_plans(lowering: Lowering, options: Options) -> dict[str, Callable[[], LoweredPlan]]:
    """Return functions that plan the same step with other planners, and with every rank computing everything."""

    def by(**changes: Any) -> Callable[[], LoweredPlan]:
        return lambda: lowering(replace(options, **changes))

    if lowering.bucket_bytes is None:
        found = {name: by(planner=name, strategy="owner") for name in NAMES}
        return {**found, "replicated": by(strategy="replicated")}
    blends = {f"alpha {alpha:g}": by(planner="alpha", alpha=alpha) for alpha in ALPHAS}
    plain = {name: by(planner=name) for name in NAMES if name != "alpha"}
    everywhere = replace(lowering, bucket_bytes=None)
    return {**blends, **plain, "replicated": lambda: everywhere(replace(options, strategy="replicated"))}
