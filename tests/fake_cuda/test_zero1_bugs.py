"""Mistakes in ZeRO-1's order of streams, in its memory, among ranks, or on the host do not pass the stand-in.

Each test makes one mistake in the code of ZeRO-1 and looks for a seed that shows it. A host that waits shows in every
order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from canzona_compile.data_parallel import collectives, gathering, norms, reduction
from canzona_compile.data_parallel.engine import Zero1
from canzona_compile.data_parallel.gathering import ForwardHooks, Gathering
from canzona_compile.data_parallel.reduction import Reduction
from canzona_compile.ir.bucket import Bucket
from canzona_compile.runtime.waiter import Waiter
from tests.fake_cuda.device import current_device
from tests.fake_cuda.model_on_device import plain_of
from tests.fake_cuda.scheduler import DeviceError
from tests.fake_cuda.zero1_trainings import UNEVEN, RankResult, Script, different, run_script
from tests.harness.marks import first

SEEDS = range(50)
Mistake = Callable[[], contextlib.AbstractContextManager[Any]]
STEP: dict[str, Any] = {"bucket_bytes": 2048}
FORWARD = STEP | {"gather": "forward"}
STEPS = 3
SCRIPTS = {
    "plain": Script("adamw", steps=STEPS, options=STEP),
    "many": Script("adamw", steps=STEPS, options={"bucket_bytes": 1}),
    "hooked": Script("adamw", steps=STEPS, options=FORWARD),
    "side": Script("adamw", steps=STEPS, options=FORWARD, side=True),
    "lists": Script("two", UNEVEN, steps=STEPS, options=STEP),
    "replicas": Script("adamw", world=4, replicas=2, steps=STEPS, options=STEP),
    "clipped": Script("adamw", steps=STEPS, options=STEP, clip=1.0),
}


@cache
def right(key: str) -> list[RankResult]:
    return run_script(SCRIPTS[key], None)


def showing(key: str) -> int | None:
    """The first seed that shows a mistake; None if no seed does."""
    for seed in SEEDS:
        try:
            found = run_script(SCRIPTS[key], seed)
        except (Exception, DeviceError):  # whatever the stand-in says
            return seed
        if different(found, right(key)):
            return seed
    return None


def replaced(owner: Any, name: str, value: Any) -> Mistake:
    return lambda: mock.patch.object(owner, name, value)


class NoWaiter(Waiter):
    """Waits for nothing."""

    def wait(self, work: dist.Work, meanwhile: Callable[[], None] | None = None) -> None:
        pass


def taken_early(own: Reduction, pending: collectives.Pending) -> None:
    """Keep what is in a shard before its reduction is waited for."""
    early = pending.result.clone()
    take(own, pending)
    own._shards[pending.bucket.index] = early.to(pending.bucket.dtype)


def used_again(own: Reduction, bucket: Bucket) -> Tensor:
    """Fill the memory of the bucket before, which its reduction may still read."""
    filled = fill(own, bucket)
    last = vars(own).setdefault("_last", filled)
    if len(last) != len(filled):
        own._last = last = filled  # type: ignore[attr-defined]
    return last if last is filled else last.copy_(filled)


def on_side(waits: Callable[[Gathering], bool]) -> Callable[[Gathering], None]:
    """Start gathers on a stream of their own, which waits for the caller's at some of them only."""

    def start(own: Gathering) -> None:
        device = current_device()
        caller = device.current
        if not hasattr(own, "_side"):
            own._side = torch.cuda.Stream(device.index)  # type: ignore[attr-defined]
        side = own._side
        if waits(own):
            side.wait_stream(caller)
        with torch.cuda.stream(side):
            begin(own)
        caller.wait_stream(side)

    return start


@contextlib.contextmanager
def reduced_beside() -> Iterator[None]:
    """Reduce buckets on a stream beside that of backward. Nothing keeps the memory of gradients until it is done."""

    def side_of(own: Reduction) -> Any:
        if not hasattr(own, "_side"):
            own._side = torch.cuda.Stream(current_device().index)  # type: ignore[attr-defined]
        return own._side

    def started(own: Reduction, bucket: Bucket) -> None:
        side_of(own).wait_stream(current_device().current)
        with torch.cuda.stream(side_of(own)):
            start_one(own, bucket)

    def joined(own: Reduction) -> frozenset[str]:
        current_device().current.wait_stream(side_of(own))
        return look_at_others(own)

    with mock.patch.object(Reduction, "_start", started), mock.patch.object(Reduction, "_exchange", joined):
        yield


def shards_let_go(own: Reduction) -> None:
    """Hand out gradients that do not hold the memory that they lie in."""
    own._shards.update({index: plain_of(shard) for index, shard in own._shards.items()})
    hand_out(own)


def not_waited_for(values: Tensor, op: Any, groups: Any, watch: Any) -> None:
    for own in groups:
        if own is not None:
            dist.all_reduce(values, op, group=own, async_op=True)


