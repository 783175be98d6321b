"""How long a step and an iteration take on links that cost something: ours beside others.

    python benchmarks/slow_links.py
    python benchmarks/slow_links.py --links 200 --ranks 2 --cases even --what step
    python benchmarks/slow_links.py --read times.json --picture slow_links.svg

Each rank lives in a network namespace of its own, whose link sends at most so many Mbit/s (tc's token bucket); 0 is
loopback, without any. So bytes wait on a wire and not on a core. This needs root, Linux, and iproute2. What is not
installed is left out: dion has to be on PYTHONPATH. Links of one machine share nothing else; ranks share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import Parameter
from torch.optim import Muon

import canzona_compile
import iteration_variants
from canzona_compile.compat.duplex import all_to_all
from canzona_compile.machine.hardware import this_processor
from canzona_compile.runtime.process_groups import LARGE, widen
from iteration import iterate, timed
from latency_cases import CASES
from latency_rounds import random_matrices
from latency_variants import shard
from lm_data import Batches, standard_library
from lm_model import Decoder, ModelConfig

NAME = "canzona"  # of the bridge and, with numbers, of namespaces
PORT = "29611"
TIMEOUT = timedelta(minutes=5)
LINKS, RANKS, SHAPES = (1000, 400, 200, 100), (2, 4), ("even", "uneven", "one-per-shape")
ALONE = ("iteration", "exchange")  # what is run beside cases of steps
EXCHANGED = 6_000_000  # bytes to each rank
COUNTS = (1, 2, 4, 8, 16)  # of micro-groups
DEFAULT, SYNCHRONOUS, DION, PREDICTED = "default", "synchronous", "dion", "default, predicted"


# -- links ---------------------------------------------------------------------------------------------


def missing() -> str:
    """Why there can be no links here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "links are made by root on Linux"
    if not all(map(shutil.which, ("ip", "tc"))):
        return "links are made by ip and tc, which iproute2 has"
    try:
        with links(1, 1000):
            return ""
    except subprocess.CalledProcessError as error:
        return f"links cannot be made: {error.stderr.strip()}"


def called(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def links(ranks: int, mbit: int) -> Iterator[None]:
    """Inside this context there are namespaces on one bridge, each with a link of so many Mbit/s."""
    spaces = [f"{NAME}{rank}" for rank in range(ranks)]
    try:
        called("ip", "link", "add", NAME, "type", "bridge")
        called("ip", "link", "set", NAME, "up")
        for rank, space in enumerate(spaces):
            called("ip", "netns", "add", space)
            called("ip", "link", "add", f"{space}-out", "type", "veth", "peer", "name", "wire", "netns", space)
            called("ip", "link", "set", f"{space}-out", "master", NAME, "up")
            inside = ("ip", "-n", space)
            called(*inside, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "wire")
            called(*inside, "link", "set", "wire", "up")
            called(*inside, "link", "set", "lo", "up")
            bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "500ms")
            called("tc", "-n", space, "qdisc", "add", "dev", "wire", "root", *bucket)
        yield
    finally:
        for space in spaces:  # a namespace takes its end of a link with it, but later
            subprocess.run(("ip", "link", "del", f"{space}-out"), check=False, capture_output=True)
            subprocess.run(("ip", "netns", "del", space), check=False, capture_output=True)
        subprocess.run(("ip", "link", "del", NAME), check=False, capture_output=True)


def on_links(ranks: int, mbit: int, *words: str) -> dict[str, list[float]]:
    """Run this script on ranks; the seconds of the slowest one, by variant and round."""
    command = [sys.executable, __file__, *words]
    with links(ranks, mbit) if mbit else contextlib.nullcontext():
        running = []
        for rank in range(ranks):
            where = ["ip", "netns", "exec", f"{NAME}{rank}"] if mbit else []
            meeting = {"MASTER_ADDR": "10.78.0.1" if mbit else "127.0.0.1", "MASTER_PORT": PORT}
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "wire" if mbit else "lo"}
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            running.append(subprocess.Popen([*where, *command], env={**os.environ, **meeting, **own}, stdout=output))
        said, _ = running[0].communicate()
        if any(process.wait() for process in running):
            sys.exit("a rank failed")
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return found


# -- on a rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stepper:
    """A variant of the step, with its own copy of the parameters, and what predicts its seconds."""

    params: Sequence[Any]
    step: Callable[[], Any]
    predicted: Callable[[], float] | None = None


