"""Recorders: twins on fake tensors that tell what the optimizer's code does on a step.

A recorder captures the step of one kind of parameter, once per variant of its control flow. On every later step it
answers which variant the step takes, and with which values of lr, momentum and so on. There are two ways to find that
out, see `dynamo_recorder` and `dispatch_recorder`; all else that they do is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, fx
from torch.optim import Optimizer

from canzona_compile.capture.fake_twin import FakeTwin, Replaced
from canzona_compile.capture.graphs import functional
from canzona_compile.capture.variant import Answer, Scalars, Source, StepInputs, Variant
from canzona_compile.compat.torch_private import FakeTensor
from canzona_compile.ir.compiled_call import opened
from canzona_compile.replica.external_counters import Counts, counts_of
from canzona_compile.replica.homes import hypers
from canzona_compile.replica.leaves import leaf_problem
from canzona_compile.replica.parameter_spec import ParamExample
from canzona_compile.replica.raised import Provoked, Provoker, Untraceable, fallible, first_line

MOST_CONSTANTS = 16  # the most graphs of one path that differ only in constants


class StepRecorder(FakeTwin, ABC):
    """Captures the step of one kind of parameter, and answers on every later step which variant it takes.

    Attributes:
        with_numbers: whether numbers that are read of tensors can be computed with, see `FakeTwin`.
        why: why it captures in this way and not in the one before; empty if there is none before.
        reads_counters: whether graphs compute with hyperparameters and counters, and not with numbers that the step has
            computed of these.
        variants: the graphs that it captured, without those in whose place another came.
        second: what the code sees on the second step of a parameter that begins without state; of the parameter group
            only what the first step counted there.
        bake: the names of scalars that graphs hold as constants.
    """

    way: ClassVar[str]
    with_numbers: ClassVar[bool]
    reads_counters: ClassVar[bool]

    def __init__(self, optimizer: Optimizer, like: ParamExample, bake: set[str], why: str = "") -> None:
        """Capture the step now.

        Args:
            bake: the names of scalars that graphs must hold as constants. This adds the names that it finds.
        """
        super().__init__(optimizer, like, self.with_numbers)
        self.why, self.bake = why, bake
        self.variants: list[Variant] = []
        self._known_to_raise: set[Variant] = set()
        if problem := leaf_problem(self.state, self.paths):
            raise Untraceable(problem)
        own = {counter.key: value for counter, value in self.counts.items() if counter.home == "group"}
        elsewhere = {counter: value for counter, value in self.counts.items() if counter.home != "group"}
        self.second = StepInputs(own, self.counters(), elsewhere)
        self.prepare()
        self.consult(hypers(self.twin.param_groups[0]), self.counts)
        self.set_leaves(self.first_leaves)

    # -- what the ways differ in -------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Get ready, after the twin has taken its first step."""

    @abstractmethod
    def ask(self) -> Answer:
        """Let the twin step, and find out what its code did."""

    def check_swallowed(self) -> None:
        """Raise if the step catches an error that only fake tensors have, where `ask` does not see that."""

    # -- questions ---------------------------------------------------------------------------

    @staticmethod
    def asking() -> AbstractContextManager[None]:
        """Return a context for several questions, which need not set up the same each time then."""
        return nullcontext()

    def take(self, moment: StepInputs, group_counters: Collection[str]) -> tuple[Variant, StepInputs]:
        """Find out what the step does at a moment."""
        group, counters, elsewhere = moment
        self.set_leaves(counters)
        variant, _ = self.consult(group, elsewhere)
        own = {name: value for name, value in counts_of(self.twin).items() if name in elsewhere}
        counted = self.twin.param_groups[0]  # Dynamo adds to it, `capturable` for one
        here = {**group, **{k: counted[k] for k in group_counters if k in counted}}
        return variant, StepInputs(here, self.counters(), own)

    def consult(self, group: Mapping[str, Any], counts: Counts | None = None) -> tuple[Variant, Scalars]:
        """Find out what the step does with the present hyperparameters. Counters in the state advance on the twin."""
        group = self.set_numbers(group, counts)
        before = self.leaves()
        try:
            variant, scalars, returned = self.ask()
            replaced = self.replaced(before)
            if variant not in self._known_to_raise:
                self.check_errors(variant, StepInputs(group, before, counts or {}))
                self._known_to_raise.add(variant)
            self._put_back(replaced, variant, returned)
        except Untraceable:  # other parameters may still be at steps that can be captured
            for key in self.state.keys() - self.structure.keys():
                del self.state[key]
            self.set_leaves(before)
            raise
        real = {k: v for k, v in hypers(group).items() if isinstance(v, Tensor)}
        read = {source[1] for source in variant.sources if source[0] == "scalar"}
        return variant, {**scalars, **{name: value for name, value in real.items() if name in {*scalars, *read}}}

    def check_errors(self, variant: Variant, before: StepInputs) -> None:
        """Raise if the step catches the error of an operator, because a graph has no such branch."""
        now = self.moment()
        self.restore(before)
        self.check_swallowed()
        for place in range(sum(map(fallible, opened(variant.graph)))):
            self.restore(before)
            provoker = Provoker(place)
            try:
                self.step_eagerly(provoker)
            except Provoked:
                continue
            except Exception as error:  # whatever its code makes of it
                raise Untraceable(f"its step catches the errors of {provoker.failed}: {first_line(error)}") from error
            raise Untraceable(f"its step catches the errors of {provoker.failed}")
        self.restore(now)

    # -- graphs ------------------------------------------------------------------------------

    def variant_for(self, known: list[Variant], values: Mapping[int, Any], make: Callable[[], Variant]) -> Variant:
        """Find a graph whose constants are the present numbers; make it if there is none."""
        for variant in known:
            if all(values[i] == value for i, value in variant.baked.items()):
                return variant
        if len(known) == MOST_CONSTANTS:
            constants = ", ".join(sorted(self.bake))
            raise Untraceable(f"an operator asks for the value of {constants} at capture, and that changes")
        made = make()
        variant = next((v for v in self.variants if v.same(made)), made)
        known.append(variant)
        if variant is made:
            self.variants.append(made)
        return variant

    def traced(
        self,
        module: fx.GraphModule,
        static: Mapping[str, Tensor],
        inputs: Sequence[Any],
        values: Mapping[int, Any],
        names: Sequence[str],
    ) -> tuple[fx.Graph, dict[int, float]]:
        """Make the functional graph of what was recorded; arguments and result are those of `functional`."""
        graph, baked = functional(
            module, static, inputs, values, [i for i, name in enumerate(names) if name in self.bake]
        )
        if any(n.op == "get_attr" for n in graph.nodes):
            raise Untraceable("its step makes tensors of Python numbers, as torch.tensor(3.0) does")
        self.bake.update(names[i] for i in baked)
        return graph, baked

    def source(self, value: Any, name: str) -> Source:
        """Return what an input of a graph stands for; `name` is its name if it is a number."""
        for tensor, source in self.tensors():
            if tensor is value:
                if source[0] == "scalar" and tensor.dim():
                    raise Untraceable(f"its hyperparameter {source[1]} is a tensor of shape {list(tensor.shape)}")
                return source
        if isinstance(value, FakeTensor):
            raise Untraceable(f"its step reads a tensor that is neither parameter, gradient nor state: {name}")
        return "scalar", name

    def own_name(self, name: str) -> str:
        """Return a hyperparameter's name, with a suffix if a tensor of the step has the same name."""
        return f"{name}_hyper" if name in {"param", "grad", *self.leaves()} else name

    # -- the twin's state --------------------------------------------------------------------

    def _put_back(self, replaced: Sequence[Replaced], variant: Variant, returned: Sequence[Any]) -> None:
        """Put back the state tensors that the step replaced on the twin, so that inputs stay identifiable.

        The graph returns each tensor that the step put in place of another one. The variant records its position.
        """
        for name, value, new in replaced:
            place = next((k for k, result in enumerate(returned) if result is new), None)
            if place is None:
                raise Untraceable(f"its step puts something in the state {name!r} that no graph computes")
            variant.results["state", name] = place
            self.set_leaves({name: value})
