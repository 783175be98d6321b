"""Record a rank program as a CUDA graph, and replay it on every step that looks the same to the device.

A recording keeps the addresses and the numbers that it was made with. What changes from step to step lies in words on
the device instead (`step_words`): numbers (`device_scalars`), and the addresses of all tensors that generated kernels
work on. One copy per step sends the words that changed, on the caller's stream: after all that the step before it
launched, and before all that this one launches. So a recording does not know where gradients are, which `zero_grad`
frees by default.

Operators of torch keep addresses. If gradients move that one of them reads, the program is recorded again, since they
may have moved for good. If they move once more, the step copies them to where recordings read them
(`gradient_copies`). Buffers and state stay where they are. `Replay` records a program after two steps in a row that
look the same, and a few times at most. If that is not enough, or if something cannot be recorded, the program runs
call by call. `Replay.how` says why.

What is recorded are the stretches between collectives (`stretches`), one CUDA graph each. Collectives and events are
made again on every step. A collective must not be recorded: NCCL registers the buffers of recorded sends and receives
with its peers, which then have to replay the same recording, but each rank decides by its own addresses whether it
replays (`NCCL_GRAPH_REGISTER`; NCCL#2389). Nor does NCCL shut down while a recording holds a collective
(pytorch#115388), or its watchdog see one that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from canzona_compile.codegen.launch import GroupedKernel, Laid
from canzona_compile.codegen.step_words import StepWords, even
from canzona_compile.compat.matmul_precision import precision_now
from canzona_compile.compat.torch_private import OpOverload
from canzona_compile.ir import program_ops
from canzona_compile.ir.program import EagerTasks, Fragments, Program, Residents, ScalarInput
from canzona_compile.ir.step import Role
from canzona_compile.runtime.device_scalars import with_device_numbers
from canzona_compile.runtime.gradient_copies import GradientCopies
from canzona_compile.runtime.graph_recorder import GraphRecorder, Run
from canzona_compile.runtime.scalar_ops import DeviceNumber
from canzona_compile.runtime.stretches import CutProgram, ProgramStretch

MOST_RECORDINGS = 3
MOST_FAILURES = 3  # of recordings; later ones may find more memory
PAUSE = 20  # steps from a recording that failed to the next one
MOST_MOVES = 1  # of gradients that operators of torch read; they are copied from the next move on


class Recorder(Protocol):
    """Records stretches; a `GraphRecorder` on CUDA."""

    def make_room(self) -> None: ...
    def record(self, run: Run, stream: str) -> Run: ...


# ATen operators that make the host wait for a value from the device. Families are given by the start of the name, and
# LAUNCHING has the exceptions, which launch kernels only.
WAITING = ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "geqrf", "ormqr")
WAITING_FAMILIES = ("linalg_", "_linalg_", "unique", "_unique", "svd", "_svd", "cholesky")
LAUNCHING = frozenset({"linalg_vector_norm", "linalg_matrix_exp", "linalg_cross", "linalg_diagonal"})


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """A recorded run.

    Attributes:
        replays: for each stretch, what replays it; None for one that launches nothing.
        laid: for each generated kernel, by name, how its operands lay when the recording was made.
    """

    replays: Sequence[Run | None]
    laid: Mapping[str, Laid]


class StepKey(NamedTuple):
    """What a recording keeps of the step that it was made on.

    Attributes:
        places: of each input that looks tensors up, where they are, or how they lie if the words of kernels say where.
        tensors: the addresses of hyperparameters that are tensors.
        fixed: the numbers that operators keep, as text: 0.0 and -0.0, and 1 and True, are equal as numbers.
        precision: that of products of float32 matrices; see `precision_now`.
    """

    places: tuple[Hashable, ...]
    tensors: tuple[int, ...]
    fixed: tuple[str, ...]
    precision: str


@dataclass(eq=False, slots=True)
class WordsHeld:
    """What the words of kernels hold.

    Attributes:
        recording: the recording whose replay reads them.
        places: by input, the addresses of its tensors.
        numbers: the values of the host, as text: 0.0 and -0.0 are equal as numbers.
        writes: how often words of kernels had been written to, this time included. If that grew since, somebody ran
            the program in another way, and the words hold something else.
    """

    recording: Recording
    places: dict[int, list[int]] = field(default_factory=dict)
    numbers: str = ""
    writes: int = -1


class Replay:
    """Runs one program on CUDA, and records it when it can be replayed.

    Args:
        program: the program, as `emit` wrote it.
        device: the device of its tensors.
        entered: makes the program's streams ready; see `streams`.
        recorder: records stretches; None stands for a `GraphRecorder`.
        wanted: whether to record at all. If not, the program runs call by call.
        gradients: the copies of gradients that all programs share, by task.

    Attributes:
        recordings: how many recordings were made so far.
        stopped: why the program is not recorded, or not any more; empty if it may be.
        copies: the gradients that are copied before a recording reads them.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        entered: Callable[[], AbstractContextManager[None]],
        recorder: Recorder | None = None,
        wanted: bool = True,
        gradients: dict[str, Tensor] | None = None,
    ) -> None:
        self.plain, self.entered = program.module, entered
        self.recorder = recorder or GraphRecorder(device)
        self.stopped = obstacle(program) if wanted else "cuda_graphs=False"
        self.recordings = 0
        self.copies = GradientCopies({} if gradients is None else gradients)
        self._tried = 0  # recordings since `_prepare` last chose which numbers lie on the device
        self._problem = ""  # of the last recording that failed
        self._failures = self._pause = 0
        self._moves = 0  # how often gradients have moved that operators of torch read
        inputs = list(program.inputs.values())
        self.program, self.device = program, device
        self._hypers = [i for i, value in enumerate(inputs) if isinstance(value, ScalarInput)]
        self._moving = [i for i, value in enumerate(inputs) if isinstance(value, Fragments | Residents)]
        self._numbers: dict[int, Any] | None = None  # by input, the Python numbers of the last step
        self._changing: set[str] = set()  # names of the inputs whose number has changed since the first step
        self._gradients = {
            i: own.tasks for i, own in enumerate(inputs) if isinstance(own, Fragments) and own.role is Role.GRAD
        }
        self._known: dict[StepKey, Recording] = {}
        self._last: StepKey | None = None
        self._rehearsed = False
        self._places: dict[int, list[int]] = {}  # by input, where tensors are on this step that words tell kernels
        self._held: WordsHeld | None = None
        self._words: StepWords | None = None

    @property
    def how(self) -> str:
        """How the program runs, for reports."""
        if self.stopped:
            return f"call by call: {self.stopped}"
        if not self._known and self._problem:
            return f"call by call: it could not be recorded, which is tried again: {self._problem}"
        if not self._known:
            return (
                "call by call, until two steps in a row have the same numbers where operators keep them, "
                "and their tensors in the same places where operators of torch read them"
            )
        times = "once" if self.recordings == 1 else f"{self.recordings} times"
        count = sum(replay is not None for replay in next(iter(self._known.values())).replays)
        return f"{'a CUDA graph' if count == 1 else f'{count} CUDA graphs'}, recorded {times}"

    def run(self, arguments: Sequence[Any]) -> None:
        """Run the program once.

        The first step with new addresses runs the program as it is. The second one runs it with its numbers on the
        device. The third one records it, and from then on it is replayed.

        Args:
            arguments: one per input of the program.
        """
        key = None if self.stopped else self._look(arguments)
        if key is not None and self._follow(key):
            self.copies.add({i: self._gradients[i] for i in self._moved(key)}, arguments)
            self.forget()
            self._tried = 0
            key = self._look(arguments)
        if key is None:
            self._plainly(arguments)
            return
        if key in self._known and self._resume(self._known[key]):
            given = self.copies.fill(arguments)
            with self.entered():
                self._cut.replay([*given, *self._values], self._known[key].replays)
            return
        if key != self._last:
            self._last, self._rehearsed = key, False
            if self._tried == MOST_RECORDINGS:
                self._stop("its tensors are elsewhere every few steps, or a number changes that an operator keeps")
            self._plainly(arguments)
            return
        if self._pause:
            self._pause -= 1
            self._plainly(arguments)
            return
        self._lay()
        self._fill()
        given = self.copies.fill(arguments)
        if not self._rehearsed:
            self._rehearsed = True
            with self.entered():
                self._cut.run([*given, *self._values], lambda stretch, inputs: stretch.module(*inputs))
            return
        self._record(key, given)

    def _follow(self, key: StepKey) -> bool:
        """Learn whether gradients have moved that operators of torch read.

        Returns:
            Whether to copy those that have, from now on.
        """
        if key == self._last or key in self._known or not self._moved(key):
            return False
        self._moves += 1
        return self._moves > MOST_MOVES

    def _moved(self, key: StepKey) -> set[int]:
        """The inputs that are elsewhere than on the step before, if these are gradients and all else is as it was."""
        last = self._last
        if last is None or key[1:] != last[1:]:
            return set()
        pairs = zip(self._moving, key.places, last.places, strict=True)
        found = {i for i, own, before in pairs if own != before}
        return found if found <= self._gradients.keys() and not any(map(self._listed, found)) else set()

    def _record(self, key: StepKey, arguments: Sequence[Any]) -> None:
        """Run the program once more, and record each stretch before it runs.

        A stretch that cannot be recorded runs call by call, as do those after it, and no recording is kept.
        """
        replays: list[Run | None] = []
        problem = ""

        def launch(stretch: ProgramStretch, inputs: Sequence[Any]) -> Sequence[Any]:
            nonlocal problem
            found: list[Sequence[Any]] = []
            if problem or not stretch.launches:
                replays.append(None)
                return stretch.module(*inputs)  # type: ignore[no-any-return]
            try:
                replay = self.recorder.record(lambda: found.append(stretch.module(*inputs)), stretch.stream)
            except Exception as error:  # from the device or from Triton; nothing was executed
                problem = (str(error) or repr(error)).splitlines()[0]
                return stretch.module(*inputs)  # type: ignore[no-any-return]
            self._flush(stretch)
            replay()
            replays.append(replay)
            return found[-1]

        self.recorder.make_room()
        with self.entered():
            self._cut.run([*arguments, *self._values], launch)
        if problem:
            self._problem, self._pause, self._rehearsed = problem, PAUSE, False
            self._failures += 1
            if self._failures == MOST_FAILURES:
                self._stop(f"it cannot be recorded: {problem}")
            return
        self._problem = ""
        self.recordings += 1
        self._tried += 1
        self._known[key] = Recording(replays, {name: kernel.laid() for name, kernel in self._kernels.items()})

    def _flush(self, stretch: ProgramStretch) -> None:
        """Send what generated kernels noted while a stretch was recorded, when nothing could be sent."""
        for kernel in stretch.module.children():
            if isinstance(kernel, GroupedKernel):
                kernel.flush()

    def _lay(self) -> None:
        """Put the numbers on the device and the words of all generated kernels in one place, if they are not yet.

        Numbers come first: where they alone change, the words to send are few.
        """
        words = self._words
        if words is not None and all(kernel.words is words for kernel in self._kernels.values()):
            return
        self._known.clear()
        single = [i for i, kind in enumerate(self._split.kinds) if kind == "device"]
        rooms = [kernel.room for kernel in self._kernels.values()]
        count = even(DeviceNumber.WORDS * len(single))
        addresses = count + sum(numbers for numbers, _ in rooms)
        words = StepWords(addresses + sum(own for _, own in rooms), self.device)
        self._words = words
        for number, i in enumerate(single):
            self._values[i] = DeviceNumber(words, DeviceNumber.WORDS * number)
        for kernel, (numbers, own) in zip(self._kernels.values(), rooms, strict=True):
            kernel.attach(words, count, addresses)
            count, addresses = count + numbers, addresses + own

    def _resume(self, recording: Recording) -> bool:
        """Send the numbers of this step, and where the tensors are that generated kernels work on.

        Returns:
            Whether the recording can be replayed. If a table was built again since it was made, it cannot, and all
            recordings are dropped.
        """
        held = self._held
        if held is None or held.recording is not recording or held.writes != self._writes():
            held = self._held = WordsHeld(recording)
        for name, laid in recording.laid.items():
            kernel = self._kernels[name]
            if not (kernel.table is laid.table if held.writes >= 0 else kernel.resume(laid)):
                self.forget()
                return False
        for i, addresses in self._places.items():
            if held.places.get(i) != addresses:
                held.places[i] = addresses
                for name, part, operand in self._columns[i]:
                    self._kernels[name].place(part, operand, addresses)
        if held.numbers != (numbers := repr(self._wanted)):
            held.numbers = numbers
            for name in recording.laid:
                self._kernels[name].number([self._wanted[i] for part in self._split.tables[name] for i in part])
        held.writes = self._writes()
        self._fill()
        return True

    def _writes(self) -> int:
        """How often anything was written to the words of its kernels."""
        return sum(kernel.writes for kernel in self._kernels.values())

    def _plainly(self, arguments: Sequence[Any]) -> None:
        """Run the program as it was emitted, call by call."""
        with self.entered():
            self.plain(*arguments)

    def _stop(self, why: str) -> None:
        """Never record the program again."""
        self.stopped = why
        self.forget()

    def moved(self) -> None:
        """Learn that buffers of the program are elsewhere from now on."""
        self.forget()
        self._tried = 0

    def forget(self) -> None:
        """Drop all recordings."""
        self._known.clear()
        self._last = self._held = None

    def _look(self, arguments: Sequence[Any]) -> StepKey | None:
        """Compute the numbers of this step, and find what a recording of it would keep.

        Args:
            arguments: one per input of the program.

        Returns:
            What it would keep. None if a tensor is on the CPU: work on that tensor would happen only once, while the
            recording is made.
        """
        given = {i: arguments[i] for i in self._hypers}
        tensors = {i: value for i, value in given.items() if isinstance(value, Tensor)}
        moving = [t for i in self._moving for t in arguments[i]]
        if any(t.device.type != self.device.type for t in (*tensors.values(), *moving)):
            self._stop("a hyperparameter, or some state, is a tensor on the CPU")
            return None
        numbers = {i: value for i, value in given.items() if i not in tensors}
        before = self._numbers or {}
        names = list(self.program.inputs)
        self._changing |= {names[i] for i, value in numbers.items() if i in before and value != before[i]}
        if self._numbers is None or numbers.keys() != before.keys() or self._changing & self._split.movable:
            self._prepare([names[i] for i in numbers])
        self._numbers = numbers
        self._wanted = list(self._split.host(*numbers.values()))
        fixed = []
        for i, (value, kind) in enumerate(zip(self._wanted, self._split.kinds, strict=True)):
            if kind != "device":
                self._values[i] = value
            if kind == "kept":
                fixed.append(repr(value))
        self._places = {}
        places = tuple(self._place(i, arguments[i]) for i in self._moving)
        return StepKey(places, tuple(t.data_ptr() for t in tensors.values()), tuple(fixed), precision_now())

    def _place(self, i: int, tensors: Sequence[Tensor]) -> Hashable:
        """What a recording keeps of where the tensors of an input are."""
        if i in self.copies.copies:
            return None
        addresses = [t.data_ptr() for t in tensors]
        strides = tuple(t.stride() for t in tensors)
        if not self._listed(i):
            return tuple(addresses), strides
        self._places[i] = addresses
        return tuple(address % 16 for address in addresses), strides

    def _listed(self, i: int) -> bool:
        """Whether kernels take the addresses of an input from words. A kernel that copies odd fragments does not."""
        return i in self._split.listed and not any(self._kernels[name].odd for name, _, _ in self._columns[i])

    def _prepare(self, numbers: list[str]) -> None:
        """Choose again which numbers lie on the device, and drop all recordings."""
        self._split = with_device_numbers(self.program, numbers, self._changing)
        self._cut = CutProgram(self._split.module)
        self._values: list[Any] = [None for _ in self._split.kinds]
        self._words = None
        self._kernels: dict[str, GroupedKernel] = {}
        self._columns: dict[int, list[tuple[str, int, int]]] = {i: [] for i in self._moving}
        for name, parts in self._split.lists.items():
            kernel = self._split.module.get_submodule(name)
            assert isinstance(kernel, GroupedKernel)
            self._kernels[name] = kernel
            for part, lists in enumerate(parts):
                for operand, i in enumerate(lists):
                    if i in self._columns:
                        self._columns[i].append((name, part, operand))
        self.forget()
        self._tried = 0

    def _fill(self) -> None:
        """Send the numbers of this step, and all other words that changed, on the caller's stream."""
        for value, wanted in zip(self._values, self._wanted, strict=True):
            if isinstance(value, DeviceNumber):
                value.fill(wanted)
        if self._words is not None:
            self._words.send()


