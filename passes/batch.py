"""Put the tasks of one owner that are alike into batches, and let batches run on stacks of all of their matrices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from canzona_compile.ir.fx_utils import outputs
from canzona_compile.ir.step import Batch, Form, MicroGroup, Placed, Step
from canzona_compile.lowering.batch_graph import lift_stacked
from canzona_compile.lowering.stacking import runs_on_stack, stacks
from canzona_compile.machine.hardware import Machine


@dataclass(frozen=True, slots=True)
class Batching:
    """Form batches of tasks with equal owner, graph and hyperparameters, and stack the operators of a batch.

    Under exact numerics only matrix products, and the elementwise work and the transposes around them, run on stacks
    [n, ...]. A product of the library qualifies if its batched form is known to give the same bits
    (`canzona_compile.ir.bit_exactness`). Products of our own kernels always qualify. Norms and sums run on stacks if
    something else has made the stack. Everything else, such as decompositions, loops over the tasks. Nothing is stacked
    if there is no product to batch.

    Under fast numerics all products qualify, and on CUDA decompositions do too if a stack of them is faster. Measured
    rates decide that (`eigh` and `eigh_batched`). Without such rates the version of torch decides
    (`canzona_compile.lowering.stacking`).
    """

    exact: bool = True

    name: ClassVar[str] = "batch"
    requires: ClassVar[Form] = Form.ROUTED
    ensures: ClassVar[Form] = Form.BATCHED

    def __call__(self, step: Step) -> Step:
        placed = tuple(self._stacked(p, step.machine) for p in step.placed)
        by_name = {p.name: p for p in placed}
        micro_groups = tuple(replace(g, batches=batches(step, g, by_name)) for g in step.micro_groups)
        return replace(step, form=Form.BATCHED, placed=placed, micro_groups=micro_groups)

    def _stacked(self, placed: Placed, machine: Machine) -> Placed:
        """A cut with a compute graph for stacks; the cut itself if nothing starts a stack."""

        if not stacks(placed, machine, self.exact):
            return placed
        lifted = lift_stacked(
            placed.compute,
            stacked_wires(placed, machine),
            placed.template.numbers,
            runs_on_stack(placed, machine, self.exact),
            foreach=machine.device == "cpu",
        )
        return replace(placed, stacked=lifted)


def stacked_wires(placed: Placed, machine: Machine) -> list[str]:
    """The wires that a stacked batch gets as one tensor: what ranks gather, and what kernels for CUDA prepare."""
    if placed.kind.sharded or placed.kind.lead:
        return [wire.name for wire in placed.gather]
    made = zip(placed.gather, outputs(placed.prepare), strict=False)
    return [wire.name for wire, node in made if machine.device == "cuda" and node.op != "placeholder"]


def batches(step: Step, micro_group: MicroGroup, placed: dict[str, Placed]) -> tuple[Batch, ...]:
    """Divide a micro-group into batches: tasks of one owner rank, one cut and one param group."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for task in sorted(map(step.task, micro_group.tasks), key=lambda t: t.index):
        alike[task.owner is not None, task.owner or (), task.placed, task.param_group].append(task.name)
    found = []
    for key in sorted(alike, key=repr):
        first = step.task(alike[key][0])
        cut = placed[first.placed]
        stacked = cut.stacked is not None and len(alike[key]) * cut.kind.matrices > 1
        found.append(Batch(first.placed, first.param_group, first.owner, tuple(alike[key]), stacked))
    return tuple(found)
