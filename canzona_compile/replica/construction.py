"""Construct an optimizer again: call its class's own constructor for other parameters, as the user called it.

What the user passed is not recorded anywhere. It is recovered by name, and then a constructed optimizer is compared
with the real one: an argument that was stored under another name shows as a difference, so no wrong guess stays
unnoticed.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import FakeTensorMode
from canzona_compile.errors import some
from canzona_compile.replica.copies import deep_copy
from canzona_compile.replica.homes import HOOKS, hypers, odd_state, own_attributes
from canzona_compile.replica.memory import memory_of
from canzona_compile.replica.miniature import public
from canzona_compile.replica.raised import blamed, first_line
from canzona_compile.replica.snapshot import ATOMS, Contents, Snapshot, changed

ParamGroup = Mapping[str, Any]
GroupForm = Callable[[Sequence[ParamGroup]], list[Any]]
NOT_GIVEN = inspect.Parameter.empty
COLLECTED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class NotConstructible(Exception):
    """The optimizer cannot be constructed again; the message says why."""


@dataclass(frozen=True, eq=False, slots=True)
class Construction:
    """How to construct an optimizer.

    Attributes:
        kind: the class that the user wrote.
        positional: the arguments after the parameters that have no names.
        named: the other arguments.
        form: makes the first argument of parameter groups.
        atoms: the plain values that the real optimizer has as attributes; users may have changed them.
    """

    kind: type[Optimizer]
    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    form: GroupForm
    atoms: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, began: Sequence[ParamGroup] = (), counting: Container[str] = ()) -> Construction:
        """Find out how an optimizer was constructed, and check it.

        Args:
            optimizer: the optimizer, which has taken no step by itself.
            began: the hyperparameters of its groups when it was wrapped, as its constructor saw them.
            counting: the attributes in which its steps have been counted since.

        Raises:
            NotConstructible: an argument cannot be found, the constructor fails, or makes something else.
        """
        kind = plain_class(optimizer)
        positional, named = arguments(optimizer)
        problem: NotConstructible | None = None
        for form in forms(optimizer):
            made = cls(kind, positional, named, form, atoms_of(optimizer))
            try:
                check_likeness(optimizer, made, began, counting)
            except NotConstructible as found:
                problem = problem or found
                continue
            return made
        assert problem is not None
        raise problem

    def copied(self) -> Construction:
        """Copy the arguments, so that what a constructed optimizer writes into them does not reach the real one."""
        own = deep_copy((self.positional, dict(self.named)))
        return Construction(self.kind, own[0], own[1], self.form, self.atoms)

    def renewed(self, optimizer: Optimizer) -> Construction:
        """The same with the arguments and attributes that an optimizer has now."""
        positional, named = arguments(optimizer)
        return Construction(self.kind, positional, named, self.form, atoms_of(optimizer))

    def make(self, groups: Sequence[ParamGroup], began: Sequence[ParamGroup] = ()) -> Optimizer:
        """Construct an optimizer.

        Args:
            groups: its parameter groups, with the hyperparameters that they have now.
            began: by group, the hyperparameters that the constructor sees. It may keep some of them elsewhere, and does
                not see that they change later. Groups beyond these have the ones of now.

        Raises:
            NotConstructible: the constructor fails, or arranges parameters in other groups.
        """
        constructor: Any = self.kind
        first = [{**group, **hypers(began[g] if g < len(began) else {})} for g, group in enumerate(groups)]
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")  # the user has seen them
                made: Optimizer = constructor(self.form(first), *self.positional, **self.named)
        except Exception as error:  # whatever its code raises
            name = self.kind.__name__
            raise NotConstructible(f"{name}'s constructor fails: {first_line(error)}{blamed(error)}") from error
        arranged = [[id(p) for p in group["params"]] for group in made.param_groups]
        if arranged != [[id(p) for p in group["params"]] for group in groups]:
            raise NotConstructible(
                "its constructor makes different parameter groups from those that the optimizer has now"
            )
        for own, group in zip(made.param_groups, groups, strict=True):
            own.update(hypers(group))
        vars(made).update(self.atoms)
        return made


def arguments(optimizer: Optimizer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Recover the arguments of an optimizer's constructor, without the parameters.

    An argument is looked for by its name: among the defaults of parameter groups, which hold what was passed, in the
    first group, as an attribute, as an attribute with an underscore. What is nowhere keeps the signature's default.

    Returns:
        The positional arguments, and those with names.

    Raises:
        NotConstructible: an argument without a default is nowhere.
    """
    kind = plain_class(optimizer)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    signature = list(inspect.signature(kind.__init__).parameters.values())[2:]
    for argument in signature:
        if argument.kind in COLLECTED:
            continue
        value = recovered(optimizer, argument.name, argument.default)
        if value is NOT_GIVEN:
            raise NotConstructible(
                f"{kind.__name__}'s constructor needs {argument.name!r}, which is neither a hyperparameter nor an "
                f"attribute {argument.name} or _{argument.name}"
            )
        if argument.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[argument.name] = value
    return tuple(positional), named


def recovered(optimizer: Optimizer, name: str, default: Any) -> Any:
    """Find the value that a constructor was given for an argument; `default` if it is nowhere."""
    homes: list[Mapping[str, Any]] = [optimizer.defaults, *optimizer.param_groups[:1]]
    for home in homes:
        if name in home and name != "params":
            return home[name]
    own = vars(optimizer)
    return own.get(name, own.get(f"_{name}", default))


