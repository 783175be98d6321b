"""One plan for all optimizers of a model under ZeRO-1: who owns which matrix, and which bucket holds what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.templates import Capture
from canzona_compile.compat.telling import SOON, shown
from canzona_compile.data_parallel.collectives import DataParallelGroup
from canzona_compile.errors import CanzonaError, problem_of
from canzona_compile.ir.bucket import BUCKET_BYTES, LEAST_BUCKET_BYTES, bytes_by_link
from canzona_compile.ir.layout import WHOLE_VECTORS
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.ir.storage import no_codes
from canzona_compile.passes import planning_passes, zero1_passes
from canzona_compile.replica.parameter_spec import ParamExample
from canzona_compile.runtime.agreement import PLANNING, Agreement
from canzona_compile.runtime.process_groups import widen
from canzona_compile.runtime.waiter import Waiter
from canzona_compile.session.bind import Binder
from canzona_compile.session.plan import BoundParam, captured_step, check_pieces, joined, lower
from canzona_compile.session.planning import PlannedSession
from canzona_compile.session.rates import agreed_link
from canzona_compile.tensors import local_part
from canzona_compile.views.entries import same_but_sizes


@dataclass(frozen=True, eq=False, slots=True)
class ModelPlan:
    """The decisions of ZeRO-1 for a model.

    Attributes:
        step: the OWNED step of all optimizers, with buckets; each task on the ranks of its owner's replica.
        bound: for each optimizer, its parameters and the pieces of its fused ones by task, with the task as if on all
            replicas. Nothing stands for a piece here but its fused parameter.
    """

    step: Step
    bound: tuple[Mapping[str, BoundParam], ...]

    @property
    def text(self) -> str:
        """The plan as text, which must be equal on all data-parallel ranks."""
        return show(self.step)

    def scheduled(self, options: Options) -> Step:
        """The SCHEDULED step of all matrices, see `schedule_of`."""
        return schedule_of(self.step, self.bound, options)


def bucket_size(
    given: int | None, params: Mapping[str, Tensor], group: DataParallelGroup, around: Agreement, options: Options
) -> int:
    """The bytes at which a bucket closes, for ranks that exchange as fast as they can.

    This is a collective of all ranks `around`.
    """
    size = given or BUCKET_BYTES
    if group.shard is None or group.size == 1:
        return size
    own = sum(local_part(param).numel() * param.element_size() for param in params.values())
    most = max(map(int, around.share(str(own))))
    device = next(iter(params.values())).device
    with around.on_its_way(), torch.no_grad():
        widen(group.shard, device, most)
        if given is not None or not options.measures or most <= LEAST_BUCKET_BYTES:
            return size
        link = agreed_link(around, group.shard, device, Waiter(around.boards, device))
    return bytes_by_link(most, link.bandwidth, link.latency)


def agreed_plan(
    sessions: Sequence[PlannedSession],
    params: Iterable[str],
    group: ProcessGroup | None,
    ranks: Sequence[int],
    bucket_bytes: int,
    agreement: Agreement,
) -> ModelPlan:
    """Plan ZeRO-1, and see that all ranks made the same plan. This is a collective.

    Args:
        sessions: of the optimizers; their parameters are bound as if all ranks held copies of them.
        group: the data-parallel process group of this rank; None if the rank is alone.
        bucket_bytes: the bytes at which a bucket closes.
    """
    found: list[ModelPlan] = []
    order = {name: i for i, name in enumerate(params)}
    with shown("canzona, zero1", patience=SOON, quiet=dist.get_rank() != 0):
        error = problem_of(lambda: found.append(plan_model(sessions, order, group, ranks, bucket_bytes)))
    agreement.compare(PLANNING, {"plan": "" if error is not None else found[0].text}, error)
    return found[0]


def plan_model(
    sessions: Sequence[PlannedSession],
    order: Mapping[str, int],
    group: ProcessGroup | None,
    ranks: Sequence[int],
    bucket_bytes: int,
) -> ModelPlan:
    """Plan ZeRO-1. Every rank of every replica gets the same owners; this is a collective if there is a DTensor.

    The arguments and errors are those of `agreed_plan`, with the position of each parameter in `order`.
    """
    trained: list[list[BoundParam]] = []
    options = sessions[0].options
    for own in sessions:
        bare = Binder(own.optimizer, replace(own.options, replicate=group), own.capture).exchanged().bind()
        for view in (b.division for b in bare if b.division is not None):
            view.show(())  # what stands for a piece may be a copy of its rows, which is not needed here
        light = [b if b.division is None else replace(b, param=b.division.source) for b in bare]
        found = [b for b in light if b.origin.requires_grad]
        if unknown := [b.name for b in found if b.name not in order]:
            raise CanzonaError(
                "the optimizer and the model have different names for this parameter",
                at=unknown[0],
                hint="pass zero1 the model whose named_parameters() the optimizer was built from",
            )
        trained.append(found)
    bound = in_model_order(trained, order)
    parts = [
        captured_step(tuple(found.values()), own.optimizer_name, own.options)
        for own, found in zip(sessions, bound, strict=True)
    ]
    owned, _ = run(joined(parts), planning_passes(options))
    check_pieces([b for found in bound for b in found.values()], owned)
    elementwise = {task.name for task in owned.elementwise}
    check_slices(owned)
    whole = {
        name
        for own, found in zip(sessions, bound, strict=True)
        for name, b in found.items()
        if name in elementwise and not may_be_cut(b, own.capture)
    }
    step, _ = run(owned, zero1_passes(ranks, bucket_bytes, frozenset(whole), dist.get_rank()))
    made = ModelPlan(step, bound)
    if (plan := options.plan) is not None:
        plan.check_followed(made.scheduled(options))
    return made


def check_slices(owned: Step) -> None:
    """Refuse codes for elementwise updates: ranks own slices of these parameters, which have parts of blocks."""
    templates = {template.name: template for template in owned.templates}
    for task in owned.elementwise:
        for leaf in templates[task.template].state:
            if leaf.stored is not None and leaf.stored.dtype == "int8":
                why = "under zero1, ranks own slices of parameters whose update is elementwise, which cut blocks"
                raise no_codes(leaf.name, why, task.name)


def in_model_order(
    trained: Sequence[Sequence[BoundParam]], order: Mapping[str, int]
) -> tuple[Mapping[str, BoundParam], ...]:
    """What each optimizer trains, by task, with tasks numbered in the order of the model and of pieces."""
    everything = sorted((order[b.name], b.task.index, b.task.name) for found in trained for b in found)
    index = {name: i for i, (_, _, name) in enumerate(everything)}

    def numbered(b: BoundParam) -> BoundParam:
        return replace(b, task=replace(b.task, index=index[b.task.name]))

    return tuple({b.task.name: numbered(b) for b in found} for found in trained)


def may_be_cut(bound: BoundParam, capture: Capture) -> bool:
    """Tell whether the optimizer does the same to some elements of a parameter, in one dim, as to the whole."""
    kind = bound.kind
    if kind.recorder is None:
        return False
    spec = replace(bound.spec, shape=(2 * WHOLE_VECTORS,), marks=())
    group = capture.optimizer.param_groups[bound.task.param_group]
    try:
        part = capture.kind_of(ParamExample(group, spec, f"elements of {bound.task.name}"))
    except CanzonaError:
        return False
    if constants(kind) != constants(part):
        return False  # an integer in the graph may be a size of the parameter
    leaves = {(leaf.name, leaf.shape == kind.template.shape, leaf.shape == ()) for leaf in kind.state}
    own = {(leaf.name, leaf.shape == spec.shape, leaf.shape == ()) for leaf in part.state}
    everywhere = all(same or scalar for _, same, scalar in leaves)
    return everywhere and leaves == own and same_but_sizes(kind, part)


def constants(kind: ParamKind) -> list[list[int | float]]:
    """The numbers that the captured code holds as constants."""
    calls = [n for n in kind.template.graph.nodes if n.op == "call_function"]
    return [[a for a in (*n.args, *n.kwargs.values()) if isinstance(a, int | float)] for n in calls]


def schedule_of(step: Step, parts: Sequence[Collection[str]], options: Options) -> Step:
    """Schedule all matrices of the step of a model as one step, which is what a plan of the model describes.

    Optimizers without matrices leave no trace but the slices of their parameters, so the plan does not depend on them.
    Parameter groups are renumbered in the order of the matrices. `parts` has the names of each optimizer's parameters.
    """
    names = step.optimizer.split("+")
    taking = [name for name, own in zip(names, parts, strict=True) if any(step.find(n) is not None for n in own)]
    order = {group: i for i, group in enumerate(dict.fromkeys(t.param_group for t in step.tasks))}
    tasks = tuple(replace(t, param_group=order[t.param_group]) for t in step.tasks)
    whole = replace(step, optimizer="+".join(taking or names[:1]), tasks=tasks)
    return lower(whole, [t.name for t in tasks], options)[0]
