"""Dynamo as tracer and as control-flow oracle.

The optimizer's own step is compiled on a twin with fake tensors, with a backend that computes nothing. The first call
captures the graph. Every later call only evaluates Dynamo's guards, and tells which variant the step takes and with
which values of lr, momentum and so on. So guards, recompiles and dynamic scalars are those of Dynamo.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_compile.capture.dynamo import as_oracle, compiled, compiled_calls
from canzona_compile.capture.error_origin import blamed, first_line
from canzona_compile.capture.external_counters import Counts, give_counts, step_alone
from canzona_compile.capture.functional import functional
from canzona_compile.capture.leaves import (
    leaf_problem,
    paths_of,
    python_leaves,
    read,
    state_leaves,
    structure_of,
    write,
)
from canzona_compile.capture.twin import NOT_COPIED, hypers, make_twin, plain_step
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.ir.layout import Shape

MOST_CONSTANTS = 16  # the most graphs of one path that differ only in constants

Scalars = dict[str, Any]
Source = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the step can see of a parameter besides its values.

    Attributes:
        marks: the attributes that users gave to it, see `twin.marks_of`.
        part: whether it stands for some entries of a stack. Their number differs between ranks, so their kinds are
            apart from those that all ranks have: one could not tell from a name otherwise that it is the same code.
    """

    shape: Shape
    dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device
    marks: tuple[tuple[str, Any], ...] = ()
    part: bool = False


class StepInputs(NamedTuple):
    """What the optimizer's code sees on a step of one parameter besides tensors.

    Attributes:
        group: the parameter group.
        spec: the shape, the dtypes and the device of the parameter.
        counters: the Python leaves of the parameter's state.
        elsewhere: the numbers that the optimizer keeps outside of parameter groups and of the state of parameters.
    """

    group: Mapping[str, Any]
    spec: ParameterSpec
    counters: Mapping[str, Any]
    elsewhere: Counts


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One captured graph of the step.

    Attributes:
        graph: the functional graph.
        sources: what each placeholder stands for: ("param", i), ("grad", i), ("state", i, leaf) or ("scalar", name).
        results: by source, the position of its new value in the output tuple. A source that the step does not write
            keeps its value. A state tensor that the step replaces without reading it appears here only.
        baked: by position of a scalar input, the value that the graph holds as a constant.
    """

    graph: fx.Graph
    sources: tuple[Source, ...]
    results: dict[Source, int]
    baked: Mapping[int, float]


class Untraceable(Exception):
    """The step cannot be captured, and the message says why. The task is interpreted instead."""


class _NoCollectives(TorchDispatchMode):
    """Refuses an optimizer that communicates by itself, before it does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            raise UnsupportedOptimizer(
                f"the optimizer communicates by itself ({func})",
                hint="wrap the single-device version of the optimizer; canzona_compile adds the communication",
            )
        return func(*args, **(kwargs or {}))


