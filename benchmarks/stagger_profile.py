"""How long each step of a refresh period takes, with all refreshes on one step and with `stagger=True`.

    python benchmarks/stagger_profile.py --ranks 2
    python benchmarks/stagger_profile.py --optimizer shampoo --every 10 --matrices 24 --size 256 --json out.json

Both run side by side in the same processes, on equal gradients, and take turns step by step. A figure is the
median over periods of what the slowest rank took.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import Parameter

import canzona_compile

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from canzona_compile.machine.hardware import this_processor
from optimizers.shampoo import Shampoo
from optimizers.soap import SOAP

OPTIMIZERS: dict[str, Callable[..., Any]] = {"soap": SOAP, "shampoo": Shampoo}


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    optimizer: str
    ranks: int
    every: int
    periods: int
    matrices: int
    size: int
    json: str | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds of every step of a period, and what `report()` predicts, in its own unit: seconds."""

    name: str
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The longest step, in mean steps."""
        return max(self.measured) / mean(self.measured)


def parse() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="shampoo", help="(default: %(default)s)")
    for name, default, what in (
        ("ranks", 2, "gloo processes of one thread"),
        ("every", 8, "steps between refreshes"),
        ("periods", 5, "timed ones"),
        ("matrices", 32, "that are sharded over all ranks"),
        ("size", 192, "rows and columns of each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    settings = parse()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, args=(settings, Path(folder, "ranks").as_uri()), nprocs=settings.ranks)


def run_rank(rank: int, settings: Settings, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=settings.ranks, timeout=timedelta(minutes=3)
    )
    profiles = measure(settings)
    if rank == 0:
        show(settings, profiles)
        if settings.json:
            Path(settings.json).write_text(json.dumps([asdict(p) for p in profiles], indent=2) + "\n")
    dist.destroy_process_group()


def measure(settings: Settings) -> list[Profile]:
    """Two wrapped optimizers by turns: a warm-up of two periods, then the timed ones."""
    mesh = init_device_mesh("cpu", (settings.ranks,))
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(settings.size, settings.size, generator=random) for _ in range(settings.matrices)]
    optimizers: dict[str, Any] = {}
    for name, stagger in (("all at once", False), ("staggered", True)):
        params = [Parameter(distribute_tensor(w.clone(), mesh, [Shard(0)])) for w in whole]
        made = OPTIMIZERS[settings.optimizer](params, every=settings.every)
        optimizers[name] = canzona_compile.wrap(made, stagger=stagger)
        for param, value in zip(params, whole, strict=True):
            param.grad = distribute_tensor(value, mesh, [Shard(0)])
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in range((settings.periods + 2) * settings.every):
        for name, optimizer in optimizers.items():
            dist.barrier()
            began = time.perf_counter()
            optimizer.step()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if step >= 2 * settings.every:
                seconds[name, step % settings.every].append(took.item())
    return [
        Profile(
            name,
            tuple(1e3 * median(seconds[name, i]) for i in range(settings.every)),
            optimizer.canzona.report().profile.apart
            if name == "staggered"
            else optimizer.canzona.report().profile.together,
        )
        for name, optimizer in optimizers.items()
    ]


def show(settings: Settings, profiles: list[Profile]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        title=f"{settings.optimizer}: {settings.matrices} matrices of {settings.size} x {settings.size}, every "
        f"{settings.every} steps refreshed, {settings.ranks} gloo ranks on {this_processor()}",
        title_justify="left",
    )
    for column in ("", *(f"step {i}" for i in range(settings.every)), "mean", "worst / mean", "predicted"):
        table.add_column(column, justify="right")
    for own in profiles:
        predicted = max(own.predicted) / mean(own.predicted)
        cells = (*(f"{ms:.1f}" for ms in own.measured), f"{mean(own.measured):.1f} ms", f"{own.worst:.2f}")
        table.add_row(own.name, *cells, f"{predicted:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
