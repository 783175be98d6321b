"""What an optimizer's step raises: in trials, where the step may catch it, and the line of its code that it comes from.

Fake tensors have no values, and our modes refuse calls. A step that caught an error of theirs took a way that the real
step does not take, whatever it did afterwards. So errors are noted where they are raised, and whoever ends the trial
looks at the note. Other errors depend on values, and no trial meets them: these are provoked.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from canzona_compile.compat.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer

# Frames in these folders belong to torch and to this package, and are not the cause of an error.
MACHINERY = (Path(torch.__file__).parent, Path(__file__).parents[1])
OPTIMIZERS = MACHINERY[0] / "optim"
# Operators that fail for some values of their operands.
FALLIBLE = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_eigvals",
    "linalg_eig",
    "_linalg_svd",
    "linalg_lstsq",
    "cholesky",
}

Ours = TypeVar("Ours", bound=CanzonaError)
READS_NUMBERS = "its step reads a number of a tensor on the host, as .item() does"


class Untraceable(Exception):
    """The step cannot be captured, and the message says why."""


class Swallowed(Untraceable):
    """The step caught an error of its trial, and the message says which."""


class Note:
    """Notes the first error of a trial.

    Attributes:
        error: it; an error for the user has precedence over others. None if there is none.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def add(self, error: BaseException) -> None:
        """Note an error that is raised."""
        if self.error is None or (isinstance(error, CanzonaError) and not isinstance(self.error, CanzonaError)):
            self.error = error

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Around a trial: raise what its code caught, and forget it, because it holds all that called the trial."""
        self.error = None
        try:
            try:
                yield
            except BaseException:
                self._raise_refusal()
                raise
            self._raise_refusal()
            if isinstance(self.error, Swallowed):
                raise self.error
            if self.error is not None:
                problem = f"its step catches an error that only its capture has: {first_line(self.error)}"
                raise Swallowed(f"{problem}{blamed(self.error)}") from self.error
        finally:
            self.error = None

    def _raise_refusal(self) -> None:
        if isinstance(self.error, CanzonaError):
            raise self.error

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function note what it raises."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                self.add(error)
                raise

        return noted


class NotingFakeMode(FakeTensorMode):
    """A mode of fake tensors that notes what their operators raise."""

    def __init__(self, note: Note, **options: Any) -> None:
        super().__init__(**options)
        self.note, self._inside = note, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:  # torch's own code called this, and may go on by itself
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._inside = True
        try:
            with unwatched() if func.namespace == "aten" else contextlib.nullcontext():
                return super().__torch_dispatch__(func, types, args, kwargs)
        except BaseException as error:
            self.note.add(error)
            raise
        finally:
            self._inside = False


WATCHES_STEPS = "watches_steps"  # the attribute of functions for `sys.setprofile` that look for calls of users' code


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside this context, where torch's operators run, nobody looks for calls of users' code; that takes longer."""
    watch = sys.getprofile()
    if not hasattr(watch, WATCHES_STEPS):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)


class NotingShapeEnv(ShapeEnv):
    """Gives numbers without values for what is read of fake tensors on the host, and notes questions about them.

    Such a number can be computed with, and scale a tensor. What code asks of it, such as which of two is larger, raises
    where no operator is called.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a question about numbers."""
        try:
            return super().evaluate_expr(*args, **kwargs)
        except BaseException as error:
            self.note.add(error)
            raise


class NotingFunctions(TorchFunctionMode):
    """Notes what functions and methods of torch raise that call no operator, such as `numpy` of a fake tensor."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except BaseException as error:
            self.note.add(error)
            raise


class NoCollectives(TorchDispatchMode):
    """Inside this mode no operator communicates. Code may catch the error; then it is raised where the mode ends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused: UnsupportedOptimizer | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check(func)
        return func(*args, **(kwargs or {}))

    def check(self, func: Any) -> None:
        """Raise UnsupportedOptimizer if an operator communicates."""
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._refused = UnsupportedOptimizer(
                f"the optimizer communicates by itself ({func})",
                hint="wrap the single-device version of the optimizer; canzona_compile adds the communication",
            )
            raise self._refused

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self._refused is not None and error is not self._refused:
            raise self._refused


# -- errors that depend on values ----------------------------------------------------------------------


