"""A twin of an optimizer on parameters that have no values: what it holds, and how it steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.compiled_calls import compiled_calls
from canzona_compile.capture.dynamo import eagerly, outside_modes
from canzona_compile.capture.variant import FormChange, Source, StepInputs
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError
from canzona_compile.rehearsal.diagnosis import changes_elsewhere
from canzona_compile.replica.copies import with_own_containers
from canzona_compile.replica.external_counters import Counts, changed_places, counts_of, give_counts, step_alone
from canzona_compile.replica.homes import NOT_COPIED, copied_attributes, hypers
from canzona_compile.replica.leaves import paths_of, python_leaves, read, state_leaves, structure_of, write
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.replica.raised import (
    NoCollectives,
    Note,
    NotingFakeMode,
    NotingFunctions,
    NotingShapeEnv,
    Swallowed,
    Untraceable,
    blamed,
    first_line,
)
from canzona_compile.replica.twin import make_twin, rebound, step_plainly

NEEDS_VALUES = "its step needs tensor values"

Replaced = tuple[str, Tensor, Tensor]  # the leaf of the state, the tensor before, the tensor now


class FakeTwin:
    """A twin that steps parameters which have no values.

    Attributes:
        spec: the shape, the dtypes and the device of the parameters.
        param: the first one of them, whose state the methods are about.
        twin: the optimizer that steps them in place of the real one.
        first_leaves: the leaves of the state that the first step left.
        counts: the numbers that the first step changed outside of the state.
        calls_compiled: whether the first step called functions that users compiled.
        note: gets the errors that steps meet, as their code may catch them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        like: ParamExample,
        with_numbers: bool,
        specs: Sequence[ParameterSpec] = (),
        mode: NoCollectives | None = None,
    ) -> None:
        """Make the twin, and take its first step.

        Args:
            like: what its parameters are like. Without state they keep the state that the first step leaves.
            with_numbers: whether numbers that are read of tensors can be computed with, though they have no values.
        """
        self.note, self.spec = Note(), like.spec
        self.mode = NotingFakeMode(self.note, shape_env=NotingShapeEnv(self.note) if with_numbers else None)
        with self.mode, mode or NoCollectives():
            self.params = list(map(without_values, specs or [like.spec]))
            group = one_by_one(like.group)
            own = {k: self.mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in group.items()}
            self.param, self.twin = self.params[0], make_twin(optimizer, own, self.params)
            self._first_step()
            if like.state is not None:
                self.twin.state.update((param, blank_state(like.state)) for param in self.params)
        if places := changed_places(self.twin, self._others):
            raise changes_elsewhere(optimizer, places)
        self.first_leaves = self.leaves()
        self.structure = structure_of(self.state)
        self.paths = paths_of(self.structure)
        self._counters = list(python_leaves(self.state))

    # -- steps -------------------------------------------------------------------------------------------

    def attempt(self, step: Callable[[], Any], problem: str = NEEDS_VALUES) -> None:
        """Take a step. An error voids the recording, also one of the recording alone that the step catches."""
        try:
            with self.note.read():
                step()
        except (CanzonaError, Swallowed):
            raise
        except Untraceable as error:
            raise Untraceable(f"{error}{blamed(error)}") from error
        except Exception as error:
            raise Untraceable(f"{problem}: {first_line(error)}{blamed(error)}") from error

    def step_eagerly(self, mode: AbstractContextManager[Any]) -> None:
        """Let the twin step as written, inside a mode."""
        with outside_modes(), eagerly(), NotingFunctions(self.note), self.mode, mode:
            step_plainly(self.twin)

    def _first_step(self) -> None:
        """Create the state by an eager step on fake tensors."""

        def first() -> None:
            with NotingFunctions(self.note), compiled_calls() as calls:
                self.counts, self._others = step_alone(self.twin)
            self.calls_compiled = bool(calls)

        self.attempt(first)
        for param in self.params:
            if param.grad is None:
                raise Untraceable("its step drops gradients")
            param.grad = torch.empty_like(param.grad)  # another tensor than one that the state may hold

    # -- numbers and attributes --------------------------------------------------------------------------

    def set_numbers(self, group: Mapping[str, Any], counts: Counts | None = None) -> dict[str, Any]:
        """Give the twin hyperparameters and counters for its next step, and return them as it sees them."""
        give_counts(self.twin, counts or {}, self.counts)
        own, group = self.twin.param_groups[0], one_by_one(group)
        for counter in own.keys() - group.keys() - {"params"}:  # the twin's last step made these
            del own[counter]
        for name, value in hypers(group).items():
            if not isinstance(value, Tensor) or name not in own:
                own[name] = value
            elif form_of(own[name]) != form_of(value):
                raise Untraceable(f"the hyperparameter {name} has another form now")
        return group

    def refresh(self, optimizer: Optimizer) -> None:
        """Give the twin the attributes that the optimizer has now."""
        own = copied_attributes(optimizer)
        for name in vars(self.twin).keys() - own.keys() - NOT_COPIED:
            del vars(self.twin)[name]
        with self.mode:  # in which scratch has no values
            own = rebound(own, optimizer, self.twin)
        vars(self.twin).update(with_own_containers(own))

    def counters(self) -> dict[str, Any]:
        """Return the Python leaves of the state, by name."""
        return {name: read(self.state, self.paths[name]) for name in self._counters}

    # -- tensors and state -------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The state of the twin's parameter."""
        found: dict[str, Any] = self.twin.state[self.param]
        return found

    def leaves(self) -> dict[str, Any]:
        """Return the leaves of the state, by name."""
        return dict(state_leaves(self.twin.state.get(self.param, {})))

    def set_leaves(self, leaves: Mapping[str, Any]) -> None:
        """Write leaves to the state. Names that it lacks are ignored."""
        for name, value in leaves.items():
            if name in self.paths:
                write(self.state, self.paths[name], value, {})

    def moment(self) -> StepInputs:
        """Return what the twin holds now, with the tensors of its state."""
        return StepInputs(hypers(self.twin.param_groups[0]), self.leaves(), counts_of(self.twin))

    def restore(self, moment: StepInputs) -> None:
        """Give the twin what it held at a moment."""
        self.set_numbers(moment.group, moment.elsewhere)
        self.set_leaves(moment.leaves)

    def tensors(self) -> list[tuple[Tensor, Source]]:
        """List the twin's own tensors, each with its source."""
        state = [(leaf, ("state", name)) for name, leaf in self.leaves().items()]
        hyperparameters = [(value, ("scalar", name)) for name, value in self.twin.param_groups[0].items()]
        known = [(self.param, ("param",)), (self.param.grad, ("grad",)), *state, *hyperparameters]
        return [(value, source) for value, source in known if isinstance(value, Tensor)]

    def replaced(self, before: Mapping[str, Any]) -> list[Replaced]:
        """Find the state tensors that the twin's step put in place of others."""
        now = self.leaves()
        if before.keys() != now.keys():
            raise Untraceable(f"its step changes what its state holds: {sorted(before.keys() ^ now.keys())}")
        found = []
        for name, value in before.items():
            new = now[name]
            if isinstance(value, Tensor) != isinstance(new, Tensor):
                raise Untraceable(f"its step changes what its state holds: {name!r}")
            if not isinstance(value, Tensor) or new is value:
                continue
            if (new.shape, new.dtype) != (value.shape, value.dtype):
                raise Untraceable(f"its step changes the shape or dtype of the state {name!r}")
            if new.stride() != value.stride():
                raise FormChange(f"its step changes the strides of the state {name!r}")
            found.append((name, value, new))
        return found


def one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter group so that its step uses plain operators, not `foreach` or `fused` implementations.

    The graph of such a step shows what work there is. Elementwise work runs in the optimizer's own step with the
    unchanged parameter group. Other graphs must give the bits of that step (`eager_parity`).
    """
    return {**group, **{key: False for key in ("foreach", "fused") if key in group}}


def without_values(spec: ParameterSpec) -> Tensor:
    """Make a parameter that has no values, in a mode of fake tensors."""
    return spec.parameter(lambda dtype: torch.empty(spec.shape, dtype=dtype, device=spec.device))


def blank_state(state: Mapping[str, Any]) -> Any:
    """Make a state like a real one, with a whole tensor for each of its tensors, which may be a DTensor."""
    return pytree.tree_map(
        lambda leaf: (
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            if isinstance(leaf, Tensor)
            else leaf
        ),
        dict(state),
    )


def form_of(value: Any) -> tuple[Any, ...]:
    """What recordings see of a hyperparameter that is a tensor, without its value; of others only their class."""
    return (Tensor, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value),)