def forms(optimizer: Optimizer) -> list[GroupForm]:
    """List the forms in which the constructor may take parameters, the likeliest first."""
    groups = optimizer.param_groups
    named = any(group.get("param_names") for group in groups)
    found: list[GroupForm] = [as_named_groups, as_groups] if named else [as_groups]
    if len(groups) == 1:
        plain: list[GroupForm] = [as_named_list, as_list] if named else [as_list]
        extra = hypers(groups[0]).keys() - optimizer.defaults.keys() - {"initial_lr"}
        found = [*found, *plain] if extra else [*plain, *found]
    return found


def as_list(groups: Sequence[ParamGroup]) -> list[Any]:
    """The parameters of one group."""
    return list(groups[0]["params"])


def as_groups(groups: Sequence[ParamGroup]) -> list[Any]:
    """Dicts of parameters and hyperparameters."""
    return [{**hypers(group), "params": list(group["params"])} for group in groups]


def as_named_list(groups: Sequence[ParamGroup]) -> list[Any]:
    """The parameters of one group with their names."""
    return list(zip(names_in(groups[0]), groups[0]["params"], strict=True))


def as_named_groups(groups: Sequence[ParamGroup]) -> list[Any]:
    """Dicts of parameters with their names, and hyperparameters."""
    return [{**hypers(group), "params": list(zip(names_in(group), group["params"], strict=True))} for group in groups]


def beginnings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters that the groups of an optimizer had when it was constructed, as far as can be known."""
    found = [dict(hypers(group)) for group in vars(optimizer).get("param_groups", [])]
    for group in found:
        if "initial_lr" in group:  # a scheduler was made already
            group["lr"] = group.pop("initial_lr")
    return found


def names_in(group: ParamGroup) -> list[str]:
    """The names of the parameters of a group; made up where it has none."""
    return list(group.get("param_names") or [f"param{i}" for i in range(len(group["params"]))])


def atoms_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that are plain values."""
    return {k: v for k, v in own_attributes(optimizer).items() if isinstance(v, ATOMS)}


# -- the comparison with the real optimizer --------------------------------------------------------


def check_likeness(
    optimizer: Optimizer, construction: Construction, began: Sequence[ParamGroup], counting: Container[str]
) -> None:
    """Raise unless the constructor makes what the real optimizer is.

    It runs on fake tensors of the real shapes. Values of tensors are not compared; all else is, at every place.

    Raises:
        NotConstructible: it fails there, or something differs.
    """
    real = [p for group in optimizer.param_groups for p in group["params"]]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {id(p): fake_of(p) for p in real}
        groups = [{**group, "params": [fakes[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        made = construction.make(groups, began)
        found, wanted = contents(made, list(fakes.values()), counting), contents(optimizer, real, counting)
    if places := changed(wanted, found):
        first = places[0]
        raise NotConstructible(
            f"calling its constructor with the recovered arguments gives a different {some(places)}"
            f" ({told(found.get(first))} instead of {told(wanted.get(first))} for the first): an argument is stored "
            "under another name, or the optimizer was changed later"
        )


def fake_of(param: Tensor) -> nn.Parameter:
    """Make a fake parameter like a real one, of the whole shape and with its attributes. For fake modes."""
    made = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    own = nn.Parameter(made, requires_grad=param.requires_grad)
    vars(own).update({k: v for k, v in public(vars(param)).items() if not isinstance(v, Tensor)})
    return own


def contents(optimizer: Optimizer, params: Sequence[Tensor], counting: Container[str]) -> Contents:
    """Everything that an optimizer holds other than groups and counters, by place, with shapes in place of tensors."""
    place = {id(p): i for i, p in enumerate(params)}

    def label(value: Any) -> str | None:
        if value is optimizer:
            return "the optimizer"
        if isinstance(value, Tensor):
            here = place.get(id(value))
            return f"parameter {here}" if here is not None else f"{list(value.shape)} of {value.dtype}"
        if isinstance(value, int) and value in place:
            return f"the id of parameter {place[value]}"
        return None

    walk = Snapshot(label)
    own = own_attributes(optimizer)
    walk.add_home("self", {k: v for k, v in own.items() if k != "defaults" and k not in counting})
    walk.add_home("self.state", odd_state(optimizer))
    return walk.found


def told(found: Any) -> str:
    """Say what `contents` found at a place."""
    if isinstance(found, tuple) and len(found) == 2:
        return repr(found[1])
    return "nothing" if found is None else str(found)


@contextlib.contextmanager
def uninitialised_memory_filled() -> Iterator[None]:
    """Inside this context `torch.empty` gives the same values every time."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def reads_values(construction: Construction, groups: Sequence[ParamGroup]) -> list[str]:
    """Find the places where the constructor keeps what depends on values of parameters.

    Args:
        construction: how to construct the optimizer.
        groups: parameter groups with small parameters.
    """
    params = [p for group in groups for p in group["params"]]
    index = {memory: i for i, p in enumerate(params) for memory in memory_of(p)}

    def made() -> Contents:
        with uninitialised_memory_filled():
            optimizer = construction.copied().make(groups)
        named = [(optimizer, "the optimizer"), *((p, f"parameter {i}") for i, p in enumerate(params))]

        def label(value: Any) -> str | None:
            for memory in memory_of(value) & index.keys():
                return f"parameter {index[memory]}, or a view of it"
            return next((name for known, name in named if value is known), None)

        walk = Snapshot(label)
        for name, value in {**vars(optimizer), "state": dict(optimizer.state)}.items():
            if name not in ("param_groups", *HOOKS):
                walk.add(f"self.{name}", value)
        return walk.found

    before = made()
    with torch.no_grad():
        for param in params:
            param.mul_(3).sub_(1)
    after = made()
    with torch.no_grad():
        for param in params:
            param.add_(1).div_(3)
    return changed(before, after)
