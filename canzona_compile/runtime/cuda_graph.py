"""Record a rank program as a CUDA graph, and replay it on every step that looks the same to the device.

A recording keeps the addresses and the numbers that it was made with. Numbers that change from step to step lie in
tensors instead, which every step fills (`device_scalars`). Buffers and state stay where they are. Gradients may move,
because `zero_grad` frees them by default. So `Replay` records a program after two steps in a row with the same
addresses, and a few times at most. If addresses keep changing, or if something cannot be recorded, the program runs
call by call. `Replay.how` says why.

The recordings of all programs share one pool of memory. That is safe because they never run at the same time, and no
value of a recording is used after it.

NCCL does not shut down while a recording of one of its collectives exists (pytorch#115388). So this module drops all
such recordings before a process group shuts down, no matter which code shuts it down.
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
Recorder = Callable[[Run], Run]  # records a run and returns the function that replays it

# ATen operators that make the host wait for a value from the device. Families are given by the start of the name, and
# LAUNCHING has the exceptions, which launch kernels only.
WAITING = ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "geqrf", "ormqr", "cholesky")
WAITING_FAMILIES = ("linalg_", "_linalg_", "unique", "_unique", "svd", "_svd")
LAUNCHING = frozenset({"linalg_vector_norm", "linalg_matrix_exp", "linalg_cross", "linalg_diagonal"})


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """A recorded run.

    Attributes:
        replay: runs it again.
        laid: for each generated kernel, by name, what its table held when the recording was made.
    """

    replay: Run
    laid: Mapping[str, Laid]


class Replay:
    """Runs one program on CUDA, and records it when it can be replayed.

    Args:
        program: the program, as `emit` wrote it.
        device: the device of its tensors.
        entered: makes the program's streams ready; see `streams`.
        record: makes a recording of a run; None stands for `recorded`.
        wanted: whether to record at all. If not, the program runs call by call.

    Attributes:
        recordings: how many recordings were made so far.
        stopped: why the program is not recorded, or not any more; empty if it may be.
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
        self._numbers: dict[int, Any] | None = None  # by input, the Python numbers of the last step
        self._changing: set[str] = set()  # names of the inputs whose number has changed since the first step
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

        The first step with new addresses runs the program as it is. The second one runs it with its numbers on the
        device. The third one records it, and from then on it is replayed.

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
        except Exception as error:  # from the device or from Triton; nothing was executed
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
        """The generated kernel of this name."""
        kernel = self._split.module.get_submodule(name)
        assert isinstance(kernel, GroupedKernel)
        return kernel

    def _resume(self, laid: Mapping[str, Laid]) -> bool:
        """Restore the tables of generated kernels to what a recording was made with, with the numbers of this step.

        Args:
            laid: from the recording.

        Returns:
            Whether all tables could be restored. If not, all recordings are dropped.
        """
        for name, own in laid.items():
            numbers = [[self._values[i] for i in part] for part in self._split.tables[name]]
            if not self._kernel(name).resume(own, numbers):
                self.forget()
                return False
        return True

    def _plainly(self, arguments: Sequence[Any]) -> None:
        """Run the program as it was emitted, call by call."""
        with self.entered():
            self.plain(*arguments)

    def _on_device(self, arguments: Sequence[Any]) -> None:
        """Run the program call by call, with its numbers on the device, as it is recorded."""
        with self.entered():
            self._split.module(*arguments, *self._values)

    def _stop(self, why: str) -> None:
        """Never record the program again."""
        self.stopped = why
        self.forget()

    def forget(self) -> None:
        """Drop all recordings, so that NCCL can destroy its communicators."""
        self._known.clear()
        self._last = None

    def _look(self, arguments: Sequence[Any]) -> Hashable | None:
        """Compute the numbers of this step, and find what a recording of it would keep.

        Args:
            arguments: one per input of the program.

        Returns:
            The addresses, and the numbers that operators keep. None if a tensor is on the CPU: work on that tensor
            would happen only once, while the recording is made.
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
        """Choose again which numbers lie on the device, and drop all recordings."""
        self._split = with_device_numbers(self.program, numbers, self._changing)
        self._values: list[Any] = [
            DeviceNumber(self.device) if kind == "device" else None for kind in self._split.kinds
        ]
        self.forget()
        self._tried = 0

    def _fill(self) -> None:
        """Write the numbers of this step to the device, on the caller's stream."""
        for value, wanted in zip(self._values, self._wanted, strict=True):
            if isinstance(value, DeviceNumber):
                value.fill(wanted)


