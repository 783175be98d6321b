"""How long ranks take to find out that they do the same: an all-reduce of gloo beside dissemination.

    python benchmarks/agreement.py --ranks 2,4,8,16,32,64

Both compare one digest of 8 bytes. Gloo's all-reduce is a ring, 2 (n - 1) hops one after the other. Dissemination takes
log2 n rounds: in round k a rank sends the largest and the smallest digest that it knows to the rank 2^k further on, and
receives those of the rank 2^k before it. Each round of the benchmark runs each way once, on all ranks, after a barrier.
The figures are medians and 99th percentiles over rounds of the slowest rank. Ranks share the cores of this machine, so
that from as many ranks as cores on, a hop is mostly a change of processes: the model below the table divides the
medians by the hops, and gives both ways the same hop on other numbers of ranks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from canzona_compile.compat.torch_private import AllreduceOptions, PrefixStore, host_group
from canzona_compile.tools.processor import this_processor

MANY = 1024  # ranks of the model


def main() -> None:
    """Measure on ranks of this machine and print a line for each number of ranks, and the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="(default: %(default)s)")
    given = parser.parse_args()
    print(f"{this_processor()}; microseconds, median / 99th percentile of {given.rounds} rounds")
    for ranks in map(int, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (ranks, given.rounds, str(Path(folder) / "store")), ranks)


def measure(rank: int, ranks: int, rounds: int, store: str) -> None:
    """Be one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    base = PrefixStore("own", dist.distributed_c10d._get_default_store())
    group = host_group(base, range(ranks), rank, timedelta(seconds=60))
    ways: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: reduced(group),
        "dissemination": lambda: disseminated(group, rank, ranks),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            way()
            slowest = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest) * 1e6)
    if rank == 0:
        for name, found in times.items():
            middle, late = statistics.median(found), statistics.quantiles(found, n=100)[98]
            many = middle / hops(name, ranks) * hops(name, MANY)
            print(f"{ranks:4} ranks  {name:13} {middle:9.0f} / {late:9.0f}   for {MANY} ranks {many / 1e3:8.1f} ms")
    dist.barrier()
    dist.destroy_process_group()


def hops(way: str, ranks: int) -> int:
    """How many messages follow one another."""
    return 2 * (ranks - 1) if way == "all-reduce" else math.ceil(math.log2(ranks))


def reduced(group: dist.ProcessGroup) -> bool:
    """Compare a digest by an all-reduce of its largest and smallest value."""
    values, options = torch.tensor([7, -7]), AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    group.allreduce([values], options).wait()
    largest, smallest = values.tolist()
    return bool(largest == -smallest)


def disseminated(group: dist.ProcessGroup, rank: int, ranks: int) -> bool:
    """Compare a digest in rounds of one message to one rank."""
    known, step = torch.tensor([7, -7]), 1
    while step < ranks:
        heard = torch.empty_like(known)
        works = group.send([known], (rank + step) % ranks, step), group.recv([heard], (rank - step) % ranks, step)
        for work in works:
            work.wait()
        known, step = torch.maximum(known, heard), 2 * step
    largest, smallest = known.tolist()
    return bool(largest == -smallest)


if __name__ == "__main__":
    main()
