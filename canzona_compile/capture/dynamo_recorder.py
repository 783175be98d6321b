"""Dynamo as tracer, and as guard of the control flow.

The optimizer's own step is compiled on a twin with fake tensors, with a backend that computes nothing. The first call
captures the graph. Every later call only evaluates Dynamo's guards, and tells which variant the step takes and with
which values of lr, momentum and so on. So guards, recompiles and dynamic scalars are those of Dynamo.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from canzona_compile.capture.dynamo import as_recorder, compiled
from canzona_compile.capture.recorder import StepRecorder
from canzona_compile.capture.variant import Answer, Scalars, Variant
from canzona_compile.compat.optimizer_class import plain_step
from canzona_compile.compat.torch_private import FakeTensor, mark_static
from canzona_compile.replica.raised import NoCollectives, Swallowed, Untraceable


class DynamoRecorder(StepRecorder):
    """Captures with Dynamo. The attributes are those of `StepRecorder`."""

    way: ClassVar[str] = "Dynamo"
    with_numbers: ClassVar[bool] = True
    reads_counters: ClassVar[bool] = True

    @staticmethod
    def asking() -> AbstractContextManager[None]:
        """Set up what Dynamo needs, for several questions at once."""
        return as_recorder()

    def prepare(self) -> None:
        """Compile the twin's step, which traces nothing yet."""
        self._asked: tuple[Variant, Scalars] | None = None
        self._returned: tuple[Any, ...] = ()
        backend: Any = weakref.WeakMethod(self._backend)  # Dynamo keeps all backends for the life of the process
        # What users compiled would, after a break, run machine code on fake tensors, which have no memory.
        self._step = compiled(
            plain_step(type(self.twin)),
            self.note.noting(lambda gm, examples: backend()(gm, examples)),
            unbroken=self.calls_compiled,
        )
        for tensor, _ in self.tensors():
            mark_static(tensor)

    def ask(self) -> Answer:
        """Evaluate Dynamo's guards; trace if none fit."""
        self._asked = None
        self.attempt(self._evaluate, "Dynamo cannot trace its step")
        if self._asked is None:
            raise Untraceable("its step contains no tensor operation that Dynamo could capture")
        return *self._asked, self._returned

    def _evaluate(self) -> None:
        with as_recorder():
            self._step(self.twin)

    def check_swallowed(self) -> None:
        """Take the step as written: what Dynamo does not trace it runs without noting errors of functions of torch."""
        try:
            self.attempt(lambda: self.step_eagerly(NoCollectives()))
        except Swallowed:
            raise
        except Untraceable:  # an error that the step does not catch; Dynamo traces some of what has no values
            pass

    def _backend(self, gm: fx.GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
        static = {n.target: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"}
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        returned = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        changed = settings_of(gm.graph)
        examples = [n.meta.get("example_value") for n in inputs]
        names = [self.own_name(scalar_name(n.target)) for n in inputs]
        found: list[Variant] = []
        own: Any = weakref.ref(self)  # Dynamo puts `call` into the globals of the step until its code is freed

        def call(*args: Any) -> tuple[Any, ...]:
            if changed:
                raise Untraceable(f"its step changes settings of torch ({changed})")
            recorder: DynamoRecorder = own()
            if recorder._asked is not None:
                raise Untraceable("the step breaks into several graphs with tensor work")
            values = {i: n for i, a in enumerate(args) if (n := number(a)) is not None}

            def make() -> Variant:
                graph, baked = recorder.traced(gm, static, examples, values, names)
                sources = [recorder.source(t, "constant") for t in static.values()]
                sources += [recorder.source(a, name) for a, name in zip(args, names, strict=True)]
                return Variant.of(graph, sources, len(returned), baked)

            variant = recorder.variant_for(found, values, make)
            recorder._asked = variant, {names[i]: value for i, value in values.items()}
            given = dict(zip(inputs, args, strict=True))
            recorder._returned = tuple(result_of(n, given) if isinstance(n, fx.Node) else n for n in returned)
            return recorder._returned

        return self.note.noting(call)


def settings_of(graph: fx.Graph) -> str:
    """Name a function in Dynamo's graph that changes a setting which operators read; empty if there is none."""
    names = [getattr(node.target, "__name__", "") for node in graph.nodes if node.op == "call_function"]
    return next((name for name in names if re.match(r"_?set_\w", name) and "grad" not in name), "")


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
