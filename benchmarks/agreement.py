"""How long ranks take to find out that they do the same: one all-reduce of gloo, or one by rows and one by columns.

    python benchmarks/agreement.py --ranks 8,16,32,64

Both compare one digest of 8 bytes. Gloo's all-reduce is a ring, 2 (n - 1) hops one after the other. If ranks form a
rectangle, and first each row and then each column reduces, there are 2 (rows - 1) + 2 (columns - 1) hops and a second
start. Each round of the benchmark runs each way once, on all ranks, after a barrier. The figures are medians and 99th
percentiles over rounds of the slowest rank. Ranks share the cores of this machine, so that from as many ranks as cores
on, a hop is mostly a change of processes: the model beside them divides the medians by the hops, and gives both ways
the same hop on other numbers of ranks.

Dissemination (log2 n rounds of one message to one rank) has fewer hops, but gloo closes the connections of a message
that is waited for in vain: a rank could not stop every second to hear that another one has failed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from canzona_compile.compat.torch_private import AllreduceOptions, PrefixStore, host_group
from canzona_compile.machine.hardware import this_processor
from canzona_compile.runtime import channel

ONCE, TWICE = "all-reduce", "rows and columns"
THOUSAND = 1024  # ranks of the model


def main() -> None:
    """Measure on ranks of this machine and print a line for each number of ranks, and the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32,64", help="numbers of processes (default: %(default)s)")
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
    channel.MANY = 4
    ways: dict[str, Callable[[], object]] = {}
    for name, sets in {ONCE: [tuple(range(ranks))], TWICE: channel.stages(tuple(range(ranks)), rank)}.items():
        stores = [PrefixStore(f"{name}/{stage}/{own[0]}", base) for stage, own in enumerate(sets)]
        groups = [host_group(at, own, rank, timedelta(seconds=60)) for at, own in zip(stores, sets, strict=True)]
        ways[name] = partial(reduced, groups)
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
            many = middle / hops(name, ranks) * hops(name, THOUSAND)
            print(f"{ranks:4} ranks  {name:16} {middle:9.0f} / {late:9.0f}   for {THOUSAND} ranks {many / 1e3:8.1f} ms")
    dist.barrier()
    dist.destroy_process_group()


def hops(way: str, ranks: int) -> float:
    """How many messages follow one another; a start counts as two."""
    sizes = [ranks] if way == ONCE else map(len, channel.stages(tuple(range(ranks)), 0))
    return sum(2 * (size - 1) + 2 for size in sizes)


def reduced(groups: Sequence[dist.ProcessGroup]) -> bool:
    """Compare a digest by all-reduces of its largest and smallest value."""
    values, options = torch.tensor([7, -7]), AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    for group in groups:
        group.allreduce([values], options).wait()
    largest, smallest = values.tolist()
    return bool(largest == -smallest)


if __name__ == "__main__":
    main()
