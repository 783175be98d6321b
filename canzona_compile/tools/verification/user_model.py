"""The user's `build`: it is loaded, called and checked, and its parameters get the names that the user knows."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import canzona_compile.errors as errors
from canzona_compile.api.holders import inside, members_of
from canzona_compile.api.wrapped_class import is_wrapped
from canzona_compile.compat.torch_private import pytree
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.replica.twin import check_step_signature
from canzona_compile.session.params import named_params

Loss = Callable[[nn.Module, int], Tensor]
Build = Callable[..., tuple[nn.Module, Optimizer] | tuple[nn.Module, Optimizer, Loss]]
Leaves = dict[tuple[str, str], Any]  # (parameter, leaf) -> value

PARAMETER = "parameter"  # the leaf that is the parameter itself
RETURNS = "return (model, optimizer) or (model, optimizer, loss), plain and on the CPU"
MESH = {  # what `build` takes, by whether the optimizer is distributed already
    True: "with as_is=True or --as-is, define build(mesh); verify calls build(None) for the plain optimizer",
    False: "define build(), or pass as_is=True or --as-is for an optimizer that is distributed already",
}
ELSEWHERE = "run in the folder of the module, or set PYTHONPATH"
# Frames of imports and of this folder say nothing. Frames of torch and of this package are named only where there are
# no others, because the user cannot mend anything there.
SILENT = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<")
NOT_THE_USERS = (str(Path(errors.__file__).parent), str(Path(torch.__file__).parent))


class CannotVerify(errors.CanzonaError):
    """`build` gave nothing that can be checked, or its functions raised."""


@contextlib.contextmanager
def blamed(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn an exception inside into an error that says what raised it; errors of this package pass as they are."""
    try:
        yield
    except errors.CanzonaError:
        raise
    except (Exception, SystemExit) as error:  # a module may parse a command line when it is imported
        said = f": {error}" if str(error) else ""
        failure = CannotVerify(f"{what} raised {type(error).__name__}{said}", at=place_of(error), hint=hint)
        failure.add_note("".join(traceback.format_exception(error)).rstrip())
        raise failure from error


def place_of(error: BaseException) -> str | None:
    """`file:line in function`, outside of torch and this package if there is such a frame."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(SILENT)]
    own = [f for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    if not frames:
        return None
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


@dataclass(frozen=True, slots=True)
class Built:
    """A model under test.

    Attributes:
        loss: returns a tensor of one element; None if gradients are random.
        names: those of the optimizer's parameters, in its order.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Loss | None
    names: tuple[str, ...]

    @property
    def params(self) -> list[Tensor]:
        """The optimizer's parameters, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def parameters(self) -> Leaves:
        """What each parameter holds."""
        return {(name, PARAMETER): param.detach() for name, param in zip(self.names, self.params, strict=True)}

    def leaves(self) -> Leaves:
        """Parameters, and state as `state_dict` shows it. All ranks have to call this once the optimizer is wrapped."""
        state = self.optimizer.state_dict()["state"]
        found: Leaves = {}
        for i, (name, param) in enumerate(zip(self.names, self.params, strict=True)):
            found[name, PARAMETER] = param.detach()
            found.update(((name, leaf), value) for leaf, value in state_leaves(state.pop(i, {})))
        found.update((("", leaf), value) for leaf, value in state_leaves(state))  # state of no parameter
        return found


def state_leaves(state: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples, with names such as "factors.0"."""
    for path, value in pytree.tree_flatten_with_path(state)[0]:
        yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), value


# -- before any process starts ---------------------------------------------------------------------


def packed(build: Build | str) -> str | bytes:
    """What other processes can load `build` from: its text, or its pickle."""
    if isinstance(build, str):
        module, _, attribute = build.partition(":")
        if not module or not attribute:
            raise CannotVerify(f"{build!r} does not name a build function", hint="module:function, as in train:build")
        return build
    if not callable(build):
        raise CannotVerify(f"build is a {type(build).__name__}, neither a function nor 'module:function'", hint=RETURNS)
    try:
        return pickle.dumps(build)
    except Exception as error:  # pickle raises whatever an object's own methods do
        raise CannotVerify(
            f"build cannot be sent to other processes: {error}",
            at=name_of(build),
            hint="define it at the top level of a module, or pass 'module:function'",
        ) from error