def obstacle(program: Program) -> str:
    """Why a program cannot be recorded, as far as its code shows; empty if nothing speaks against it."""
    if any(isinstance(value, EagerTasks) for value in program.inputs.values()):
        return "the optimizer's own code runs in it"
    for own in program.module.modules():
        if not isinstance(own, fx.GraphModule | GroupedKernel):
            return f"it calls {type(own).__name__}, which may not be recorded"
    for target in targets(program.module):
        if why := obstacle_in(target):
            return why
    return ""


def targets(module: fx.GraphModule) -> Iterator[Any]:
    """Every function that a program calls, directly or for each of several tasks."""
    for own in module.modules():
        for node in own.graph.nodes if isinstance(own, fx.GraphModule) else ():
            if node.op == "call_function":
                yield node.target
                if node.target is program_ops.each and not isinstance(node.args[0], fx.Node):
                    yield node.args[0]


def obstacle_in(target: Any) -> str:
    """Why a call cannot be recorded; empty if it can."""
    if isinstance(target, OpOverload):
        name = target._schema.name.partition("::")[2]
        waits = name in WAITING or name.startswith(WAITING_FAMILIES)
        return f"{name} makes the host wait" if waits and name not in LAUNCHING else ""
    home = str(getattr(target, "__module__", ""))
    ours = home == program_ops.__name__ or home.partition(".")[0] in ("_operator", "builtins", "math", "torch")
    return "" if ours else f"it calls {getattr(target, '__name__', type(target).__name__)}, which may not be recorded"
