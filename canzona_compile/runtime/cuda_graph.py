"""Record the stretches of a rank program as CUDA graphs, and replay them.

There is one rule. A stretch is recorded if all that changes in it from step to step, addresses and numbers, are words
of generated kernels (`kernel_words`). One copy per step sends the words that changed, on the caller's stream: after
all that the step before it launched, and before all that this one launches. So a recording does not know where
gradients are, which `zero_grad` frees by default, nor what the learning rate is. Operators of torch keep the addresses
and numbers that they were recorded with. If these change for the third time, their stretch runs call by call from then
on, and so do those that read what it computes.

`Replay` records a program after two steps in a row that look the same. `Replay.how` says what is not recorded and why.

What is recorded are the stretches between collectives (`stretches`), one CUDA graph each. Collectives and events are
made again on every step. A collective must not be recorded: NCCL registers the buffers of recorded sends and receives
with its peers, which then have to replay the same recording, but each rank decides by its own addresses whether it
replays (`NCCL_GRAPH_REGISTER`; NCCL#2389). Nor does NCCL shut down while a recording holds a collective
(pytorch#115388), or its watchdog see one that hangs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from canzona_compile.compat.matmul_precision import precision_now
from canzona_compile.ir.program import EagerTasks, Program
from canzona_compile.ir.storage import Stored
from canzona_compile.runtime.graph_recorder import GraphRecorder, Run
from canzona_compile.runtime.kernel_words import KernelWords
from canzona_compile.runtime.streams import CudaStreams, InOrder
from canzona_compile.runtime.stretches import CutProgram, ProgramStretch

ALIKE = 2  # steps in a row that look the same, before one is recorded
MOST_CHANGES = 2  # of what operators of a stretch keep
MOST_FAILURES = 3  # of recordings; later ones may find more memory
PAUSE = 20  # steps from a recording that failed to the next one

Look = tuple[str, int]  # what a recording depends on: "number", "address" or "lies" of an input; "precision", "thread"
PRECISION: Look = ("precision", -1)  # of products of float32 matrices; see `precision_now`


class Recorder(Protocol):
    """Records stretches; a `GraphRecorder` on CUDA."""

    def make_room(self) -> None: ...
    def take_turn(self) -> None: ...
    def record(self, run: Run, stream: str) -> Run: ...


class ReplayState(Enum):
    """What a program does on its next step, unless that looks otherwise than the step before."""

    WATCHED = auto()  # runs call by call, until some steps in a row look the same; then it is recorded
    PAUSED = auto()  # runs call by call, since it could not be recorded; later that is tried again
    REPLAYED = auto()
    STOPPED = auto()  # runs call by call for good


@dataclass(frozen=True, eq=False, slots=True)
class StretchRecording:
    """What replays a stretch, None if it launches nothing; and the values of it that are read call by call."""

    replay: Run | None
    outputs: dict[fx.Node, Any]


class Replay:
    """Runs one program on CUDA, and records it when it can be replayed.

    Args:
        device: the device of its tensors.
        recorder: records stretches; None stands for a `GraphRecorder`.

    Attributes:
        called: the stretches that run call by call for good, with the reasons.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        streams: InOrder | CudaStreams,
        recorder: Recorder | None = None,
        wanted: bool = True,
    ) -> None:
        self.plain, self.streams, self.device = program.module, streams, device
        self.names = list(program.inputs)
        self.recorder = recorder or GraphRecorder(device)
        self.state, self.recordings = ReplayState.WATCHED, 0
        self.called: dict[ProgramStretch, str] = {}
        self._left = ALIKE  # steps until it is recorded
        self._stopped = self._problem = ""  # why for good, and what kept it from being recorded last
        self._failures = 0
        self._changes: Counter[ProgramStretch] = Counter()
        self._seen: dict[Look, Hashable] = {}
        self._places: dict[int, list[int]] = {}  # by input, where tensors are on this step that words tell kernels
        self._recorded: dict[ProgramStretch, StretchRecording] = {}
        if not wanted or any(isinstance(value, EagerTasks) for value in program.inputs.values()):
            self._stop("the optimizer's own code runs in it" if wanted else "cuda_graphs=False")
            return
        self.cut = CutProgram(program)
        self._call({stretch: stretch.obstacle for stretch in self.cut.stretches if stretch.obstacle})

    @property
    def how(self) -> str:
        """How the program runs, for reports."""
        match self.state:
            case ReplayState.STOPPED:
                return f"call by call: {self._stopped}"
            case ReplayState.PAUSED:
                return f"call by call: it could not be recorded, which is tried again: {self._problem}"
            case ReplayState.WATCHED:
                return (
                    "call by call, until operators of torch read the same numbers and addresses on two steps in a row"
                )
        times = "once" if self.recordings == 1 else f"{self.recordings} times"
        count = sum(own.replay is not None for own in self._recorded.values())
        others = [why for stretch, why in self.called.items() if stretch.launches]
        beside = f"; {len(others)} more run call by call: {others[0]}" if others else ""
        return f"{'a CUDA graph' if count == 1 else f'{count} CUDA graphs'}, recorded {times}{beside}"

    def run(self, arguments: Sequence[Any]) -> None:
        """Run the program once: replay it, or record it, or run it call by call."""
        if self.state is not ReplayState.STOPPED:
            self._follow(arguments)
        match self.state:
            case ReplayState.REPLAYED:
                self.recorder.take_turn()
                with self.streams.entered():
                    self.cut.run(arguments, self._replay)
            case ReplayState.WATCHED | ReplayState.PAUSED if not self._left and self._may_record(arguments):
                self._record(arguments)
            case _:
                self._left -= 1
                with self.streams.entered():
                    self.plain(*arguments)

    def moved(self) -> None:
        """Learn that buffers of the program are elsewhere from now on."""
        self._forget()

    # -- what changes ----------------------------------------------------------------------------------

    def _follow(self, arguments: Sequence[Any]) -> None:
        """Look at a step, and forget what was recorded if that cannot be replayed on it."""
        seen = self._look(arguments)
        if seen != self._seen:
            changed = {look for look, value in seen.items() if self._seen and value != self._seen[look]}
            for stretch in self._recordable() if changed else ():
                own = changed & looks_of(stretch)
                self._changes[stretch] += bool(own)
                if own and self._changes[stretch] > MOST_CHANGES:
                    self._call({stretch: self._what_changes(own)})
            self._forget()
            self._seen = self._look(arguments)
        if self.state is ReplayState.REPLAYED and not self._words.send(self._places, arguments):
            self._forget()

    def _look(self, arguments: Sequence[Any]) -> dict[Look, Hashable]:
        """Find what a recording of this step would keep of it, and where tensors are that words tell kernels."""
        seen: dict[Look, Hashable] = {PRECISION: precision_now(), ("thread", -1): threading.get_ident()}  # its memory
        self._places = {}
        for i in self._inputs:
            value = arguments[i]
            if not isinstance(value, list):
                # 0.0 and -0.0, and 1 and True, are equal as numbers
                seen["number", i] = value.data_ptr() if isinstance(value, Tensor) else repr(value)
                continue
            if value and isinstance(value[0], Stored):
                seen["address", i] = tuple(t.data_ptr() for own in value for t in own.tensors)
                continue
            addresses = [t.data_ptr() for t in value]
            if i in self._kept:
                seen["address", i] = tuple(addresses)
            if i in self._words.operands:
                self._places[i] = addresses
            seen["lies", i] = tuple((address % 16, t.stride()) for address, t in zip(addresses, value, strict=True))
        return seen

    def _recordable(self) -> list[ProgramStretch]:
        return [stretch for stretch in self.cut.stretches if stretch not in self.called]

    def _what_changes(self, looks: Collection[Look]) -> str:
        """Why a stretch runs call by call in which this changes."""
        names = ", ".join(sorted(self.names[i] for _, i in looks if i >= 0)) or "the precision of products"
        return f"operators of torch read what changes from step to step: {names}"

    def _call(self, why: dict[ProgramStretch, str]) -> None:
        """Run some stretches call by call for good, and those that read what they compute."""
        self.called |= why
        computed = dict[fx.Node, str]()
        for stretch in self.cut.stretches:
            read = next((computed[n] for n in stretch.inputs if n in computed), "")
            if stretch not in self.called and read:
                self.called[stretch] = read
            if stretch in self.called:
                computed |= dict.fromkeys(stretch.outputs, self.called[stretch])
        rest = self._recordable()
        self._words = KernelWords([call for stretch in rest for call in stretch.kernels], self.device)
        self._kept = frozenset(i for stretch in rest for i in stretch.kept)
        self._inputs = sorted({*self._kept, *self._words.operands})
        self._seen = {}
        self._forget()
        if not any(stretch.launches for stretch in rest):
            self._stop(next(iter(self.called.values()), "it launches nothing"))

    def _forget(self) -> None:
        """Drop what was recorded, and watch some steps before the next recording."""
        self._recorded = {}
        if self.state is ReplayState.REPLAYED:
            self.state = ReplayState.WATCHED
        self._left = max(self._left, ALIKE) if self.state is ReplayState.PAUSED else ALIKE

    def _stop(self, why: str) -> None:
        """Run the program call by call for good."""
        self._recorded = {}
        self.state, self._stopped = ReplayState.STOPPED, why

    # -- recordings ------------------------------------------------------------------------------------

    def _may_record(self, arguments: Sequence[Any]) -> bool:
        """Look at what only tensors tell, and kernels that have run; returns whether a step may be recorded."""
        found = dict[ProgramStretch, str]()
        for stretch in self._recordable():
            numbers = [arguments[i] for call in stretch.kernels for _, own in call.numbers or () for i in own]
            reads = [
                arguments[i] for i in (*stretch.kept, *(i for call in stretch.kernels for i, _, _ in call.operands))
            ]
            tensors = (t for own in (*reads, *numbers) for t in (own if isinstance(own, list) else [own]))
            if any(isinstance(t, Tensor) and t.device.type != self.device.type for t in tensors):
                found[stretch] = "a hyperparameter, or some state, is a tensor on the CPU"
            elif any(isinstance(number, Tensor) for number in numbers):
                found[stretch] = "generated kernels read a hyperparameter that is a tensor"
            elif any(call.kernel.odd for call in stretch.kernels):
                found[stretch] = "some fragments are copied for generated kernels"
        if found:
            self._call(found)
        return not found

    def _record(self, arguments: Sequence[Any]) -> None:
        """Run the program once more, and record each stretch before it runs.

        A stretch that cannot be recorded runs call by call, as do those after it, and no recording is kept.
        """
        recorded: dict[ProgramStretch, StretchRecording] = {}
        wanted = {n for stretch in self.called for n in stretch.inputs}
        problem = ""

        def launch(stretch: ProgramStretch, values: dict[fx.Node, Any]) -> None:
            nonlocal problem
            inputs, found = [values[n] for n in stretch.inputs], list[Sequence[Any]]()
            replay: Run | None = None
            if stretch.launches and not problem and stretch not in self.called:
                try:
                    replay = self.recorder.record(lambda: found.append(stretch.module(*inputs)), stretch.stream)
                except Exception as error:  # from the device or from Triton; nothing was executed
                    problem = (str(error) or repr(error)).splitlines()[0]
                    found.clear()
            if replay:
                self._flush(stretch)
                replay()
            stretch.give(values, found[-1] if replay else stretch.module(*inputs))
            if stretch not in self.called:
                recorded[stretch] = StretchRecording(replay, {n: values[n] for n in stretch.outputs if n in wanted})

        self.recorder.make_room()
        self.recorder.take_turn()
        self._words.lay()
        with self.streams.entered():
            self.cut.run(arguments, launch)
        if not problem:
            self.recordings += 1
            self.state, self._recorded = ReplayState.REPLAYED, recorded
            self._words.keep()
            return
        self._failures += 1
        self.state, self._problem, self._left = ReplayState.PAUSED, problem, PAUSE
        if self._failures == MOST_FAILURES:
            self._stop(f"it cannot be recorded: {problem}")

    def _flush(self, stretch: ProgramStretch) -> None:
        """Send what generated kernels noted while a stretch was recorded, when nothing could be sent."""
        for call in stretch.kernels:
            call.kernel.flush()

    def _replay(self, stretch: ProgramStretch, values: dict[fx.Node, Any]) -> None:
        """Replay a stretch, or run it call by call."""
        own = self._recorded.get(stretch)
        if own is None:
            stretch.give(values, stretch.module(*[values[n] for n in stretch.inputs]))
            return
        if own.replay is not None:
            own.replay()
        values.update(own.outputs)


def looks_of(stretch: ProgramStretch) -> set[Look]:
    """What a recording of a stretch depends on."""
    kept = {(what, i) for i in stretch.kept for what in ("number", "address", "lies")}
    return kept | {("lies", i) for call in stretch.kernels for i, _, _ in call.operands} | {PRECISION}
