"""The steps of a plan: with the owners of all matrices, and scheduled, as the runtime of the asked-for updates does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from canzona_compile.data_parallel.model_plan import schedule_of
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.sequence import in_sequence
from canzona_compile.ir.step import Step
from canzona_compile.passes import planning_passes, zero1_passes
from canzona_compile.session.plan import lower
from canzona_compile.tools.planning.mesh import Mesh
from canzona_compile.tools.planning.offline import Captured

DIMS = ("dp", "tp")  # of a mesh for ZeRO-1, after replicas


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """Two forms of one plan.

    Attributes:
        owned: OWNED, with tasks on the ranks that hold them. The owners of all ranks can be counted here.
        scheduled: SCHEDULED, as it runs; under ZeRO-1 it has buckets, and tasks in the replica of their owner alone.
    """

    owned: Step
    scheduled: Step


@dataclass(frozen=True, slots=True)
class Lowering:
    """Lowers the captured step of a model, as `wrap` or `zero1` does.

    Attributes:
        begun: the step of all tasks; under ZeRO-1 with those of elementwise parameters.
        mesh: the ranks.
        bucket_bytes: the size at which a bucket closes; None without ZeRO-1.
    """

    begun: Captured
    mesh: Mesh
    bucket_bytes: int | None

    def __call__(self, options: Options) -> LoweredPlan:
        owned, _ = run(self.begun.step, planning_passes(options))
        return self.scheduled(owned, options)

    def scheduled(self, owned: Step, options: Options) -> LoweredPlan:
        """Lower a step that has owners."""
        if self.bucket_bytes is None:
            own = [[task.name for task in owned.tasks if task.name in names] for _, names in self.begun.members]
            steps = [lower(owned, names, options)[0] for names in own]
            named = [replace(s, optimizer=kind) for s, (kind, _) in zip(steps, self.begun.members, strict=True)]
            return LoweredPlan(owned, in_sequence(named))
        ranks = data_parallel_ranks(self.mesh)
        joint, _ = run(owned, zero1_passes(ranks, self.bucket_bytes, frozenset(), ranks[0]))
        return LoweredPlan(owned, schedule_of(joint, [names for _, names in self.begun.members], options))


def data_parallel_ranks(mesh: Mesh) -> tuple[int, ...]:
    """The global ranks of the data-parallel group of rank 0, in order."""
    return tuple(mesh.rank({"dp": i}) for i in range(mesh.size("dp")))


def check_zero1(mesh: Mesh, strategy: str, bucket_bytes: int) -> None:
    """Raise CanzonaError for what `zero1` does not take."""
    if unknown := [name for i, (name, _) in enumerate(mesh.dims) if name not in DIMS and (i or name != "hsdp")]:
        raise CanzonaError(
            f"a ZeRO-1 plan cannot have the mesh dim {unknown[0]!r}",
            at="mesh",
            hint="use dp and tp, and first hsdp for replicas; plan each pipeline stage separately, and plan fsdp or "
            "experts with --updates ddp",
        )
    if strategy not in ("auto", "owner"):
        raise CanzonaError(
            f"under ZeRO-1 every matrix has an owner, so strategy={strategy!r} is not possible",
            at="plan",
            hint='omit strategy, or pass updates="ddp"',
        )
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise CanzonaError(f"bucket_bytes={bucket_bytes!r} is not a positive integer", at="plan(..., bucket_bytes=)")
