"""Trainings under ZeRO-1 on the stand-in: the bits of the plain optimizer, in any order of the device's work."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from canzona_compile.data_parallel import collectives
from canzona_compile.data_parallel.reduction import Reduction
from canzona_compile.ir.bucket import Bucket
from tests.fake_cuda.communicators import DeviceWork
from tests.fake_cuda.device import current_device
from tests.fake_cuda.scheduler import DeviceError
from tests.fake_cuda.zero1_trainings import (
    CUT,
    UNEVEN,
    RankResult,
    Script,
    different,
    distance,
    of_ranks,
    plain_training,
    run_script,
)
from tests.harness.marks import also, first

SMALL = {"bucket_bytes": 2048}
FORWARD = SMALL | {"gather": "forward"}
SCRIPTS: dict[str, Script] = {
    "gathered by modules, on a stream beside": Script(options=FORWARD, side=True),
    "uneven, clipped, accumulated": Script("chain", UNEVEN, clip=1.0, accumulate=2, options=SMALL, rates={3: 0.02}),
    "replicas": Script(world=4, replicas=2, clip=1.0, options=FORWARD),
    "replicas of one rank": Script(world=2, replicas=2),
    "missing gradients": Script(options=FORWARD, missing={2: {0: ("b",)}, 3: {0: ("b",), 1: ("b",)}}, side=True),
    "gathered by step, on a stream beside": Script(options=SMALL, side=True, accumulate=2),
    "a table that is cut": Script("chain", CUT, clip=1.0, side=True, options={"bucket_bytes": 2**17}),
    "a bucket per parameter": Script("chain", UNEVEN, options={"bucket_bytes": 1, "gather": "forward"}),
    "rows on other ranks": Script("chain", world=4, tp=2, clip=1.0, side=True, options=FORWARD),
    "bfloat16 that travels as float32": Script(
        world=4,
        shapes=UNEVEN,
        clip=0.5,
        rates={2: 0.02},
        dtype=torch.bfloat16,
        options=SMALL | {"reduce_dtype": torch.float32},
    ),
}


@cache
def right(name: str) -> list[RankResult]:
    """What a training has to give in any order: what it gives when each piece of work is done at once.

    These are the plain optimizer's bits. Only the norm of a table that is cut is summed in another order, and rounds
    otherwise; so does all that is scaled by it.
    """
    script = SCRIPTS[name]
    plain, prompt = of_ranks(script, plain_training(script)), run_script(script, None)
    if script.shapes is CUT and script.clip is not None:
        assert distance(prompt, plain) <= 2**-20
        assert different(prompt, [prompt[0]] * script.world) == []
    else:
        assert different(prompt, plain) == []
    return prompt


@pytest.mark.parametrize("name", first(SCRIPTS, 4))
@pytest.mark.parametrize("seeds", [range(1), *also([range(1, 4)])], ids=str)
def test_bits_of_the_plain_optimizer(name: str, seeds: range) -> None:
    script = SCRIPTS[name]
    for seed in seeds:
        results = run_script(script, seed)
        assert different(results, right(name)) == []
        for result in results:  # also where a gradient is missing
            assert result.waits == [(0, 0)] * script.steps


def test_backward_does_not_wait_for_replicas() -> None:
    """Its stream waits for the sums over replicas once all buckets have started, not for each of them before."""
    script, early = Script("adamw", world=4, replicas=2, steps=2, options=SMALL), []
    callers: dict[int, Any] = {}  # by device, the stream of backward while it starts a bucket
    start, wait = Reduction._start, DeviceWork.wait

    def starting(own: Reduction, bucket: Bucket) -> None:
        callers[current_device().index] = current_device().current
        start(own, bucket)
        del callers[current_device().index]

    def waited(work: DeviceWork, *_: Any) -> bool:
        if "all_reduce" in work.item.name and current_device().current is callers.get(current_device().index):
            early.append(work.item.name)
        return wait(work)

    with mock.patch.object(Reduction, "_start", starting), mock.patch.object(DeviceWork, "wait", waited):
        results = run_script(script, 0)
    assert different(results, of_ranks(script, plain_training(script))) == []
    assert early == []


def test_elementwise_updates_have_the_bits_of_the_plain_optimizer() -> None:
    script = Script("adamw", options=FORWARD, clip=1.0, accumulate=2, side=True)
    results = run_script(script, 0)
    assert different(results, of_ranks(script, plain_training(script))) == []


def test_buckets_are_of_both_kinds() -> None:
    assert set(right("uneven, clipped, accumulated")[0].kinds) == {False}
    assert set(right("gathered by modules, on a stream beside")[0].kinds) == {True}


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_many_orders(name: str) -> None:
    """Twenty-five orders of each training, 225 in all."""
    bad: list[str] = []
    for seed in range(1000, 1025):
        try:
            bad += [f"seed {seed}: {what}" for what in different(run_script(SCRIPTS[name], seed), right(name))]
        except (Exception, DeviceError) as error:  # whatever the stand-in says
            bad.append(f"seed {seed}: {error!r}")
    assert bad == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_steady_step_waits_for_nothing_and_launches_no_more_for_more_parameters(dtype: torch.dtype) -> None:
    """What ZeRO-1 does in backward, in clipping and around a step is by bucket, not by parameter."""
    found = []
    for count in (2, 6):
        shapes = {f"m{i}": {"weight": (16, 8)} for i in range(count)} | {f"n{i}": {"norm": (24,)} for i in range(count)}
        script = Script("chain", shapes, clip=1.0, options={"gather": "forward"}, steps=4, dtype=dtype)
        results = run_script(script, None)
        for result in results:
            assert result.waits == [(0, 0)] * script.steps
            assert result.calls[-1] == Counter(stream=1)  # of the training itself
        backward, clip, _ = results[0].launches
        found.append((backward - Counter(add=2 * count, mul=2 * count), clip))  # the model's own work
    assert found[0] == found[1]


def test_gloo_between_devices() -> None:
    """Where gloo moves tensors of devices, owners sum what an all-to-all brings, and send what they updated."""
    script = Script("chain", UNEVEN, clip=1.0, side=True, options=FORWARD)
    with mock.patch.object(collectives, "over_gloo", return_value=True):
        results = run_script(script, 0)
    assert different(results, of_ranks(script, plain_training(script))) == []


def test_whole_gradients_are_sent_between_devices() -> None:
    script = Script("adamw", UNEVEN, steps=2, reads=True, options=SMALL)
    results = run_script(script, 0)
    assert different(results, of_ranks(script, plain_training(script))) == []