def steppers(full: Sequence[Tensor], mesh: DeviceMesh, only: Sequence[str]) -> dict[str, Stepper]:
    """The variants of a step that are wanted, from equal parameters."""

    def ours(**options: Any) -> Stepper:
        params = [Parameter(t) for t in shard(full, mesh)]
        optimizer: Any = canzona_compile.wrap(Muon(params, lr=1e-3), **options)
        return Stepper(params, optimizer.step, lambda: optimizer.canzona.report().predicted_seconds)

    def synchronous() -> Stepper:
        """Gathers every gradient, then computes all; whole matrices, as each rank would need them."""
        fragments, whole = shard(full, mesh), [Parameter(t.clone()) for t in full]
        optimizer = Muon(whole, lr=1e-3)

        def step() -> None:
            for fragment, matrix in zip(fragments, whole, strict=True):
                grad: Any = fragment.grad
                matrix.grad = grad.full_tensor()
            optimizer.step()

        return Stepper(fragments, step)

    def dion() -> Stepper:
        from dion import Muon as Theirs  # type: ignore[import-not-found]

        params = [Parameter(t) for t in shard(full, mesh)]
        return Stepper(params, Theirs(params, distributed_mesh=mesh, lr=1e-3).step)

    makers: dict[str, Callable[[], Stepper]] = {DEFAULT: ours, SYNCHRONOUS: synchronous}
    makers |= {f"micro_groups={n}": lambda n=n: ours(micro_groups=n) for n in COUNTS}  # type: ignore[misc]
    makers |= {"assumed": lambda: ours(hardware="assumed"), "replicated": lambda: ours(strategy="replicated")}
    with contextlib.suppress(ImportError):
        import dion as _  # noqa: F401

        makers[DION] = dion
    return {name: make() for name, make in makers.items() if not only or name in only}


def step_times(case: str, rounds: int, only: Sequence[str]) -> dict[str, list[float]]:
    """The seconds of steps on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = [(rows // 2, columns // 2) for rows, columns in CASES[case].shapes]  # a step takes a part of a second
    variants = steppers(random_matrices(shapes, 0), mesh, only)
    grads = shard(random_matrices(shapes, 1), mesh)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):
        for name in turned(list(variants), number):
            for param, grad in zip(variants[name].params, grads, strict=True):
                param.grad = grad
            dist.barrier()
            begin = time.perf_counter()
            variants[name].step()
            if number > 1:
                times[name].append(time.perf_counter() - begin)
    if DEFAULT in variants and (predicted := variants[DEFAULT].predicted) is not None:
        times[PREDICTED] = [predicted()] * rounds
    return times


def iteration_times(rounds: int) -> dict[str, list[float]]:
    """The seconds of iterations on this rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    config, text = ModelConfig(num_layers=4), standard_library()
    variants = {v.name: v for v in iteration_variants.make_variants(Decoder(config), mesh)}
    batches = {name: Batches(text, batch=4, context=config.context, seed=0, part=rank) for name in variants}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, variant in variants.items():
        for _ in range(3):
            iterate(variant, batches[name])
    for number in range(rounds):
        for name in turned(list(variants), number):
            dist.barrier()
            times[name].append(timed(variants[name], batches[name])[0])
    return times


