"""Oracles: twins on fake tensors that tell what the optimizer's code does on a step.

An oracle captures the step of one kind of parameter, once per variant of its control flow. On every later step it
answers which variant the step takes, and with which values of lr, momentum and so on. There are two ways to find that
out, see `dynamo_oracle` and `dispatch_oracle`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.compiled_calls import compiled_calls
from canzona_compile.capture.copies import with_own_containers
from canzona_compile.capture.dynamo import eagerly, outside_modes
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.external_counters import Counts, counts_of, give_counts, step_alone
from canzona_compile.capture.leaves import (
    leaf_problem,
    paths_of,
    python_leaves,
    read,
    state_leaves,
    structure_of,
    write,
)
from canzona_compile.capture.no_collectives import NoCollectives
from canzona_compile.capture.provoke import Provoked, Provoker, fallible
from canzona_compile.capture.raised import Note, NotingFakeMode, NotingFunctions, Swallowed
from canzona_compile.capture.twin import NOT_COPIED, hypers, make_twin, rebound, step_plainly
from canzona_compile.capture.variant import Answer, FormChange, ParameterSpec, Scalars, Source, Untraceable, Variant
from canzona_compile.compat.torch_private import FakeTensor, FakeTensorMode, pytree
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.compiled_call import opened

MOST_CONSTANTS = 16  # the most graphs of one path that differ only in constants


Replaced = tuple[int, str, Tensor, Tensor]  # the parameter, the leaf of its state, the tensor before, the tensor now


class TwinMoment(NamedTuple):
    """What a twin holds: the leaves of its state by parameter, its parameter group, its counters elsewhere."""

    leaves: list[dict[str, Any]]
    group: Mapping[str, Any]
    counts: Counts


class Oracle(ABC):
    """Captures the step of one kind of parameter, and answers on every later step which variant it takes.

    Attributes:
        way: how it captures, for reports.
        why: why it captures in this way and not in the one before; empty if there is none before.
        reads_counters: whether graphs compute with hyperparameters and counters, and not with numbers that the step has
            computed of these.
        twin: the optimizer that steps in place of the real one, with parameters that have no values.
        variants: the graphs that it captured, without those in whose place another came.
        first_state: by parameter, the leaves of the state that the twin's first step left.
        structure: the containers of that state.
        paths: where in the state its leaves are.
        counts: the numbers that the first step changed outside of the state.
        calls_compiled: whether the first step called functions that users compiled.
        note: gets the errors that the twin's step meets, as its code may catch them.
    """

    way: ClassVar[str]
    reads_counters: ClassVar[bool]

    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        spec: ParameterSpec,
        count: int = 1,
        bake: set[str] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Capture the step now.

        Args:
            optimizer: the optimizer, of which a twin is made.
            group: the parameter group.
            spec: the shape, the dtypes and the device of the parameter.
            count: the number of such parameters that the twin holds.
            bake: the names of scalars that graphs must hold as constants. This adds the names that it finds.
            state: an example of a parameter's state; None takes the state that the first step leaves.

        Raises:
            Untraceable: the step cannot be captured.
            UnsupportedOptimizer: the optimizer communicates by itself, or keeps statistics outside of its state.
        """
        self.why = ""
        self.bake = set() if bake is None else bake
        self.variants: list[Variant] = []
        self.note = Note()
        self._known_to_raise: set[Variant] = set()
        self._mode = self._fake_mode()
        group = one_by_one(group)
        with self._mode, NoCollectives():
            self._params = [self._parameter(spec) for _ in range(count)]
            group = {k: self._mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in group.items()}
            self.twin = make_twin(optimizer, group, self._params)
            self._first_step()
            if state is not None:
                for param in self._params:
                    self.twin.state[param] = pytree.tree_map(blank_like, dict(state))
        self.first_state = self.snapshot()
        self.structure = structure_of(self.twin_state())
        self.paths = paths_of(self.structure)
        if problem := leaf_problem(self.twin_state(), self.paths):
            raise Untraceable(problem)
        self._counters = list(python_leaves(self.twin_state()))
        self.prepare()
        self.consult(hypers(self.twin.param_groups[0]), self.counts)
        self.rewind()

    # -- what the ways differ in -------------------------------------------------------------

    def _fake_mode(self) -> FakeTensorMode:
        """Make the mode under which the twin lives."""
        return NotingFakeMode(self.note)

    @abstractmethod
    def prepare(self) -> None:
        """Get ready, after the twin has taken its first step."""

    @abstractmethod
    def ask(self) -> Answer:
        """Let the twin step, and find out what its code did.

        Raises:
            Untraceable: the step takes a path that cannot be captured.
        """

    # -- questions ---------------------------------------------------------------------------

    def consult(self, group: Mapping[str, Any], counts: Counts | None = None) -> tuple[Variant, Scalars]:
        """Find out what the step does with the present hyperparameters. Counters in the state advance on the twin.

        Args:
            group: the parameter group.
            counts: the numbers that the optimizer keeps elsewhere, see `surroundings`.

        Returns:
            The variant that the step takes, and the values of its scalars by name.

        Raises:
            Untraceable: the step takes a path that cannot be captured.
        """
        group = self.set_numbers(group, counts)
        before = self.snapshot()
        try:
            variant, scalars, returned = self.ask()
            replaced = self.replaced(before)
            if variant not in self._known_to_raise:
                self.check_errors(variant, TwinMoment(before, group, counts or {}))
                self._known_to_raise.add(variant)
            self._put_back(replaced, variant, returned)
        except Untraceable:  # other parameters may still be at steps that can be captured
            for param in self._params:
                for key in self.twin.state[param].keys() - self.structure.keys():
                    del self.twin.state[param][key]
            self.put_leaves(before)
            raise
        real = {k: v for k, v in hypers(group).items() if isinstance(v, Tensor)}
        read = {source[1] for source in variant.sources if source[0] == "scalar"}
        return variant, {**scalars, **{name: value for name, value in real.items() if name in {*scalars, *read}}}

    def set_numbers(self, group: Mapping[str, Any], counts: Counts | None = None) -> dict[str, Any]:
        """Give the twin hyperparameters and counters for its next step, and return them as it sees them."""
        give_counts(self.twin, counts or {}, self.counts)
        own, group = self.twin.param_groups[0], one_by_one(group)
        for counter in own.keys() - group.keys() - {"params"}:  # the twin's last step made these
            del own[counter]
        own.update((k, v) for k, v in hypers(group).items() if not isinstance(v, Tensor) or k not in own)
        return group

    def check_errors(self, variant: Variant, before: TwinMoment) -> None:
        """Raise if the step catches the error of an operator, because a graph has no such branch.

        Args:
            variant: the graph of the step that the twin has just taken.
            before: what the twin held before it.

        Raises:
            Untraceable: the step goes on when an operator fails.
        """
        now = self.moment()
        for place in range(sum(map(fallible, opened(variant.graph)))):
            self.restore(before)
            provoker = Provoker(place)
            try:
                with outside_modes(), eagerly(), self._mode, provoker:
                    step_plainly(self.twin)
            except Provoked:
                continue
            except Exception as error:  # whatever its code makes of it
                raise Untraceable(f"its step catches the errors of {provoker.failed}: {first_line(error)}") from error
            raise Untraceable(f"its step catches the errors of {provoker.failed}")
        self.restore(now)

    def refresh(self, optimizer: Optimizer) -> None:
        """Give the twin the attributes that the optimizer has now."""
        own = {k: v for k, v in vars(optimizer).items() if k not in NOT_COPIED}
        for name in vars(self.twin).keys() - own.keys() - NOT_COPIED:
            del vars(self.twin)[name]
        own = rebound(own, optimizer, self.twin)
        vars(self.twin).update(with_own_containers(own))

    # -- the twin ----------------------------------------------------------------------------

    def twin_state(self) -> dict[str, Any]:
        """Return the state of the twin's first parameter."""
        state: dict[str, Any] = self.twin.state[self._params[0]]
        return state

    def _parameter(self, spec: ParameterSpec) -> Tensor:
        param = torch.nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device=spec.device))
        if spec.grad_dtype != spec.dtype:
            param.grad_dtype = spec.grad_dtype
        param.grad = torch.empty(spec.shape, dtype=spec.grad_dtype, device=spec.device)
        vars(param).update(spec.marks)
        return param

    def _first_step(self) -> None:
        """Create the twin's state by an eager step on fake tensors."""
        try:
            with self.note.read(), NotingFunctions(self.note), compiled_calls() as calls:
                self.counts = step_alone(self.twin)
        except CanzonaError:
            raise
        except Swallowed as error:
            raise Untraceable(str(error)) from error
        except Exception as error:
            raise Untraceable(f"its step needs tensor values: {first_line(error)}{blamed(error)}") from error
        if any(param.grad is None for param in self._params):
            raise Untraceable("its step drops gradients")
        for param in self._params:  # the next gradient, which is another tensor than one that the state may hold
            param.grad = torch.empty_like(param.grad)  # type: ignore[arg-type]
        self.calls_compiled = calls.happened

    def tensors(self) -> list[tuple[Tensor, Source]]:
        """List the twin's own tensors, each with its source."""
        known: list[tuple[Tensor, Source]] = []
        for i, param in enumerate(self._params):
            known += [(param, ("param", i)), (param.grad, ("grad", i))]  # type: ignore[list-item]
            for name, leaf in state_leaves(self.twin.state.get(param, {})):
                if isinstance(leaf, Tensor):
                    known.append((leaf, ("state", i, name)))
        for name, value in self.twin.param_groups[0].items():
            if isinstance(value, Tensor):
                known.append((value, ("scalar", name)))
        return known

    def source(self, value: Any, name: str) -> Source:
        """Return what an input of a graph stands for; `name` is its name if it is a number."""
        for tensor, source in self.tensors():
            if tensor is value:
                return source
        if isinstance(value, FakeTensor):
            raise Untraceable(f"its step reads a tensor that is neither parameter, gradient nor state: {name}")
        return "scalar", name

    def moment(self) -> TwinMoment:
        """Return what the twin holds now."""
        return TwinMoment(self.snapshot(), hypers(self.twin.param_groups[0]), counts_of(self.twin))

    def restore(self, moment: TwinMoment) -> None:
        """Give the twin what it held at a moment."""
        self.set_numbers(moment.group, moment.counts)
        self.put_leaves(moment.leaves)

    # -- the twin's state --------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        return [dict(state_leaves(self.twin.state.get(p, {}))) for p in self._params]

    def names_of_tensors(self) -> set[str]:
        """Return the names that tensors of the twin have in graphs."""
        return {"param", "grad", *(name for leaves in self.snapshot() for name in leaves)}

    def rewind(self) -> None:
        """Give the twin the state that its first step left."""
        self.put_leaves(self.first_state)

    def put_leaves(self, leaves: list[dict[str, Any]]) -> None:
        """Give the twin a state that `snapshot` returned."""
        for i, own in enumerate(leaves):
            for name, value in own.items():
                self.write_leaf(i, name, value)

    def write_leaf(self, index: int, name: str, value: Any) -> None:
        """Put a leaf into the state of one of the twin's parameters."""
        write(self.twin.state[self._params[index]], self.paths[name], value, {})

    def count(self, counters: Mapping[str, Any]) -> None:
        """Write Python leaves to the twin's state. Names that the state lacks are ignored."""
        for name, value in counters.items():
            if name in self.paths:
                write(self.twin_state(), self.paths[name], value, {})

    def counters(self) -> dict[str, Any]:
        """Return the Python leaves of the twin's state, by name."""
        return {name: read(self.twin_state(), self.paths[name]) for name in self._counters}

    def _put_back(self, replaced: Sequence[Replaced], variant: Variant, returned: Sequence[Any]) -> None:
        """Put back the state tensors that the step replaced on the twin, so that inputs stay identifiable.

        The graph returns each tensor that the step put in place of another one. The variant records its position.
        """
        for i, name, value, new in replaced:
            place = next((k for k, result in enumerate(returned) if result is new), None)
            source = ("state", i, name)
            if place is None:
                raise Untraceable(f"its step puts something in the state {name!r} that no graph computes")
            variant.results[source] = place
            self.write_leaf(i, name, value)

    def replaced(self, before: list[dict[str, Any]]) -> list[Replaced]:
        """Find the state tensors that the twin's step put in place of others.

        Args:
            before: the leaves of the state before the step, by parameter.

        Returns:
            The index of the parameter, the name of the leaf, the tensor before and the tensor now.

        Raises:
            Untraceable: the state is of another form now.
        """
        found = []
        for i, (own, now) in enumerate(zip(before, self.snapshot(), strict=True)):
            if own.keys() != now.keys():
                raise Untraceable(f"its step changes what its state holds: {sorted(own.keys() ^ now.keys())}")
            for name, value in own.items():
                new = now[name]
                if isinstance(value, Tensor) != isinstance(new, Tensor):
                    raise Untraceable(f"its step changes what its state holds: {name!r}")
                if not isinstance(value, Tensor) or new is value:
                    continue
                if (new.shape, new.dtype) != (value.shape, value.dtype):
                    raise Untraceable(f"its step changes the shape or dtype of the state {name!r}")
                if new.stride() != value.stride():
                    raise FormChange(f"its step changes the strides of the state {name!r}")
                found.append((i, name, value, new))
        return found


def one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter group so that its step uses plain operators, not `foreach` or `fused` implementations.

    The graph of such a step shows what work there is. Elementwise work runs in the optimizer's own step with the
    unchanged parameter group. Other graphs must give the bits of that step (`eager_parity`).
    """
    return {**group, **{key: False for key in ("foreach", "fused") if key in group}}


def blank_like(leaf: Any) -> Any:
    """Make a whole tensor like a leaf of a real state, which may be a DTensor. Return other leaves unchanged."""
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return leaf


def matches(variant: Variant, values: Mapping[int, float]) -> bool:
    """Tell whether the constants of a variant have the present values of the scalars, by position."""
    return all(values[i] == value for i, value in variant.baked.items())


def unlike(name: str, taken: set[str]) -> str:
    """Return a hyperparameter's name, with a suffix if a tensor of the step has the same name."""
    return f"{name}_hyper" if name in taken else name
