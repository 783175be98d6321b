"""What the stand-in is for: a mistake in the order of streams, in memory, in recordings or among ranks does not pass.

Each test makes one mistake, in a program or in the runtime, and looks for a seed that shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from canzona_compile.codegen.launch import GroupedKernel, StepWords
from canzona_compile.ir import storage
from canzona_compile.ir.program_ops import finish, keep, on_stream, record, start_all_to_all, wait
from canzona_compile.ir.step import Step
from canzona_compile.ir.storage import rules_of
from canzona_compile.lowering.stream_sync import CALLER, COMPUTE
from canzona_compile.runtime import stretches, waiter
from canzona_compile.runtime.cuda_graph import MOST_CHANGES, Replay
from canzona_compile.runtime.graph_recorder import GraphRecorder
from canzona_compile.runtime.kernel_words import KernelWords
from canzona_compile.runtime.streams import CudaStreams, stream_named
from tests.fake_cuda.device import FakeStream, current_device
from tests.fake_cuda.on_device import look, on_stand_in
from tests.fake_cuda.rank_programs import ProgramRun, RankTensors, emitted_on, falling, run_programs, same, steady
from tests.fake_cuda.scheduler import DeviceError
from tests.fake_cuda.tensors import plainly, programs_run_here
from tests.harness.marks import also, crossed, first

SEEDS = range(50)
Mistake = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Setting:
    """Which programs run, and how."""

    grid: tuple[int, int] = (1, 2)
    kernels: bool = False
    changing: bool = False
    cuda_graphs: bool = True
    moving: bool = False
    beside: bool = False
    name: str = "muon"
    options: tuple[tuple[str, Any], ...] = (("micro_groups", 4),)

    @property
    def count(self) -> int:
        """How many steps are taken. The third one is recorded, later ones replay; where operators of torch read what
        changes, first for the last time, their stretches run call by call."""
        if not self.cuda_graphs:
            return 2
        return 5 if self.kernels or not (self.moving or self.changing) else 7 + MOST_CHANGES


@cache
def programs(setting: Setting) -> list[Step]:
    return emitted_on(setting.grid, setting.name, setting.kernels, **dict(setting.options))


def outcome(setting: Setting, seed: int | None, plant: Any = None) -> Any:
    number_of = falling if setting.changing else steady
    steps = programs(setting)
    timed = (4,) if setting.beside else ()
    count = setting.count + len(timed)
    return run_programs(steps, seed, plant, count, number_of, setting.cuda_graphs, setting.moving, timed)


@cache
def right(setting: Setting) -> Any:
    """What the programs give if each piece of work is done at once, and gradients stay where they are."""
    if setting.moving:
        steps, number_of = programs(setting), falling if setting.changing else steady
        return run_programs(steps, None, None, setting.count, number_of)
    return outcome(setting, None)


def showing(setting: Setting, plant: Any = None) -> int | None:
    """The first seed that shows a mistake; None if no seed does."""
    wanted = right(setting)
    for seed in SEEDS:
        try:
            found = outcome(setting, seed, plant)
        except (Exception, DeviceError):  # whatever the stand-in says
            return seed
        if not same(found, wanted):
            return seed
    return None


# -- in programs -----------------------------------------------------------------------------------


def without(number: int, *targets: Any) -> Callable[[fx.GraphModule], None]:
    """Leave out one of the calls of these functions."""

    def plant(module: fx.GraphModule) -> None:
        node = [n for n in module.graph.nodes if n.target in targets][number]
        if node.users:
            node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)

    return plant


def waits_between_streams(module: fx.GraphModule) -> list[int]:
    """The waits of a program for events of another stream, by their number. `compute` is the caller's stream."""
    current, recorded, number = CALLER, dict[Any, str](), 0
    found = []
    for node in module.graph.nodes:
        if node.target is on_stream:
            current = CALLER if node.args[1] == COMPUTE else node.args[1]
        elif node.target is record:
            recorded[node.args[1]] = current
        elif node.target is wait:
            if recorded[node.args[1]] != current:
                found.append(number)
            number += 1
    return found


