"""The pictures of docs/images that come from a run, with the rates of the machine that draws them.

    canzona-compile calibrate -o build/rates.json
    torchrun --nproc-per-node 4 docs/diagrams.py docs/images build/rates.json

`report.svg` is the report of a wrapped Muon with measured steps, beside what the rates predict; without rates it has no
predictions. `journey.svg` is the way of its matrices, and `one_matrix.svg` that of the first of them, animated. The
others need no ranks.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile
from canzona_compile.ir.step import Exchange, Phase, Step, Task

WIDTHS = (256, 384, 192, 288, 256)  # of the layers: matrices of 384 x 256, 192 x 384, 288 x 192 and 256 x 288
COLORS = ("#3f6fb5", "#d07a28", "#4a9a5b", "#a8489a")
COLUMN, HEIGHT, LEFT, GAP = 200, 60, 110, 70  # a rank; a stage of matrices; the words beside; a stage of arrows
SCALE = 0.1125  # of an element
MEASURED = 5  # steps
LARGE = 0.375  # of an element, where one matrix is drawn alone
SECONDS = 15  # of the animation, from its begin to its next begin
ACTS = (  # of one matrix: what happens, and until when, as a share of the animation
    ("1 prepare", "momentum, cast", 0.2),
    ("2 gather", "to the owner", 0.4),
    ("3 compute", "Newton-Schulz, once", 0.6),
    ("4 scatter", "to all ranks", 0.8),
    ("5 apply", "new weights", 1.0),
)


def main(folder: Path, rates: str | None = None) -> None:
    """Train on the ranks that there are, measure steps that follow the first two, and let rank 0 draw."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(n, m, bias=False) for n, m in pairwise(WIDTHS)])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = canzona_compile.wrap(
        torch.optim.Muon(model.named_parameters(), lr=2e-2), strategy="owner", hardware=rates
    )
    for i in range(2 + MEASURED):
        if i == 2:
            optimizer.canzona.measure(MEASURED)
        model(torch.randn(8, WIDTHS[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        report = terminal_picture(optimizer.canzona.report(), "optimizer.canzona.report()", "report")
        (folder / "report.svg").write_text(report, encoding="utf-8")
        (folder / "journey.svg").write_text(journey_picture(optimizer.canzona.step), encoding="utf-8")
        (folder / "one_matrix.svg").write_text(one_matrix_picture(optimizer.canzona.step), encoding="utf-8")
        draw_without_ranks(folder)
    dist.destroy_process_group()


def draw_without_ranks(folder: Path) -> None:
    """The pictures that need no ranks: what `explain` says of a chain, and a plan for 64 ranks."""
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64))
    chosen = canzona_compile.hidden_matrices(model)
    muon, adamw = torch.optim.Muon(chosen.matrices), torch.optim.AdamW(chosen.others)
    explained = canzona_compile.explain(canzona_compile.chain(muon, adamw))
    planned = canzona_compile.plan("qwen3-1.7b", mesh="fsdp=64", optimizer="muon", alternatives=False)
    for name, shown, title in (
        ("choice", chosen, "canzona_compile.hidden_matrices(model)"),
        ("explain", explained, "canzona_compile.explain(optimizer)"),
        ("plan_64", planned, "canzona-compile plan --model qwen3-1.7b --mesh fsdp=64"),
    ):
        (folder / f"{name}.svg").write_text(terminal_picture(shown, title, name), encoding="utf-8")


def terminal_picture(shown: object, title: str, name: str) -> str:
    """What a terminal shows of something, in a window with a title."""
    console = Console(record=True, width=96, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(shown)
    svg = console.export_svg(title=title, unique_id=name)
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # fonts that would be loaded from elsewhere


def journey_picture(step: Step) -> str:
    """Where the rows of each matrix lie before the step, on their owner, and after the step."""
    ranks = step.tasks[0].layout.grid.shards
    width, height = LEFT + ranks * COLUMN, 40 + 3 * HEIGHT + 2 * GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for rank in range(ranks):
        lines.append(text(LEFT + rank * COLUMN + COLUMN / 2 - 8, 22, f"rank {rank}", "middle", bold=True))
    tops = [40 + i * (HEIGHT + GAP) for i in range(3)]
    for top, words in zip(tops, ("prepare\non fragments", "compute\non the owner", "apply\non fragments"), strict=True):
        for i, word in enumerate(words.splitlines()):
            lines.append(text(8, top + 26 + 16 * i, word, bold=i == 0))
    for number, task in enumerate(step.tasks):
        for rank in range(ranks):
            start, rows = task.layout.boxes[rank].start[0], task.layout.boxes[rank].size[0]
            for top in (tops[0], tops[2]):
                lines += matrix(number, task, rank, top, start, rows)
            assert task.owner is not None
            if task.owner[1] == rank:
                lines += matrix(number, task, rank, tops[1], 0, task.shape[0])
    exchanges = {e.phase: e for group in step.micro_groups for e in group.exchanges}
    for phase, top in ((Phase.GATHER, tops[0]), (Phase.SCATTER, tops[1])):
        lines += arrows(step, exchanges[phase], top + HEIGHT, ranks)
    return "\n".join([*lines, "</svg>", ""])


def matrix(number: int, task: Task, rank: int, top: float, start: int, rows: int) -> Iterator[str]:
    """A matrix as an outline, with the rows that a rank has filled."""
    wide, tall = SCALE * task.shape[1], SCALE * task.shape[0]
    x = middle(rank, number) - wide / 2
    yield f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{tall:.1f}" fill="none" stroke="#bbbbbb"/>'
    yield (
        f'<rect x="{x:.1f}" y="{top + SCALE * start:.1f}" width="{wide:.1f}" height="{SCALE * rows:.1f}" '
        f'fill="{COLORS[number]}"><title>{escape(task.name)}: rows {start} to {start + rows}</title></rect>'
    )
    yield text(middle(rank, number), top + tall + 11, f"{task.shape[0]}x{task.shape[1]}", "middle", size=9)


def arrows(step: Step, exchange: Exchange, top: float, ranks: int) -> Iterator[str]:
    """What one all-to-all sends between ranks: an arrow per block, in the color of what travels."""
    owned = {task.owner: number for number, task in enumerate(step.tasks)}
    total = 0
    for source in range(ranks):
        for target in range(ranks):
            size = exchange.block((0, source), (0, target))[1]
            owner = target if exchange.phase is Phase.GATHER else source
            if source == target or not size:
                continue
            total += size
            number = owned[0, owner]
            begin, end = middle(source, number), middle(target, number)
            yield (
                f'<path d="M {begin} {top} C {begin} {top + 40}, {end} {top + 24}, {end} {top + GAP - 4}" '
                f'fill="none" stroke="{COLORS[number]}" stroke-width="1.6" opacity="0.8">'
                f"<title>rank {source} to rank {target}: {size} B</title></path>"
            )
    yield text(8, top + 34, f"{exchange.phase}", bold=True)
    yield text(8, top + 50, f"{total / 1024:.1f} KiB")


def one_matrix_picture(step: Step) -> str:
    """The way of the first matrix in a step, act by act. A reader who wants no motion sees all acts named."""
    task = step.tasks[0]
    assert task.owner is not None
    owner, boxes = task.owner[1], task.layout.boxes
    wide, tall = LARGE * task.shape[1], LARGE * task.shape[0]
    width, top = len(boxes) * COLUMN, 64
    height = top + tall + 90
    item = next(i for g in step.micro_groups for e in g.exchanges for i in e.items if i.task == task.name)
    sent = sum(box.numel for r, box in enumerate(boxes) if r != owner) * item.wire.itemsize
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>A step of {escape(task.name)}, {task.shape[0]} x {task.shape[1]}, on {len(boxes)} ranks</title>",
        f"<style>{moves(owner, len(boxes))}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for rank, box in enumerate(boxes):
        x = rank * COLUMN + (COLUMN - wide) / 2
        lines.append(text(x + wide / 2, 24, f"rank {rank}", "middle", bold=True))
        rows = f"rows {box.start[0]} to {box.start[0] + box.size[0]}" + ", owner" * (rank == owner)
        lines.append(text(x + wide / 2, 44, rows, "middle", size=11))
        lines.append(f'<rect x="{x}" y="{top}" width="{wide}" height="{tall}" fill="none" stroke="#bbbbbb"/>')
    for rank, box in enumerate(boxes):
        x, y = rank * COLUMN + (COLUMN - wide) / 2, top + LARGE * box.start[0]
        lines.append(
            f'<rect class="f{rank}" x="{x}" y="{y}" width="{wide}" height="{LARGE * box.size[0]}" '
            f'fill="{COLORS[rank]}" stroke="#ffffff"/>'
        )
    for number, (name, what, _) in enumerate(ACTS):
        x = (number + 0.5) * width / len(ACTS)
        said = f"{what}, {sent / 1024:.1f} KiB" if number in (1, 3) else what
        lines.append(f'<g class="a{number}">{text(x, top + tall + 40, name, "middle", bold=True, size=15)}')
        lines.append(f"{text(x, top + tall + 62, said, 'middle', size=11)}</g>")
    return "\n".join([*lines, "</svg>", ""])


def moves(owner: int, ranks: int) -> str:
    """The style sheet that moves fragments to the owner and back, and shows the name of each act in its time."""
    begin, gathered, computed, scattered, _ = (round(100 * until) for _, _, until in ACTS)
    rules = []
    for rank in range(ranks):
        there = f"transform:translateX({(owner - rank) * COLUMN}px)"
        rules += [
            f"@keyframes m{rank}{{0%,{begin}%,{scattered}%,100%{{transform:none}}{gathered}%,{computed}%{{{there}}}}}",
            f".f{rank}{{animation:m{rank} {SECONDS}s ease-in-out infinite}}",
        ]
    for number, (_, _, until) in enumerate(ACTS):
        last = round(100 * until)
        first = last - 100 // len(ACTS)
        shown = f"0%,{first}%{{opacity:.3}}{first + 1}%,{last - 1}%{{opacity:1}}{last}%,100%{{opacity:.3}}"
        rules.append(f"@keyframes t{number}{{{shown}}}.a{number}{{animation:t{number} {SECONDS}s infinite}}")
    return "".join(rules) + "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"


def middle(rank: int, number: int) -> float:
    """Where a rank's column has a matrix."""
    return LEFT + rank * COLUMN + 26 + 46 * number


def text(x: float, y: float, words: str, anchor: str = "start", bold: bool = False, size: int = 13) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight} fill="#222222">{words}</text>'


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