class Oracle:
    """Captures the step of one kind of parameter, and answers on every later step which variant it takes."""

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
        self._bake = set() if bake is None else bake
        self.variants: list[Variant] = []
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._asked: tuple[Variant, Scalars] | None = None
        self._returned: tuple[Any, ...] = ()
        group = one_by_one(group)
        with self._mode, _NoCollectives():
            self._params = [self._parameter(spec) for _ in range(count)]
            group = {k: self._mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in group.items()}
            self.twin = make_twin(optimizer, group, self._params)
            self._first_step()
            if state is not None:
                for param in self._params:
                    self.twin.state[param] = pytree.tree_map(blank_like, dict(state))
        self.first_state = self._snapshot()
        self.structure = structure_of(self.twin_state())
        self.paths = paths_of(self.structure)
        if problem := leaf_problem(self.twin_state(), self.paths):
            raise Untraceable(problem)
        self._counters = list(python_leaves(self.twin_state()))
        # What users compiled would, after a break, run machine code on fake tensors, which have no memory.
        self._step = compiled(plain_step(type(self.twin)), self._backend, unbroken=self._calls_compiled)
        for tensor, _ in self._tensors():
            torch._dynamo.mark_static(tensor)
        self.consult(hypers(self.twin.param_groups[0]), self.counts)
        self.rewind()

    def refresh(self, optimizer: Optimizer) -> None:
        """Give the twin the attributes that the optimizer has now."""
        own = {k: v for k, v in vars(optimizer).items() if k not in NOT_COPIED}
        for name in vars(self.twin).keys() - own.keys() - NOT_COPIED:
            del vars(self.twin)[name]
        vars(self.twin).update({k: copy.copy(v) if isinstance(v, list | dict | set) else v for k, v in own.items()})

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
            with compiled_calls() as calls:
                self.counts = step_alone(self.twin)
        except CanzonaError:
            raise
        except Exception as error:
            raise Untraceable(f"its step needs tensor values: {first_line(error)}{blamed(error)}") from error
        self._calls_compiled = calls.happened

    def consult(self, group: Mapping[str, Any], counts: Counts | None = None) -> tuple[Variant, Scalars]:
        """Evaluate Dynamo's guards for the present hyperparameters. Counters in the state advance on the twin.

        Args:
            group: the parameter group.
            counts: the numbers that the optimizer keeps elsewhere, see `surroundings`.

        Returns:
            The variant that the step takes, and the values of its scalars by name.

        Raises:
            Untraceable: the step takes a path that cannot be captured.
        """
        give_counts(self.twin, counts or {}, self.counts)
        own, group = self.twin.param_groups[0], one_by_one(group)
        for counter in own.keys() - group.keys() - {"params"}:  # the twin's last step made these
            del own[counter]
        own.update((k, v) for k, v in hypers(group).items() if not isinstance(v, Tensor) or k not in own)
        before = self._snapshot()
        self._asked = None
        try:
            with as_oracle():
                self._step(self.twin)
        except CanzonaError:
            raise
        except Untraceable as error:
            raise Untraceable(f"{error}{blamed(error)}") from error
        except Exception as error:
            raise Untraceable(f"Dynamo cannot trace its step: {first_line(error)}{blamed(error)}") from error
        if self._asked is None:
            raise Untraceable("its step contains no tensor operation that Dynamo could capture")
        variant, scalars = self._asked
        self._put_back(before, variant)
        real = {k: v for k, v in hypers(group).items() if isinstance(v, Tensor)}
        read = {source[1] for source in variant.sources if source[0] == "scalar"}
        return variant, {**scalars, **{name: value for name, value in real.items() if name in {*scalars, *read}}}

    # -- the backend -------------------------------------------------------------------------

    def _backend(self, gm: fx.GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
        static = {n.target: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"}
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        returned = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        examples = [n.meta.get("example_value") for n in inputs]
        taken = {"param", "grad", *(name for leaves in self._snapshot() for name in leaves)}
        names = [unlike(scalar_name(n.target), taken) for n in inputs]
        found: list[Variant] = []

        def call(*args: Any) -> tuple[Any, ...]:
            if self._asked is not None:
                raise Untraceable("the step breaks into several graphs with tensor work")
            values = {i: n for i, a in enumerate(args) if (n := number(a)) is not None}
            variant = next((v for v in found if matches(v, values)), None)
            if variant is None:
                if len(found) == MOST_CONSTANTS:
                    constants = ", ".join(sorted(self._bake))
                    raise Untraceable(f"an operator asks for the value of {constants} at capture, and that changes")
                known = [i for i, name in enumerate(names) if name in self._bake]
                graph, baked = functional(gm, static, examples, values, known)
                if any(n.op == "get_attr" for n in graph.nodes):
                    raise Untraceable("its step makes tensors of Python numbers, as torch.tensor(3.0) does")
                self._bake.update(names[i] for i in baked)
                sources = [self._source(t, "constant") for t in static.values()]
                sources += [self._source(a, name) for a, name in zip(args, names, strict=True)]
                offset = len(returned)
                results = {source: offset + i for i, source in enumerate(sources)}
                variant = Variant(graph, tuple(sources), results, baked)
                found.append(variant)
                self.variants.append(variant)
            self._asked = variant, {names[i]: value for i, value in values.items()}
            given = dict(zip(inputs, args, strict=True))
            self._returned = tuple(result_of(n, given) if isinstance(n, fx.Node) else n for n in returned)
            return self._returned

        return call

    def _tensors(self) -> list[tuple[Tensor, tuple[Any, ...]]]:
        """List the twin's own tensors, each with its source."""
        known: list[tuple[Tensor, tuple[Any, ...]]] = []
        for i, param in enumerate(self._params):
            known += [(param, ("param", i)), (param.grad, ("grad", i))]  # type: ignore[list-item]
            for name, leaf in state_leaves(self.twin.state.get(param, {})):
                if isinstance(leaf, Tensor):
                    known.append((leaf, ("state", i, name)))
        for name, value in self.twin.param_groups[0].items():
            if isinstance(value, Tensor):
                known.append((value, ("scalar", name)))
        return known

    def _source(self, value: Any, name: str) -> tuple[Any, ...]:
        for tensor, source in self._tensors():
            if tensor is value:
                return source
        if isinstance(value, FakeTensor):
            raise Untraceable(f"its step reads a tensor that is neither parameter, gradient nor state: {name}")
        return "scalar", name

    # -- the twin's state ----------------------------------------------------------------------

    def _snapshot(self) -> list[dict[str, Any]]:
        return [dict(state_leaves(self.twin.state.get(p, {}))) for p in self._params]

    def rewind(self) -> None:
        """Give the twin the state that its first step left."""
        for param, own in zip(self._params, self.first_state, strict=True):
            for name, value in own.items():
                write(self.twin.state[param], self.paths[name], value, {})

    def count(self, counters: Mapping[str, Any]) -> None:
        """Write Python leaves to the twin's state. Names that the state lacks are ignored."""
        for name, value in counters.items():
            if name in self.paths:
                write(self.twin_state(), self.paths[name], value, {})

    def counters(self) -> dict[str, Any]:
        """Return the Python leaves of the twin's state, by name."""
        return {name: read(self.twin_state(), self.paths[name]) for name in self._counters}

    def _put_back(self, before: list[dict[str, Any]], variant: Variant) -> None:
        """Put back the state tensors that the step replaced on the twin, so that inputs stay identifiable.

        The graph returns each tensor that the step put in place of another one. The variant records its position.
        """
        for i, (param, own, now) in enumerate(zip(self._params, before, self._snapshot(), strict=True)):
            if own.keys() != now.keys():
                raise Untraceable(f"its step changes what its state holds: {sorted(own.keys() ^ now.keys())}")
            for name, value in own.items():
                new = now[name]
                if isinstance(value, Tensor) != isinstance(new, Tensor):
                    raise Untraceable(f"its step changes what its state holds: {name!r}")
                if not isinstance(value, Tensor) or new is value:
                    continue
                if (new.shape, new.dtype, new.stride()) != (value.shape, value.dtype, value.stride()):
                    raise Untraceable(f"its step changes the shape, dtype or strides of the state {name!r}")
                place = next((k for k, result in enumerate(self._returned) if result is new), None)
                source = ("state", i, name)
                if place is None:
                    raise Untraceable(f"its step puts something in the state {name!r} that no graph computes")
                variant.results[source] = place
                write(self.twin.state[param], self.paths[name], value, {})


def one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter group so that its step uses plain operators, not `foreach` or `fused` implementations.

    The graph of such a step shows what work there is. Elementwise work runs in the optimizer's own step with the
    unchanged parameter group. Other graphs must give the bits of that step (`eager_parity`).
    """
    return {**group, **{key: False for key in ("foreach", "fused") if key in group}}


def blank_like(leaf: Any) -> Any:
    """Make a whole tensor like a leaf of a real state, which may be a DTensor. Return other leaves unchanged."""
    if isinstance(leaf, DTensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return leaf


def matches(variant: Variant, values: Mapping[int, float]) -> bool:
    """Tell whether the constants of a variant have the present values of the scalars, by position."""
    return all(values[i] == value for i, value in variant.baked.items())


def number(value: Any) -> Any:
    """Return the Python number in an argument that Dynamo passes; None for the twin's tensors."""
    if isinstance(value, FakeTensor):
        return None
    if isinstance(value, Tensor):
        return value.item()
    return value


def result_of(node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
    """Return what Dynamo's graph returns for a node: its fake tensor, or the number (a counter) that it computes."""
    example = node.meta.get("example_value")
    if not isinstance(example, torch.SymInt | torch.SymFloat | torch.SymBool):
        return example
    if node in given:
        return number(given[node])
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: result_of(n, given))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def scalar_name(target: str) -> str:
    """Strip the path from Dynamo's name of an input: `L_self_param_groups_0_lr_` becomes lr."""
    name = re.sub(r"^L_(self|args_0)_+", "", target, flags=re.IGNORECASE)
    return re.sub(r"^param_groups_0_+", "", name).strip("_")


def unlike(name: str, taken: set[str]) -> str:
    """Return a hyperparameter's name, with a suffix if a tensor of the step has the same name."""
    return f"{name}_hyper" if name in taken else name