def recorded(run: Run, device: torch.device) -> Run:
    """Record what a run launches, as a CUDA graph.

    Other threads, such as NCCL's watchdog, may use the device meanwhile. Only this thread may not do what cannot be
    recorded.

    Args:
        run: launches the work.
        device: the device of the work.

    Returns:
        A function that replays the recording.

    Raises:
        Exception: something in the run cannot be recorded. Nothing was executed, and the device is as it was before.
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
    """End what torch leaves open after a failed recording, because `CUDAGraph::capture_end` raises too early.

    Otherwise the allocator would behave as if the recording went on: memory that a stream has used would never be free
    again, and `empty_cache` would fail. In older versions of torch the random generator would refuse to draw numbers.
    The end of any recording corrects that, so this function makes a small one.

    Args:
        graph: the CUDA graph whose recording failed.
        device: the index of the device.
        pool: the memory pool of the recording.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # torch left nothing open
        return
    torch._C._cuda_releasePool(device, pool)
    pool_of.cache_clear()
    broken.append(graph)  # it has to stay alive: allocators of pinned memory may still ask it about its stream
    stream = stream_named("record", device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=torch.device("cuda", device))


broken: list[Any] = []  # CUDA graphs whose recording failed


@functools.cache
def pool_of(device: int) -> Any:
    """The pool of memory that all recordings on a device share."""
    return torch.cuda.graph_pool_handle()


@functools.cache
def with_collectives() -> weakref.WeakSet[Replay]:
    """The programs whose recordings contain collectives. Process groups drop these recordings before they shut down.

    For that the first call replaces two methods of `ProcessGroup`. Nothing else runs early enough: `atexit` and
    finalizers come after `destroy_process_group`, which would hang. The methods of an instance cannot be replaced,
    because instances take no attributes. A hook that torch calls before a process group shuts down would make this
    unnecessary, and so would an NCCL that ends recordings itself.
    """
    found: weakref.WeakSet[Replay] = weakref.WeakSet()
    for name in ("shutdown", "abort"):
        setattr(dist.ProcessGroup, name, after_forgetting(getattr(dist.ProcessGroup, name), found))
    return found


def after_forgetting(end: Callable[..., None], replays: weakref.WeakSet[Replay]) -> Callable[..., None]:
    """Wrap a method of `ProcessGroup` so that it drops all recordings first.

    Args:
        end: the method, which shuts a process group down.
        replays: the programs whose recordings are dropped.
    """

    @functools.wraps(end)
    def ended(process_group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        for replay in list(replays):
            replay.forget()
        end(process_group, *args, **kwargs)

    return ended


def obstacle(program: Program) -> str:
    """Why a program cannot be recorded, as far as its code shows; empty if nothing speaks against it."""
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
    """The backend for CUDA tensors. The default process group may have another one for each kind of device."""
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return next((backend for device, backend in pairs if device == "cuda"), "no backend for CUDA")


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
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.partition("::")[2]
        waits = name in WAITING or name.startswith(WAITING_FAMILIES)
        return f"{name} makes the host wait" if waits and name not in LAUNCHING else ""
    home = str(getattr(target, "__module__", ""))
    ours = home == program_ops.__name__ or home.partition(".")[0] in ("_operator", "builtins", "math", "torch")
    return "" if ours else f"it calls {getattr(target, '__name__', type(target).__name__)}, which may not be recorded"