def exchange_times(rounds: int) -> dict[str, list[float]]:
    """The seconds of an all-to-all on this rank, before and after its group goes both ways at once."""
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    sent = torch.zeros(size * EXCHANGED // 4)
    received, sizes = torch.empty_like(sent), [EXCHANGED // 4] * size
    times: dict[str, list[float]] = {}
    for name in ("torch's all-to-all", "both ways at once"):
        own = times[name] = []
        for number in range(rounds + 1):
            dist.barrier()
            begin = time.perf_counter()
            all_to_all(received, sent, sizes, sizes, group).wait()
            if number:
                own.append(time.perf_counter() - begin)
        widen(group, torch.device("cpu"), LARGE)
    return times


def turned(names: Sequence[str], number: int) -> Sequence[str]:
    """The names with another one first in each round."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def on_rank(given: argparse.Namespace) -> None:
    """Measure, and print the seconds of the slowest rank on the first one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    if given.on in ALONE:
        times = {"iteration": iteration_times, "exchange": exchange_times}[given.on](given.rounds)
    else:
        times = step_times(given.on, given.rounds, given.only)
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(dict(zip(times, slowest.tolist(), strict=True))))
    dist.barrier()
    dist.destroy_process_group()


# -- what is shown -------------------------------------------------------------------------------------

Measured = dict[str, Any]  # what was run on how many ranks, the link, and the seconds by variant and round
PANELS = ("even", "iteration")
DRAWN = {  # the names of variants in the picture
    "even": {
        DEFAULT: "ours",
        SYNCHRONOUS: "gather all, each rank computes all",
        DION: "dion",
        "assumed": "rates assumed",
    },
    "iteration": {
        iteration_variants.STEP: "zero1",
        iteration_variants.REPLICATE: "DDP, wrap(replicate=)",
        iteration_variants.PLAIN: "DDP, plain Muon",
        iteration_variants.REDUNDANCY: "DDP, ZeroRedundancyOptimizer",
        iteration_variants.FSDP: "FSDP2, wrap",
    },
}


def measured(given: argparse.Namespace) -> Iterator[Measured]:
    wanted = [*given.cases] if given.what in ("step", "both") else []
    wanted += ["iteration"] if given.what == "both" else [given.what] if given.what in ALONE else []
    for on in wanted:
        for ranks in given.ranks:
            words = ["--on", on, "--rounds", str(given.rounds), *(["--only", *given.only] if given.only else [])]
            for mbit in given.links:
                yield {"on": on, "ranks": ranks, "mbit": mbit, "seconds": on_links(ranks, mbit, *words)}


def milliseconds(own: Measured) -> dict[str, float]:
    return {name: statistics.median(times) * 1e3 for name, times in own["seconds"].items()}


def table(found: Sequence[Measured]) -> Table:
    """Medians of what was run on so many ranks, by variant and link."""
    made = Table("ms, medians", *(str(own["mbit"] or "loopback") for own in found))
    made.title = f"{found[0]['on']}, {found[0]['ranks']} ranks"
    columns = [milliseconds(own) for own in found]
    for name in columns[0]:
        made.add_row(name, *(f"{column[name]:.0f}" for column in columns))
    return made


def draw(found: Sequence[Measured], path: Path) -> None:
    """The time of a step, and of an iteration, against the link, a column for each number of ranks."""
    import matplotlib  # a machine that only runs may lack it

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif"})
    ranks = sorted({own["ranks"] for own in found})
    size = 3.6 * len(ranks) + 1.0, 6.4
    figure, grid = plt.subplots(len(PANELS), len(ranks), figsize=size, squeeze=False, layout="constrained")
    for row, on in zip(grid, PANELS, strict=True):
        for panel, count in zip(row, ranks, strict=True):
            own = sorted(
                (m for m in found if m["mbit"] and (m["on"], m["ranks"]) == (on, count)), key=lambda m: -m["mbit"]
            )
            columns = [milliseconds(m) for m in own]
            for name, label in DRAWN[on].items():
                if columns and name in columns[0]:
                    panel.plot(range(len(own)), [column[name] for column in columns], marker="o", label=label)
            panel.set(title=f"{'step' if on == 'even' else on}, {count} ranks", ylabel="ms", ylim=(0, None))
            panel.set_xticks(range(len(own)), [str(m["mbit"]) for m in own])
            panel.grid(alpha=0.3)
        row[0].legend(fontsize="small")
    for panel in grid[-1]:
        panel.set_xlabel("Mbit/s of a rank's link")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--links", type=int, nargs="*", default=LINKS, help="Mbit/s of a rank; 0 is loopback (default: %(default)s)")
    add("--ranks", type=int, nargs="*", default=RANKS, help="processes (default: %(default)s)")
    add("--cases", nargs="*", default=SHAPES, choices=CASES, help="matrices of the steps (default: %(default)s)")
    add("--what", choices=("step", *ALONE, "both"), default="both")
    add("--only", nargs="*", default=[], help="names of variants of the step (default: all)")
    add("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write all times there")
    add("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing: show the times of such files")
    add("--picture", type=Path, metavar="FILE", help="also draw an SVG")
    add("--on", help=argparse.SUPPRESS)  # what this rank measures
    given = parser.parse_args()
    if given.on:
        on_rank(given)
        return
    if not given.read and any(given.links) and (why := missing()):
        print(f"nothing was measured: {why}")
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not given.read:
        console.print(
            f"{os.cpu_count()} cores of {this_processor()}, torch {torch.__version__}, gloo, one thread a rank"
        )
    found: list[Measured] = []
    read = (own for path in given.read or () for own in json.loads(path.read_text(encoding="utf-8")))
    every = read if given.read else measured(given)
    for _, own in groupby(every, key=lambda own: (own["on"], own["ranks"])):
        found += (group := list(own))
        console.print(table(group))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.picture:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