def fallible(node: fx.Node) -> bool:
    """Tell whether the operator that a node calls fails for some values of its operands."""
    return isinstance(node.target, OpOverload) and name_of(node.target) in FALLIBLE


def name_of(operator: Any) -> str:
    """Return the name of an operator without namespace and overload."""
    return str(operator._schema.name.partition("::")[2])


class Provoked(LinAlgError):  # type: ignore[misc]
    """What a call raises within a Provoker, which does not keep it: its frames lead to the optimizer."""


class Provoker(TorchDispatchMode):
    """Inside this mode one call fails of those that may, with an error of the type that linear algebra raises."""

    def __init__(self, place: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed, self._left = "", place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.failed and name_of(func) in FALLIBLE:
            if not self._left:
                self.failed = str(func)
                raise Provoked("provoked, to see whether the step catches it")
            self._left -= 1
        return func(*args, **(kwargs or {}))


# -- where an error comes from -------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def failed_on(rank: int, error: BaseException) -> CanzonaError:
    """Make the error that other ranks raise where the step of a rank failed: the first line of its error, and what to
    do about that if it says so."""
    return CanzonaError(f"the step failed on rank {rank}: {first_line(error)}", hint=getattr(error, "hint", None))


def note_rank(rank: int, error: Exception) -> None:
    """Say on which rank a step failed, below an error that is the optimizer's or torch's and does not say it."""
    if not isinstance(error, CanzonaError):
        error.add_note(f"canzona_compile: this was raised by the step of rank {rank}")


def as_its_own(error: BaseException, said: Ours) -> Ours:
    """Let an error of ours be of the class of an optimizer's own error, too, because users catch that one."""
    ours, theirs = type(said), type(error)
    members = {
        "__module__": ours.__module__,
        "__doc__": ours.__doc__,
        "__reduce__": lambda one: (ours, (one.problem,), vars(one)),  # which pickle finds by its name
    }
    if isinstance(said, theirs):
        return said
    with contextlib.suppress(TypeError):  # its class cannot have another base
        said = type(ours.__name__, (ours, theirs), members)(said.problem, at=said.at, hint=said.hint)
        vars(said).update({name: value for name, value in vars(error).items() if name not in vars(said)})
    return said


def is_meant(error: BaseException) -> bool:
    """Tell whether a statement of the optimizer's code raises an error, and no operation that fails there."""
    last = [*frames_behind(error)][-1:]
    return any(is_optimizer(Path(f.filename)) and re.search(r"\b(raise|assert)\b", f.line or "") for f in last)


def blamed(error: BaseException) -> str:
    """Return the last line of the optimizer's code that led to `error`, as "; file.py, line 12: code", or "".

    Autocast, which gives products other dtypes than the code expects, is named as well.
    """
    frames = [frame for frame in frames_behind(error) if is_optimizer(Path(frame.filename))]
    last = [f"; {Path(own.filename).name}, line {own.lineno}: {(own.line or '').strip()}" for own in frames[-1:]]
    if last and "dtype" in str(error) and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        last.append(" (inside of torch.autocast, which computes products in another dtype: step outside of it)")
    return "".join(last)


@contextlib.contextmanager
def freed_on_error() -> Iterator[None]:
    """Around a step: if it fails, drop what the frames of this package hold, the optimizer and mostly the error too."""
    try:
        yield
    except BaseException as error:
        errors: list[BaseException] = [error]
        for own in errors:
            for frame, _ in traceback.walk_tb(own.__traceback__):
                if MACHINERY[1] in Path(frame.f_code.co_filename).parents:
                    with contextlib.suppress(RuntimeError):  # it runs still
                        frame.clear()
            errors += [e for e in (own.__cause__, own.__context__) if e is not None and e not in errors]
        raise


def frames_behind(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of an exception, then the frames of traced code if Dynamo raised it in a trace."""
    yield from traceback.extract_tb(error.__traceback__)
    yield from getattr(error, "real_stack", None) or ()


def is_optimizer(path: Path) -> bool:
    """Tell whether a source file may hold the code of an optimizer."""
    if path.name.startswith("<"):
        return False
    return OPTIMIZERS in path.parents or not any(folder in path.parents for folder in MACHINERY)