@pytest.mark.parametrize(("grid", "graphs"), crossed([(1, 2), (2, 1), (2, 2)], [False, True], most=1), ids=str)
def test_every_wait_is_needed(grid: tuple[int, int], graphs: bool) -> None:
    setting = Setting(grid, cuda_graphs=graphs)
    numbers = waits_between_streams(programs(setting)[0].program.module)
    assert numbers
    unseen = [i for i in numbers if showing(setting, without(i, wait)) is None]
    assert not unseen, f"{len(unseen)} of {len(numbers)}"


@pytest.mark.parametrize(("grid", "graphs"), crossed([(1, 1), (2, 2)], [False, True], most=1), ids=str)
def test_every_wait_for_lanes_is_needed(grid: tuple[int, int], graphs: bool) -> None:
    matrices = 4 * grid[0] * grid[1]
    setting = Setting(grid, cuda_graphs=graphs, options=(("micro_groups", 2), ("matrices", matrices), ("lanes", True)))
    module = programs(setting)[0].program.module
    assert any(n.target is on_stream and n.args[1] == "compute 1" for n in module.graph.nodes)
    assert all(same(outcome(setting, seed), right(setting)) for seed in range(5))
    numbers = waits_between_streams(module)
    unseen = [i for i in numbers if showing(setting, without(i, wait)) is None]
    assert not unseen, f"{len(unseen)} of {len(numbers)}"


@pytest.mark.parametrize(("text", "graphs"), crossed(["int8 cpu", "bfloat16"], [False, True], most=1), ids=str)
def test_every_wait_for_stored_state_is_needed(text: str, graphs: bool) -> None:
    options = (("micro_groups", 4), ("state", rules_of({"momentum_buffer": text})))
    setting = Setting((1, 2), cuda_graphs=graphs, options=options)
    module = programs(setting)[0].program.module
    assert any(n.target is storage.fetch for n in module.graph.nodes)
    assert len(waits_between_streams(module)) > len(waits_between_streams(programs(Setting((1, 2)))[0].program.module))
    assert same(outcome(setting, 0), right(setting))
    unseen = [i for i in waits_between_streams(module) if showing(setting, without(i, wait)) is None]
    assert not unseen, f"{len(unseen)} of {len(waits_between_streams(module))}"


@pytest.mark.parametrize(("name", "graphs"), crossed(["muon", "soap"], [False, True], most=1), ids=str)
def test_every_keep_is_needed(name: str, graphs: bool) -> None:
    setting = Setting((2, 1), name=name, cuda_graphs=graphs, options=(("micro_groups", 4), ("matrices", 8)))
    module = programs(setting)[0].program.module
    count = sum(n.target is keep for n in module.graph.nodes)
    assert count
    unseen = [i for i in range(count) if showing(setting, without(i, keep)) is None]
    assert not unseen, f"{len(unseen)} of {count}"


@pytest.mark.parametrize("seed", first(range(2)))
def test_right_programs_pass(seed: int) -> None:
    settings = Setting(cuda_graphs=False), Setting((2, 1), changing=True), *(own for own, _ in MOVING.values())
    for setting in dict.fromkeys(settings):
        found = outcome(setting, seed)
        assert same(found, right(setting))
        assert all(bool(value.isfinite().all()) for own in found for value in own.values())


def swapped(module: fx.GraphModule) -> None:
    """Start the first two collectives in the other order."""
    one, two = [n for n in module.graph.nodes if n.target is start_all_to_all][:2]
    old = one.args, two.args
    two.args, one.args = old


def smaller(module: fx.GraphModule) -> None:
    """Send one byte less to the other rank."""
    node = next(n for n in module.graph.nodes if n.target is start_all_to_all)
    with module.graph.inserting_before(node):
        less = module.graph.call_function(lambda counts: [counts[0] + 1, counts[1] - 1], (node.args[3],))
    node.update_arg(3, less)


@pytest.mark.parametrize("plant", [swapped, smaller])
def test_collectives_that_do_not_fit_are_found(plant: Any) -> None:
    assert showing(Setting(cuda_graphs=False), plant) is not None