def summed_for_nobody(group: dist.ProcessGroup, pending: collectives.Pending) -> None:
    """Sum shards over replicas, and take them for summed."""
    collectives.sum_replicas(group, pending)
    pending.summing = mock.Mock(spec=dist.Work)


def summed_early(group: dist.ProcessGroup, pending: collectives.Pending) -> None:
    """Sum shards over replicas without waiting for their reduction."""
    works, pending.works = pending.works, ()
    collectives.sum_replicas(group, pending)
    pending.works = works


def gathered_backwards(own: Gathering, buckets: Iterable[Bucket]) -> None:
    """Gather in another order on one rank."""
    own.unsettled = True
    own._waiting.extend(sorted(buckets, key=lambda bucket: bucket.index, reverse=dist.get_rank() == 0))


take, fill, begin, hand_out = Reduction._take, Reduction._filled, Gathering.start, Reduction._hand_out
start_one, look_at_others = Reduction._start, Reduction._exchange
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "reductions are not waited for": ("plain", replaced(reduction, "Waiter", NoWaiter)),
    "a shard is read early": ("plain", replaced(Reduction, "_take", taken_early)),
    "a bucket is filled while it is reduced": ("plain", replaced(Reduction, "_filled", used_again)),
    "gradients are freed while they are copied": ("plain", reduced_beside),
    "shards are let go": ("plain", replaced(Reduction, "_hand_out", shards_let_go)),
    "gathers are not waited for": ("hooked", replaced(gathering, "Waiter", NoWaiter)),
    "modules do not wait": ("side", replaced(ForwardHooks, "_before", lambda own, names: own._called.update(names))),
    "parameters are sent before the step": ("plain", replaced(Gathering, "start", on_side(lambda _: False))),
    # The first ones wait for the step. Later ones may lie in memory of earlier ones that is still copied from.
    "nothing keeps the memory of gathers": (
        "many",
        replaced(Gathering, "start", on_side(lambda own: not own._pending)),
    ),
    "gathers come in another order": ("plain", replaced(Gathering, "queue", gathered_backwards)),
    "lists are not waited for": ("lists", replaced(reduction, "Waiter", NoWaiter)),
    "lists are gathered and not waited for": ("lists", replaced(gathering, "Waiter", NoWaiter)),
    "sums of replicas are not waited for": ("replicas", replaced(reduction, "sum_replicas", summed_for_nobody)),
    "replicas are summed before their shards are": ("replicas", replaced(reduction, "sum_replicas", summed_early)),
    "norms are not waited for": ("clipped", replaced(norms, "all_reduce", not_waited_for)),
}


@pytest.mark.parametrize("mistake", first(MISTAKES, 8))
def test_mistakes_are_found(mistake: str) -> None:
    key, patch = MISTAKES[mistake]
    right(key)
    with patch():
        assert showing(key) is not None


# -- a host that waits -----------------------------------------------------------------------------


def looking(own: Reduction) -> frozenset[str]:
    """Read on the host which gradients other ranks have, whether or not one is missing here."""
    device = next(iter(own.fragments.values())).param.device
    flags = torch.ones(len(own.fragments), dtype=torch.uint8, device=device)
    collectives.largest(own.group, flags, own.waiter)
    return frozenset(name for name, held in zip(own.fragments, flags.tolist(), strict=True) if held)


def sending(own: Reduction) -> frozenset[str]:
    """Make a tensor on the device of a list, for which the host waits as the list is copied."""
    device = next(iter(own.fragments.values())).param.device
    flags = torch.tensor([1] * len(own.fragments), dtype=torch.uint8, device=device)
    collectives.largest(own.group, flags, own.waiter)
    return frozenset(own.fragments)


def finite(own: Zero1, *arguments: Any, **options: Any) -> Tensor:
    norm = clip(own, *arguments, **options)
    assert bool(norm.isfinite())
    return norm


def synchronized(own: Gathering) -> None:
    current_device().current.synchronize()
    begin(own)


clip = Zero1.clip_grad_norm_
WAITS: dict[str, Mistake] = {
    "the host reads at the end of backward": replaced(Reduction, "_exchange", looking),
    "the host sends at the end of backward": replaced(Reduction, "_exchange", sending),
    "the host looks at norms": replaced(Zero1, "clip_grad_norm_", finite),
    "the host waits for a stream": replaced(Gathering, "start", synchronized),
}


def waits() -> list[tuple[int, int]]:
    return [own for result in run_script(SCRIPTS["clipped"], None) for own in result.waits]


@pytest.mark.parametrize("mistake", first(WAITS, 2))
def test_hosts_that_wait_are_found(mistake: str) -> None:
    assert not any(map(any, waits()))
    with WAITS[mistake]():
        found = waits()
    place = 0 if "backward" in mistake else 1
    assert all(own[place] > 0 for own in found)


def test_right_code_passes() -> None:
    for key in ("side", "lists"):
        for seed in range(2):
            assert different(run_script(SCRIPTS[key], seed), right(key)) == []
