"""Do Megatron's own matrix optimizers take the steps of one process? And the same with ours inside?

    python benchmarks/megatron_bits.py
    python benchmarks/megatron_bits.py --only soap --page table.md

Small GPTs of megatron-core train three steps on gloo ranks, by Megatron's `get_megatron_optimizer` and by that of
`canzona_compile`. Before each step the gradients of a tensor-parallel group are put together, and the same class steps
whole weights, as it does without tensor parallelism. Needs megatron-core and emerging-optimizers: `make test-megatron`
installs them into .venv-megatron.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

from megatron.core.optimizer import emerging_optimizers, get_megatron_optimizer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from canzona_compile.integrations import megatron  # noqa: E402
from tests.harness.megatron_models import Beside, Case, Training  # noqa: E402
from tests.harness.ranks import run  # noqa: E402

LAYOUTS = {
    "tp 2": (2, Case(tp=2)),
    "tp 4": (4, Case(tp=4)),
    "tp 2 x dp 2": (4, Case(tp=2)),
    "dp 2, ZeRO-1": (2, Case(bf16=True, layer_wise=True)),
    "dp 2, ZeRO-1 x tp 2": (4, Case(tp=2, bf16=True, layer_wise=True)),
}
STEPS = 3
ROUNDING = 1e-4  # of the way that a weight has moved, with products of 32 bits


class Builder(NamedTuple):
    """An optimizer by its name in Megatron, Megatron's `--muon-tp-mode`, and whether our function makes it."""

    optimizer: str
    tp_mode: str = ""
    ours: bool = False

    def __str__(self) -> str:
        mode = f", {self.tp_mode}" if self.tp_mode else ""
        return f"{'ours' if self.ours else 'Megatron'}: {self.optimizer}{mode}"


BUILDERS = [
    *(Builder("muon", mode) for mode in ("blockwise", "duplicated", "distributed")),
    Builder("soap"),
    Builder("canzona_muon", ours=True),
    Builder("soap", ours=True),
    Builder("canzona_soap", ours=True),
]


class OfOneProcess(Beside):
    """Megatron's class with weights as Megatron holds them without tensor parallelism: a fused one is one matrix."""

    def matrices(self, fragment: Tensor, like: Any) -> list[Tensor]:
        parts = super().matrices(fragment, like)
        if getattr(like, "is_qkv", False):
            blocks = [part.unflatten(0, (-1, rows)) for part, rows in zip(parts, like.qkv_split_shapes, strict=True)]
            return [torch.cat(blocks, 1).flatten(0, 1)]
        return [torch.cat(parts)]

    def parameter(self, whole: Tensor, like: Any) -> Any:
        made: Any = nn.Parameter(whole)
        if getattr(like, "is_qkv", False):
            made.is_qkv, made.qkv_split_shapes = True, like.qkv_split_shapes
        return made


class Apart(NamedTuple):
    """How many matrices a rank compared, the largest distance of one as a share of the way that it moved, and where."""

    compared: int
    share: float
    names: list[str]


def apart(case: Case, ours: bool) -> Apart:
    """Train on this rank."""
    training = Training(case, make=None if ours else get_megatron_optimizer)
    kinds = {entry.optimizer_cls for entry in emerging_optimizers._EMERGING_OPTIMIZERS.values()}
    inside = [one.optimizer for one in megatron.inner_optimizers(training.optimizer)]
    matrix = training.wrapped if ours else [one for one in inside if type(one) in kinds]
    found: dict[str, float] = {}
    for beside in [(Beside if ours else OfOneProcess)(training, one) for one in matrix]:
        starts = {key: [m.detach().clone() for m in whole] for key, whole in beside.whole.items()}
        for _ in range(STEPS):
            training.step()
        for param, name, like in beside.weights:
            both = zip(beside.whole[id(param)], beside.matrices(param.data, like), starts[id(param)], strict=True)
            for i, (plain, own, start) in enumerate(both):
                found[f"{name} part {i}"] = float((own - plain).norm() / (plain - start).norm())
    return Apart(len(found), max(found.values(), default=0.0), [name for name, share in found.items() if share])


class Row(NamedTuple):
    """What was found of an optimizer in a layout."""

    builder: Builder
    layout: str
    verdict: str
    detail: str


def row_of(builder: Builder, layout: str) -> Row:
    """Compare, with products of 32 bits and with Megatron's default."""
    world, case = LAYOUTS[layout]
    case = replace(case, optimizer=builder.optimizer, tp_mode=builder.tp_mode or "blockwise")
    precisions = ("medium" if builder.ours else "highest", "medium")  # ours refuses what it does not do
    exact, usual = (run(world, apart, replace(case, precision=one), builder.ours) for one in precisions)
    worst, default = (max(rank.share for rank in ranks) for ranks in (exact, usual))
    kind = "rounding" if worst < ROUNDING else "another algorithm"
    verdict = f"{kind}, {max(worst, default):.0e}" if worst or default else "equal"
    names = sorted({name for rank in exact for name in rank.names})
    compared = sum(rank.compared for rank in exact)
    return Row(builder, layout, verdict, f"{compared} compared, {worst:.0e} with 32 bits: {', '.join(names) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of optimizers (default: all)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the table there, in Markdown")
    given = parser.parse_args()
    table, lines = Table("optimizer", *LAYOUTS), [f"| optimizer | {' | '.join(LAYOUTS)} |", "|---" * 6 + "|"]
    for builder in (one for one in BUILDERS if given.only in str(one)):
        rows = [row_of(builder, layout) for layout in LAYOUTS]
        for row in rows:
            print(row.builder, row.layout, row.verdict, row.detail, sep="; ", flush=True)
        table.add_row(str(builder), *(row.verdict for row in rows))
        lines.append(f"| {builder} | {' | '.join(row.verdict for row in rows)} |")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if given.page:
        given.page.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