# -- in the runtime --------------------------------------------------------------------------------


def nothing(*_: Any, **__: Any) -> None:
    pass


def replaced(owner: Any, name: str, value: Any) -> Mistake:
    return lambda: mock.patch.object(owner, name, value)


@contextlib.contextmanager
def joined(forks: bool, joins: bool) -> Iterator[None]:
    """A recording that does not fork from the caller's stream, or does not join it."""
    real = FakeStream.wait_stream

    def some(stream: FakeStream, other: FakeStream) -> None:
        default = current_device().default
        if current_device().capture is None and ((stream is default and not joins) or (other is default and not forks)):
            return
        real(stream, other)

    with mock.patch.object(FakeStream, "wait_stream", some):
        yield


def numbers_of_first_steps(kernel: GroupedKernel, values: Any, real: Any = GroupedKernel.number) -> None:
    if kernel.launches < 3:
        real(kernel, values)


WORDS = Setting((1, 1), kernels=True, changing=True, moving=True, options=())
MIXED = Setting((1, 2), changing=True, options=(("micro_groups", 4),))  # apply reads a number that changes


def where_they_were(words: KernelWords, places: Any, arguments: Any, real: Any = KernelWords.send) -> bool:
    """Do not tell kernels where tensors are."""
    return bool(real(words, {}, arguments))


def as_before(replay: Replay, arguments: Any, real: Any = Replay._look) -> Any:
    """Look at a step, and do not see what operators of torch read."""
    return {
        look: None if look[0] in ("number", "address") else value for look, value in real(replay, arguments).items()
    }


def alone(replay: Replay, why: Any, real: Any = Replay._call) -> None:
    """Run stretches call by call, and not those that read what they compute."""
    inputs = {stretch: stretch.inputs for stretch in replay.cut.stretches}
    try:
        for stretch in inputs:
            object.__setattr__(stretch, "inputs", ())
        real(replay, why)
    finally:
        for stretch, own in inputs.items():
            object.__setattr__(stretch, "inputs", own)


def early(real: Any) -> Any:
    """A copy that does not wait for what the step before it launched."""

    def sent(*args: Any) -> Any:
        with torch.cuda.stream(stream_named("early", 0)):
            return real(*args)

    return sent


def unless_recording(stream: FakeStream, other: FakeStream, real: Any = FakeStream.wait_stream) -> None:
    """Streams wait for one another, but not in a recording."""
    if current_device().capture is None:
        real(stream, other)


def send_from_one_place(words: StepWords, first: int = 0, last: int | None = None) -> None:
    """Send all words from memory that the next step writes to, although the copy may not have happened yet."""
    if words.changed(first, last) is None:
        return
    if not hasattr(words, "pinned"):
        words.pinned = torch.from_numpy(words.wanted).pin_memory()  # type: ignore[attr-defined]
    with plainly():
        words.pinned.copy_(torch.from_numpy(words.wanted))  # type: ignore[attr-defined]
    words.memory.copy_(words.pinned, non_blocking=True)  # type: ignore[attr-defined]
    words._sent[:] = words.wanted


