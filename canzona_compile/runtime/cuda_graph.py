"""A rank program as CUDA graphs: recorded once, replayed on every step that looks the same to the device.

A recording keeps addresses and numbers. The numbers it reads lie in tensors, which every step fills
(`device_scalars`). Buffers and state stay where they are. Gradients may move, since `zero_grad` frees them by
default. So `Replay` records a program after two steps in a row with the same addresses, and a few times at most. If
addresses keep changing, or if something cannot be recorded, the program runs call by call; `Replay.how` says why.

Recordings of all programs share one pool of memory: they never run at the same time, and no value of a recording is
used after it.

NCCL does not shut down while a recording of one of its collectives exists (pytorch#115388). So all such recordings
are dropped before a process group shuts down, whoever does that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from canzona_compile.codegen.launch import GroupedKernel, Laid
from canzona_compile.ir import program_ops
from canzona_compile.ir.program import EagerTasks, Fragments, Program, Residents, ScalarInput
from canzona_compile.runtime.device_scalars import with_device_numbers
from canzona_compile.runtime.scalar_ops import DeviceNumber
from canzona_compile.runtime.streams import index_of, stream_named

MOST_RECORDINGS = 3

Run = Callable[[], None]
Recorder = Callable[[Run], Run]  # records a run and returns what replays it

# Operators that read a value from the device, so that the host waits.
WAITING = ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "geqrf", "ormqr", "cholesky")
WAITING_FAMILIES = ("linalg_", "_linalg_", "unique", "_unique", "svd", "_svd")
LAUNCHING = frozenset({"linalg_vector_norm", "linalg_matrix_exp", "linalg_cross", "linalg_diagonal"})


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """A recorded run.

    Attributes:
        replay: runs it again.
        laid: by the name of each generated kernel, what its table held.
    """

    replay: Run
    laid: Mapping[str, Laid]


class Replay:
    """Runs one program on CUDA, and records it when that is worth it.

    Args:
        program: as emitted.
        device: of its tensors.
        entered: makes the program's streams ready, see `streams`.
        record: makes a recording of a run; by default `recorded`.
        wanted: False to run the program call by call.

    Attributes:
        recordings: how many recordings were made so far.
        stopped: why the program is not recorded (any more); empty if it may be.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        entered: Callable[[], AbstractContextManager[None]],
        record: Recorder | None = None,
        wanted: bool = True,
    ) -> None:
        self.plain, self.entered = program.module, entered
        self.record = record or functools.partial(recorded, device=device)
        self.stopped = obstacle(program) if wanted else "cuda_graphs=False"
        self.recordings = 0
        self._tried = 0  # recordings since `_prepare` last chose which numbers lie on the device
        inputs = list(program.inputs.values())
        self.program, self.device = program, device
        self._hypers = [i for i, value in enumerate(inputs) if isinstance(value, ScalarInput)]
        self._moving = [i for i, value in enumerate(inputs) if isinstance(value, Fragments | Residents)]
        self._numbers: dict[int, Any] | None = None  # hyperparameters of the last step that are no tensors
        self._changing: set[str] = set()  # names of those that have changed since the first step
        self._known: dict[Hashable, Recording] = {}
        self._last: Hashable = None
        self._rehearsed = False

    @property
    def how(self) -> str:
        """How the program runs, for reports."""
        if self.stopped:
            return f"call by call: {self.stopped}"
        if not self._known:
            return (
                "call by call, until two steps in a row have gradients in the same places, "
                "and the same numbers where operators keep them"
            )
        times = "once" if self.recordings == 1 else f"{self.recordings} times"
        return f"a CUDA graph, recorded {times}"

    def run(self, arguments: Sequence[Any]) -> None:
        """Run the program once.

        It runs plainly at the first step with new addresses, with numbers on the device at the second, is recorded
        at the third, and replayed from then on.

        Args:
            arguments: one per input of the program.
        """
        key = None if self.stopped else self._look(arguments)
        if key is None:
            self._plainly(arguments)
            return
        if key in self._known and self._resume(self._known[key].laid):
            self._fill()
            self._known[key].replay()
            return
        if key != self._last:
            self._last, self._rehearsed = key, False
            if self._tried == MOST_RECORDINGS:
                self._stop("gradients are elsewhere every few steps, or a number changes that an operator keeps")
            self._plainly(arguments)
            return
        self._fill()
        run = functools.partial(self._on_device, list(arguments))
        if not self._rehearsed:
            self._rehearsed = True
            run()
            return
        try:
            replay = self.record(run)
        except Exception as error:  # of the device, of Triton: nothing was executed
            self._stop(f"it cannot be recorded: {(str(error) or repr(error)).splitlines()[0]}")
            self._plainly(arguments)
            return
        self.recordings += 1
        self._tried += 1
        if self.program.collectives:
            with_collectives().add(self)
        kernels = {name: self._kernel(name) for name in self._split.tables}
        for kernel in kernels.values():
            kernel.flush()
        self._known[key] = Recording(replay, {name: k.laid() for name, k in kernels.items() if k.table is not None})
        replay()

    def _kernel(self, name: str) -> GroupedKernel:
        kernel = self._split.module.get_submodule(name)
        assert isinstance(kernel, GroupedKernel)
        return kernel

    def _resume(self, laid: Mapping[str, Laid]) -> bool:
        """Restore the tables of generated kernels as a recording was made with them.

        Returns:
            Whether all of them could be restored; if not, all recordings are dropped.
        """
        for name, own in laid.items():
            numbers = [[self._values[i] for i in part] for part in self._split.tables[name]]
            if not self._kernel(name).resume(own, numbers):
                self.forget()
                return False
        return True

    def _plainly(self, arguments: Sequence[Any]) -> None:
        with self.entered():
            self.plain(*arguments)

    def _on_device(self, arguments: Sequence[Any]) -> None:
        with self.entered():
            self._split.module(*arguments, *self._values)

    def _stop(self, why: str) -> None:
        self.stopped = why
        self.forget()

    def forget(self) -> None:
        """Drop all recordings, so that NCCL's communicators may be destroyed."""
        self._known.clear()
        self._last = None

    def _look(self, arguments: Sequence[Any]) -> Hashable | None:
        """Compute the numbers of this step, and tell what a recording would keep of it.

        Returns:
            Addresses, and the numbers that operators keep. None if some tensor is on the CPU: a recording would do
            the work on that tensor only once, when it is made.
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
        self._wanted = self._split.host(*numbers.values())
        fixed = []
        for i, (value, kind) in enumerate(zip(self._wanted, self._split.kinds, strict=True)):
            if kind != "device":
                self._values[i] = value
            if kind == "kept":
                fixed.append(value)
        places = tuple((t.data_ptr(), t.stride()) for t in moving)
        return places, tuple(t.data_ptr() for t in tensors.values()), tuple(fixed)

    def _prepare(self, numbers: list[str]) -> None:
        self._split = with_device_numbers(self.program, numbers, self._changing)
        self._values: list[Any] = [
            DeviceNumber(self.device) if kind == "device" else None for kind in self._split.kinds
        ]
        self.forget()
        self._tried = 0

    def _fill(self) -> None:
        """Give the numbers on the device their values, on the caller's stream."""
        for value, wanted in zip(self._values, self._wanted, strict=True):
            if isinstance(value, DeviceNumber):
                value.fill(wanted)


