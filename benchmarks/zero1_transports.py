"""Which collectives move a bucket of ZeRO-1 fastest over gloo: those of one tensor, of lists, or all-to-all.

    python benchmarks/zero1_transports.py --ranks 4
    python benchmarks/zero1_transports.py --ranks 8 --elements 6553600

Each round runs every way once, one after the other, on all ranks, one thread each. The figures are medians over rounds
of the slowest rank, in milliseconds. `canzona_compile/data_parallel/collectives.py` takes the fastest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from canzona_compile.data_parallel.collectives import ALL_GATHER, REDUCE_SCATTER
from canzona_compile.machine.hardware import this_processor

Way = Callable[[], object]


def main() -> None:
    """Measure on ranks of this machine and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=3 * 2**20, help="float32 of a bucket (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (given.ranks, given.elements, given.rounds, str(Path(folder) / "store")), given.ranks)


def measure(rank: int, ranks: int, elements: int, rounds: int, store: str) -> None:
    """Be one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    length = elements // ranks
    ways = ways_of(torch.randn(length * ranks), torch.randn(length))
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            way()
            slowest = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest) * 1e3)
    if rank == 0:
        print(f"{ranks} ranks, {length * ranks:,} float32, {rounds} rounds; {this_processor()}")
        for name, found in times.items():
            print(f"{statistics.median(found):8.1f} ms  {name}")
    dist.destroy_process_group()


def ways_of(whole: Tensor, shard: Tensor) -> Mapping[str, Way]:
    """All ways by name.

    Args:
        whole: a bucket, float32 [ranks * n].
        shard: this rank's part of it, [n].
    """
    ranks, length = dist.get_world_size(), len(shard)
    parts, received = list(whole.split(length)), torch.empty(ranks, length)

    def exchanged_sum() -> None:
        dist.all_to_all_single(received.view(-1), whole)
        torch.add(received[0], received[-1], out=shard)
        for part in received[1:-1]:
            shard.add_(part)

    def broadcasts() -> None:
        works = [dist.broadcast(part, i, async_op=True) for i, part in enumerate(parts)]
        for work in works:
            assert work is not None
            work.wait()

    return {
        "reduce: all_reduce of the bucket": lambda: dist.all_reduce(whole.clone()),
        "reduce: reduce_scatter of one tensor": lambda: REDUCE_SCATTER(shard, whole),
        "reduce: reduce_scatter of a list": lambda: dist.reduce_scatter(shard, parts),
        "reduce: all_to_all and a local sum": exchanged_sum,
        "gather: all_gather of one tensor": lambda: ALL_GATHER(whole, shard),
        "gather: all_gather of a list": lambda: dist.all_gather(parts, shard),
        "gather: all_to_all of repeated shards": lambda: dist.all_to_all_single(whole, shard.repeat(ranks)),
        "gather: a broadcast for each owner": broadcasts,
    }


if __name__ == "__main__":
    main()