MOVING: dict[str, tuple[Setting, Mistake]] = {
    "kernels are not told where gradients are": (WORDS, replaced(KernelWords, "send", where_they_were)),
    "words are sent while the step before reads them": (WORDS, replaced(KernelWords, "send", early(KernelWords.send))),
    "words are sent from memory that is written again": (WORDS, replaced(StepWords, "send", send_from_one_place)),
    "nobody sees that gradients moved which torch reads": (
        Setting((1, 1), moving=True, options=()),
        replaced(Replay, "_look", as_before),
    ),
}
CONNECTING_LESS = tuple(c for c in stretches.CONNECTING if c not in (start_all_to_all, finish))
MISTAKES: dict[str, tuple[Setting, Mistake]] = {
    "no wait for collectives": (Setting(cuda_graphs=False), replaced(waiter.Waiter, "wait", nothing)),
    "events are not recorded": (Setting(cuda_graphs=False), replaced(CudaStreams, "record", nothing)),
    "events are not waited for": (Setting((2, 1), cuda_graphs=False), replaced(CudaStreams, "wait", nothing)),
    "nobody sees that numbers changed which torch reads": (MIXED, replaced(Replay, "_look", as_before)),
    "what is computed call by call is read where it was": (
        Setting((2, 1), moving=True),
        replaced(Replay, "_call", alone),
    ),
    "numbers of kernels are not written before a replay": (
        Setting((1, 1), kernels=True, changing=True, options=()),
        replaced(GroupedKernel, "number", numbers_of_first_steps),
    ),
    "collectives are recorded": (Setting(), replaced(stretches, "CONNECTING", CONNECTING_LESS)),
    "a recording does not fork": (
        Setting(),
        replaced(FakeStream, "wait_stream", unless_recording),
    ),
    "nobody sees that others run a program": (
        Setting((1, 1), kernels=True, options=(), beside=True),
        replaced(KernelWords, "writes", lambda words: 0),
    ),
}
MISTAKES |= MOVING
SEEN = [*MOVING, "nobody sees that others run a program"]


@pytest.mark.parametrize("mistake", [*first([m for m in MISTAKES if m not in SEEN], 3), *SEEN])
def test_mistakes_in_the_runtime_are_found(mistake: str) -> None:
    setting, patch = MISTAKES[mistake]
    right(setting)
    with patch():
        assert showing(setting) is not None


def on_two_streams(seed: int | None, count: int = 6) -> list[dict[tuple[str, str], torch.Tensor]]:
    """The leaves of two recorded programs, the second of which steps on a stream of its own."""

    def work(rank: int) -> list[dict[tuple[str, str], torch.Tensor]]:
        step, here, other = programs(Setting((1, 1), options=()))[0], torch.cuda.current_stream(), torch.cuda.Stream()
        runs = [ProgramRun(step.program, RankTensors(step, rank, steady), cuda_graphs=True) for _ in range(2)]
        for at in range(count):
            for run, stream in zip(runs, (here, other), strict=True):
                with torch.cuda.stream(stream):
                    run.step(at)
        here.wait_stream(other)
        look()
        assert all(run.executor.how.startswith("a CUDA graph") for run in runs)
        return [{k: v.clone() for k, v in r.tensors.leaves.items() if k not in r.tensors.gradients} for r in runs]

    with on_stand_in(seed, 1) as run:
        return run(work)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("waits", [True, *also([False])])
def test_recorded_programs_on_two_streams(waits: bool) -> None:
    """They share memory, so one waits for the other."""
    right = on_two_streams(None)
    with contextlib.nullcontext() if waits else mock.patch.object(GraphRecorder, "take_turn", nothing):
        seeds = range(4) if waits else SEEDS
        assert any(not same(on_two_streams(seed), right) for seed in seeds) == (not waits)


def offsets_seen(seed: int) -> list[bool]:
    """Whether CUDA graphs of a model read the offset of random numbers that they have set.

    The first one may still run when something is recorded, and the second one is replayed right after that.
    """
    found: list[bool] = []

    def work(rank: int) -> None:
        device = current_device()
        for offset in (1, 2):
            device.put("an offset", lambda own=offset: setattr(device, "offset", own))  # type: ignore[misc]
            for _ in range(3):
                device.put("a dropout", lambda own=offset: found.append(device.offset == own))  # type: ignore[misc]
            if offset == 1:
                with programs_run_here(), torch.no_grad():
                    GraphRecorder(torch.device("cuda", 0)).record(lambda: None, CALLER)
        look()

    with on_stand_in(seed, 1) as run:
        run(work)
    return found


@pytest.mark.parametrize(("forks", "joins"), [(True, True), (False, True), (True, False)])
def test_recordings_leave_random_numbers_of_the_model_alone(forks: bool, joins: bool) -> None:
    with joined(forks, joins):
        assert all(seen for seed in SEEDS for seen in offsets_seen(seed)) == (forks and joins)
