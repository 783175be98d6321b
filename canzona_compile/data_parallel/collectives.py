"""The two collectives of a bucket: reduce its gradients to their owners, and gather its parameters from them.

The backend decides how. On NCCL uniform buckets use the collectives of one tensor with equal shards, and uneven ones
the forms for lists, of which NCCL makes one reduction or broadcast per shard. Gloo's reduce-scatter reduces whole
buckets on every rank, and its all-gather is slower than one broadcast per owner (`benchmarks/zero1_transports.py`).
There an all-to-all brings the parts of a shard to its owner, which sums them in the order of ranks. If much is sent, so
that it goes both ways at once (`compat/duplex.py`), another one brings shards to all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.compat.duplex import SECOND, all_to_all
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.program_ops import Watch
from canzona_compile.runtime.held_works import hold
from canzona_compile.runtime.process_groups import over_gloo
from canzona_compile.tensors import storage_of
from canzona_compile.views.view import shares_memory

# Torch 2.13 gave both collectives new names and warns of the old ones.
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Buckets that are reduced, or gathered, at once. A bucket that gloo reduces counts as two, because an all-to-all
# receives as many bytes as it sends. More do not help: simulated iterations of Qwen3-1.7B on dp=64 take as long with 4,
# 8 and 16, whether the network or the processors are the bottleneck.
IN_FLIGHT = 2
MOST_REPEATED = 1.25  # of a bucket: what one owner may send. Others forward a broadcast, so it suits larger shards
BROKEN = "look at the output of the other ranks. Shards of gradients and parameters are lost: restart from a checkpoint"


@dataclass(frozen=True, slots=True)
class DataParallelGroup:
    """The ranks over which gradients are reduced.

    Attributes:
        shard: the process group whose ranks own parts of each bucket; None if this rank is alone.
        replicate: the process group over which the shards are summed as well; None if there is one replica.
    """

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    rank: int
    size: int
    replicas: int


@dataclass(slots=True)
class Pending:
    """A collective under way, or several of one bucket.

    Attributes:
        result: after `complete`, this rank's shard if the collective reduces, the whole bucket if it gathers. A shard
            may be a part of `sent`.
        sent: the bucket that the collective reads. Its memory goes to a later bucket afterwards. None if it has none to
            give.
        summing: the sum of the result over replicas, which follows `works`; None if that was not started.
        parts: over gloo, what every rank sent of this rank's shard, [ranks, length]; None if the collective itself
            sums. `complete` writes their sum over `sent`, which is not needed any more, and frees them.
    """

    bucket: Bucket
    result: Tensor
    works: tuple[dist.Work, ...] = ()
    sent: Tensor | None = None
    parts: Tensor | None = None
    summing: dist.Work | None = None

    @property
    def memory_in_buckets(self) -> int:
        """How many buckets fit into its memory."""
        return 1 if self.parts is None else 2

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [tensor for tensor in (self.result, self.sent, self.parts) if tensor is not None]

    @property
    def result_is_in_sent(self) -> bool:
        """Whether the result is a part of `sent`, so that it must be copied before `sent` is given back."""
        return self.sent is not None and shares_memory(self.result, self.sent)

    def complete(self) -> Tensor:
        """Finish after all works are done: sum the parts and free them. Return the result."""
        if self.parts is not None:
            torch.add(self.parts[0], self.parts[1], out=self.result)
            for part in self.parts[2:]:  # one after the other, so that the sum has the bits of this order everywhere
                self.result.add_(part)
            self.parts = None
        return self.result


class BucketMemory:
    """Memory for whole buckets, which later ones take over.

    On the CPU memory of this size comes fresh from the system, page by page, and the pages cost as much time as a
    collective. For CUDA, torch's allocator does the same as this.

    Args:
        largest: bytes of the largest bucket. Others get that, or a half, a quarter, ... of it, so that those of nearly
            equal sizes serve one another, and none of them gets more than twice what it needs.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)  # by bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no bucket has now."""
        return sum(size * len(free) for size, free in self._free.items())

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory without values, [length]."""
        needed = length * dtype.itemsize
        if device.type != "cpu" or not needed:
            return torch.empty(length, dtype=dtype, device=device)
        size = max(self._largest, needed)
        while size >= 2 * needed:
            size = -(-size // 2)
        free = self._free[size]
        storage = free.pop() if free else torch.UntypedStorage(size, device="cpu")
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (length,), (1,))

    def give_back(self, memory: Tensor) -> None:
        """Let later buckets have memory that `take` returned and whose values nobody needs."""
        if memory.device.type == "cpu" and len(memory):
            storage = memory.untyped_storage()
            self._free[storage.nbytes()].append(storage)


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors, of which some may share theirs."""
    return sum({storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def reduce(group: DataParallelGroup, bucket: Bucket, filled: Tensor) -> Pending:
    """Start to sum a bucket over all ranks, each shard on its owner.

    `filled` has its gradients on this rank, [bucket.starts[-1]], in the dtype of the wire.
    """
    length = bucket.shard_lengths[group.rank]
    if group.shard is None or group.size == 1 or not len(filled):
        return Pending(bucket, filled, sent=filled)
    gloo = over_gloo(filled.device, group.shard)
    if gloo:
        parts = filled.new_empty(group.size, length)
        own, sent = [length] * group.size, list(bucket.shard_lengths)
        work = all_to_all(parts.view(-1), filled, own, sent, group.shard)
        return Pending(bucket, filled[:length], under_way(gloo, work), filled, parts)
    shard = filled.new_empty(length)
    if bucket.uniform:
        work = REDUCE_SCATTER(shard, filled, group=group.shard, async_op=True)
    else:
        work = dist.reduce_scatter(shard, shards_of(bucket, filled), group=group.shard, async_op=True)
    return Pending(bucket, shard, under_way(gloo, work), filled)


def sum_replicas(group: dist.ProcessGroup, pending: Pending) -> None:
    """Start to sum a shard over replicas behind its reduction, for which the current stream waits."""
    for work in pending.works:
        work.wait()
    pending.summing = dist.all_reduce(pending.result, group=group, async_op=True)


def gather(group: DataParallelGroup, bucket: Bucket, whole: Tensor) -> Pending:
    """Start to gather the shards of all owners on every rank.

    `whole` is memory for the bucket, [bucket.starts[-1]], in which this rank's own shard has its values.
    """
    if group.shard is None or not len(whole):
        return Pending(bucket, whole)
    shards = shards_of(bucket, whole)
    gloo = over_gloo(whole.device, group.shard)
    works: list[dist.Work | None]
    own = shards[group.rank]
    if gloo and group.shard in SECOND and max(map(len, shards)) * group.size <= MOST_REPEATED * len(whole):
        sent = own.repeat(group.size)
        sizes = [len(shard) for shard in shards], [len(own)] * group.size
        return Pending(bucket, whole, under_way(gloo, all_to_all(whole, sent, *sizes, group.shard)), sent)
    if gloo:
        ranks = dist.get_process_group_ranks(group.shard)
        works = [
            dist.broadcast(part, source, group=group.shard, async_op=True)
            for part, source in zip(shards, ranks, strict=True)
            if len(part)
        ]
    elif bucket.uniform:
        works = [ALL_GATHER(whole, shards[group.rank], group=group.shard, async_op=True)]
    else:
        works = [dist.all_gather(shards, shards[group.rank], group=group.shard, async_op=True)]
    return Pending(bucket, whole, under_way(gloo, *works))


def under_way(gloo: bool, *works: dist.Work | None) -> tuple[dist.Work, ...]:
    """The collectives that were started and are not done. Gloo's threads do not let go of them last."""
    found = tuple(work for work in works if work is not None)
    for work in found if gloo else ():
        hold(work)
    return found


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others of the same shapes, with one launch for all of them."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def clear_all(targets: Sequence[Tensor]) -> None:
    """Fill tensors with zeros, with one launch for all of them."""
    if targets:
        torch._foreach_zero_(list(targets))


def shards_of(bucket: Bucket, whole: Tensor) -> list[Tensor]:
    """The shards of a whole bucket, as views, by owner."""
    return list(torch.split(whole, list(bucket.shard_lengths)))


def all_reduce(values: Tensor, op: Any, groups: Iterable[dist.ProcessGroup | None], watch: Watch) -> None:
    """Reduce values in place over one process group after the other, leaving out None. This is a collective."""
    for own in groups:
        if own is not None:
            work = dist.all_reduce(values, op, group=own, async_op=True)
            assert work is not None
            watch.wait(work)


def largest(group: DataParallelGroup, values: Tensor, watch: Watch) -> Tensor:
    """Replace values by their elementwise maximum over all ranks of both process groups. This is a collective."""
    all_reduce(values, dist.ReduceOp.MAX, (group.shard, group.replicate), watch)
    return values


def send(group: DataParallelGroup, values: Tensor, owner: int, watch: Watch) -> None:
    """Replace values by those of one owner, on every rank. This is a collective."""
    if group.shard is not None:
        source = dist.get_process_group_ranks(group.shard)[owner]
        work = dist.broadcast(values, source, group=group.shard, async_op=True)
        assert work is not None
        watch.wait(work)
