"""Recordings on the stand-in: pools, scratch memory of libraries, and recordings that fail."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from canzona_compile.lowering.stream_sync import CALLER, PACK
from canzona_compile.runtime import graph_recorder
from canzona_compile.runtime.graph_recorder import GraphRecorder, clean_up, pool_of
from canzona_compile.runtime.streams import stream_named
from tests.fake_cuda.device import current_device, use_device
from tests.fake_cuda.on_device import look, on_stand_in
from tests.fake_cuda.tensors import adopted, plainly, programs_run_here

CUDA = torch.device("cuda", 0)


def on_device(work: Callable[[], Any], seed: int = 0) -> Any:
    """Run some work on a stand-in of one rank."""

    def of_rank(rank: int) -> Any:
        with programs_run_here(), torch.no_grad():
            return work()

    with on_stand_in(seed, 1) as run:
        return run(of_rank)[0]


def ones(*shape: int) -> torch.Tensor:
    """A tensor on the host."""
    with plainly():
        return torch.ones(shape)


def test_a_recording_outlives_others() -> None:
    """Dropping one frees the scratch memory of the stream that it was begun on. Products must not use that one."""

    def work() -> None:
        home = ones(4, 4)
        value, recorder = adopted(home), GraphRecorder(CUDA)

        def product() -> None:
            value.copy_(torch.mm(value, value) / 4)

        product()
        one, other = (recorder.record(product, CALLER) for _ in range(2))
        one()
        del one
        gc.collect()
        other()
        look()
        assert home.tolist() == [[1.0] * 4] * 4

    on_device(work)


@pytest.mark.parametrize("seed", range(8))
def test_scratch_memory_is_taken_in_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches that the caller has launched may use it still, and the next ones may use it at once."""
    done: list[str] = []

    def put(name: str) -> None:
        current_device().put(name, lambda: done.append(name))

    def work() -> None:
        put("before")
        GraphRecorder(CUDA).record(lambda: None, CALLER)
        put("after")
        look()

    monkeypatch.setattr(graph_recorder, "keep_scratch", lambda device: put("scratch"))
    on_device(work, seed)
    assert done == ["before", "scratch", "after"]


def test_recordings_take_memory_that_was_cached() -> None:
    """A device that is full of what other streams cached has room for one; so it has once some more was given back."""

    def work() -> None:
        home = ones(64)
        value, recorder, device = adopted(home), GraphRecorder(CUDA), current_device()
        recorder.record(lambda: None, CALLER)  # takes scratch memory
        other = stream_named("other", 0)
        with torch.cuda.stream(other):
            torch.empty(4096)  # and gives it back
        assert device.cached[other.queue]
        device.capacity = device.held + device.cached.total()

        def add() -> None:
            value.copy_(value + 1)

        replay = recorder.record(add, CALLER)
        assert not device.cached[other.queue]
        device.failures = [torch.OutOfMemoryError()]
        again = recorder.record(add, CALLER)
        device.failures = [torch.OutOfMemoryError()] * 2
        with pytest.raises(torch.OutOfMemoryError):
            recorder.record(add, CALLER)
        replay()
        again()
        look()
        assert home.tolist() == [3.0] * 64

    on_device(work)


def test_threads_record_apart() -> None:
    """What another thread launches meanwhile on streams of the same names runs, and is not recorded."""

    def work() -> None:
        homes = ones(4), ones(4)
        device, (mine, theirs) = current_device(), map(adopted, homes)
        pools = [pool_of(0)]

        def launches() -> None:
            use_device(device)
            with programs_run_here(), torch.no_grad(), torch.cuda.stream(stream_named(PACK, 0)):
                theirs.add_(1)
            pools.append(pool_of(0))

        def run() -> None:
            mine.add_(1)
            other = threading.Thread(target=launches)
            other.start()
            other.join()

        replay = GraphRecorder(CUDA).record(run, PACK)
        for _ in range(2):
            replay()
        torch.cuda.synchronize()
        look()
        assert [home.tolist() for home in homes] == [[3.0] * 4, [2.0] * 4]
        assert pools[0] is not pools[1]

    on_device(work)


def test_nothing_is_collected_while_recording() -> None:
    """Garbage may hold CUDA graphs and events, and their end is not permitted then."""
    seen: list[bool] = []

    def work() -> None:
        recorder = GraphRecorder(CUDA)
        with contextlib.suppress(ZeroDivisionError):
            recorder.record(lambda: seen.append(gc.isenabled() or bool(1 / 0)), CALLER)
        seen.append(gc.isenabled())

    on_device(work)
    assert seen == [True]


def test_recordings_after_the_last_one_was_dropped() -> None:
    """Torch cannot use their pool again: as after `load_state_dict`, or a new plan."""

    def work() -> None:
        home = ones(4)
        value, recorder = adopted(home), GraphRecorder(CUDA)
        for _ in range(3):
            first, second = (recorder.record(lambda: value.add_(1), CALLER) for _ in range(2))
            assert first.pool is second.pool is pool_of(0)
            first()
            del first, second
            gc.collect()
        look()
        assert home.tolist() == [4.0] * 4

    on_device(work)


def test_a_recording_that_fails_leaves_the_device_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream is the caller's, nothing was executed, and what ended it is what is raised."""
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", raising, raising=False)

    def work() -> None:
        home = ones(4)
        value, recorder = adopted(home), GraphRecorder(CUDA)
        before = torch.cuda.current_stream()

        def fails() -> None:
            value.add_(1)
            value.sum().item()

        for _ in range(2):
            with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
                recorder.record(fails, CALLER)
            assert torch.cuda.current_stream() is before
            assert current_device().capture is None
        recorder.record(lambda: value.add_(1), CALLER)()
        look()
        assert home.tolist() == [2.0] * 4

    on_device(work)


def raising(*_: Any) -> None:
    raise RuntimeError("endAllocatePool: not currently recording to mempool_id")


@pytest.mark.parametrize("ended", [False, True])
def test_what_torch_leaves_open_is_ended(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """The allocator no longer records; where torch saw to that, nothing more is done."""
    calls: list[Any] = []

    def end(*args: Any) -> None:
        calls.append(("end", *args))
        if ended:
            raising()

    monkeypatch.setattr(graph_recorder, "broken", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: calls.append(("release", *args)), raising=False)

    def work() -> None:
        clean_up(object(), 0, pool_of(0))
        assert stream_named(graph_recorder.ORIGIN, 0) is not torch.cuda.current_stream()

    on_device(work)
    assert [name for name, *_ in calls] == ["end", *([] if ended else ["release"])]
    assert len(graph_recorder.broken) == (not ended)