def name_of(build: Build | str) -> str:
    """The text module:function that names `build`."""
    if isinstance(build, str):
        return build
    return f"{build.__module__}:{getattr(build, '__qualname__', type(build).__qualname__)}"


# -- in a process ----------------------------------------------------------------------------------


def built(build: str | bytes, seed: int, *given: None) -> Built:
    """Seed, call `build` and check what it returned: a plain optimizer.

    Args:
        given: what `build` is called with: nothing, or None in place of a mesh.
    """
    _, model, optimizer, loss = returned(build, seed, *given)
    if is_wrapped(optimizer):
        raise CannotVerify("build() returned a wrapped optimizer", hint="return the plain optimizer")
    if not given:
        for own in members_of(inside(optimizer)):
            check_step_signature(type(own))
    found = Built(model, optimizer, loss, names_of(model, optimizer))
    check_params(found)
    return found


def returned(build: str | bytes, seed: int, *given: Any) -> tuple[str, nn.Module, Any, Loss | None]:
    """Seed, call `build`, and check that it returned a model, an optimizer and perhaps a loss; its name before them."""
    function = loaded(build)
    with contextlib.suppress(ValueError):  # some callables have no signature
        try:
            signature(function).bind(*given)
        except TypeError as error:
            asked = "takes no mesh" if given else "needs arguments"
            raise CannotVerify(f"build {asked}: {error}", at=name_of(function), hint=MESH[bool(given)]) from None
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    with blamed("build()"):
        made: Any = function(*given)
    count = len(made) if isinstance(made, tuple) else 0
    if count not in (2, 3):
        returned = f"a tuple of {count}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise CannotVerify(f"build() returned {returned}", at=name_of(function), hint=RETURNS)
    model, optimizer, loss = (*made, None)[:3]
    steps = given not in ((), (None,)) and callable(getattr(optimizer, "step", None))  # a framework's own class
    for what, value, right in (
        ("a torch.nn.Module as the first element", model, isinstance(model, nn.Module)),
        ("a torch.optim.Optimizer as the second element", optimizer, isinstance(optimizer, Optimizer) or steps),
        ("a function loss(model, step) as the third element", loss, loss is None or callable(loss)),
    ):
        if not right:
            problem = f"build() must return {what}, not a {type(value).__name__}"
            raise CannotVerify(problem, at=name_of(function), hint=RETURNS)
    return name_of(function), model, optimizer, loss


def loaded(build: str | bytes) -> Build:
    """The function that `packed` was given."""
    if isinstance(build, bytes):
        with blamed("loading build", "define it in a module that other processes can import, not in a notebook"):
            function: Build = pickle.loads(build)
        return function
    module, _, attribute = build.partition(":")
    with blamed(f"importing {module}", ELSEWHERE):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:  # of this module, or of one that it imports
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            raise CannotVerify(f"there is no module {error.name!r}", at=build, hint=ELSEWHERE) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CannotVerify(f"{module} has no {attribute!r}", at=getattr(found, "__file__", None))
        found = getattr(found, part)
    if not callable(found):
        raise CannotVerify(f"{build} is a {type(found).__name__}, not a function", hint=RETURNS)
    return found  # type: ignore[no-any-return]


def names_of(model: nn.Module, optimizer: Optimizer) -> tuple[str, ...]:
    """The model's names of the parameters; the optimizer's where the model does not have a parameter."""
    names = {id(p): name for name, p in canonical_params(model).items()}
    return tuple(names.get(id(p), name) for name, _, p in named_params(optimizer))


def check_params(found: Built) -> None:
    """Refuse an optimizer without parameters, and parameters that are sharded or not on the CPU."""
    if not found.params:
        raise CannotVerify("the optimizer has no parameters", hint="build it from model.parameters()")
    for name, param in zip(found.names, found.params, strict=True):
        if isinstance(param, DTensor):
            raise CannotVerify(
                "the parameter is already sharded", at=name, hint="return an unsharded model; verify shards it"
            )
        if param.device.type != "cpu":
            raise CannotVerify(f"the parameter is on {param.device}", at=name, hint="build on the CPU")