def recorded(run: Run, device: torch.device) -> Run:
    """Record what a run launches as a CUDA graph.

    Other threads go on meanwhile, NCCL's watchdog among them; only this thread must not do what cannot be recorded.

    Args:
        run: launches the work.
        device: on which it does.

    Returns:
        What replays the recording.

    Raises:
        Exception: something in the run cannot be recorded. Nothing was executed, and the device is as it was.
    """
    graph = torch.cuda.CUDAGraph()
    index = index_of(device)
    caller, pool = torch.cuda.current_stream(device), pool_of(index)
    try:
        with torch.cuda.graph(
            graph, pool=pool, stream=stream_named("record", index), capture_error_mode="thread_local"
        ):
            run()
    except BaseException:
        torch.cuda.set_stream(caller)
        clean_up(graph, index, pool)
        raise
    replay: Run = graph.replay
    return replay


def clean_up(graph: Any, device: int, pool: Any) -> None:
    """End what torch leaves open after a failed recording, since `CUDAGraph::capture_end` raises too early.

    Otherwise the allocator would go on as in a recording: memory that was lent to a stream would never be free again,
    and `empty_cache` would fail. The random generator of older versions would refuse to draw; the end of another
    recording sets it right, so this makes one.

    Args:
        graph: whose recording failed.
        device: index of the device.
        pool: of memory that was recorded into.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # torch has ended everything
        return
    torch._C._cuda_releasePool(device, pool)
    pool_of.cache_clear()
    broken.append(graph)  # allocators of pinned memory may ask it whether a stream is being recorded
    stream = stream_named("record", device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=torch.device("cuda", device))


broken: list[Any] = []


@functools.cache
def pool_of(device: int) -> Any:
    """The pool of memory that all recordings on a device share."""
    return torch.cuda.graph_pool_handle()


@functools.cache
def with_collectives() -> weakref.WeakSet[Replay]:
    """Programs whose recordings contain collectives; process groups drop these before they shut down.

    The first call replaces two methods of `ProcessGroup` for that. Nothing else runs early enough: `atexit` and
    finalizers come after `destroy_process_group`, which would hang, and instances take no attributes. Torch could
    make this unnecessary with a hook before a process group shuts down, or by an NCCL that ends its recordings itself.
    """
    found: weakref.WeakSet[Replay] = weakref.WeakSet()
    for name in ("shutdown", "abort"):
        setattr(dist.ProcessGroup, name, after_forgetting(getattr(dist.ProcessGroup, name), found))
    return found


def after_forgetting(end: Callable[..., None], replays: weakref.WeakSet[Replay]) -> Callable[..., None]:
    """A method of `ProcessGroup` that drops all recordings first."""

    @functools.wraps(end)
    def ended(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        for replay in list(replays):
            replay.forget()
        end(group, *args, **kwargs)

    return ended


def obstacle(program: Program) -> str:
    """Why a program cannot be recorded, as far as its code shows; empty if it may be."""
    if any(isinstance(value, EagerTasks) for value in program.inputs.values()):
        return "the optimizer's own code runs in it"
    if program.collectives and dist.is_initialized() and (backend := backend_on_cuda()) != "nccl":
        return f"its collectives are those of {backend}"
    for own in program.module.modules():
        if not isinstance(own, fx.GraphModule | GroupedKernel):
            return f"it calls {type(own).__name__}, which may not be recorded"
    for target in targets(program.module):
        if why := obstacle_in(target):
            return why
    return ""


def backend_on_cuda() -> str:
    """The backend that runs collectives of CUDA tensors: a group may have one for each kind of device."""
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return next((backend for device, backend in pairs if device == "cuda"), "no backend for CUDA")


def targets(module: fx.GraphModule) -> Iterator[Any]:
    """Every function that a program calls, those that it calls for each of several tasks included."""
    for own in module.modules():
        for node in own.graph.nodes if isinstance(own, fx.GraphModule) else ():
            if node.op == "call_function":
                yield node.target
                if node.target is program_ops.each and not isinstance(node.args[0], fx.Node):
                    yield node.args[0]


def obstacle_in(target: Any) -> str:
    """Why a call cannot be recorded; empty if it can."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.partition("::")[2]
        waits = name in WAITING or name.startswith(WAITING_FAMILIES)
        return f"{name} makes the host wait" if waits and name not in LAUNCHING else ""
    home = str(getattr(target, "__module__", ""))
    ours = home == program_ops.__name__ or home.partition(".")[0] in ("_operator", "builtins", "math", "torch")
    return "" if ours else f"it calls {getattr(target, '__name__', type(target).__name__)}, which may not be recorded"
