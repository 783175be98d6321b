"""Templates: the captured step of every kind of parameter, and the recorders that keep watching."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from canzona_compile.capture.dispatch_recorder import DispatchRecorder
from canzona_compile.capture.dynamo_recorder import DynamoRecorder
from canzona_compile.capture.eager_parity import has_eager_bits, needs_whole_matrix, reads_numbers
from canzona_compile.capture.param_kind import ParamKind
from canzona_compile.capture.recorder import StepRecorder
from canzona_compile.capture.separability import check_separable
from canzona_compile.capture.variant import FormChange, StepInputs, state_leaf, template_of
from canzona_compile.compat.interrupts import interrupted_here, uninterrupted
from canzona_compile.compat.optimizer_class import HeldOptimizer, plain_class
from canzona_compile.compat.telling import tell
from canzona_compile.eager.nodes import interpreted_template
from canzona_compile.eager.own_object import Maker
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.step import Role, Template
from canzona_compile.ir.variant_period import variant_period_of
from canzona_compile.rehearsal.diagnosis import NamesByGroup, broken, object_per_matrix, try_objects
from canzona_compile.rehearsal.rehearsal import Habits, closure_problem, default_names, no_closure, rehearse
from canzona_compile.replica.external_counters import Counter, Counts, counts_elsewhere
from canzona_compile.replica.homes import advice, signature
from canzona_compile.replica.leaves import leaf_forms, python_leaves
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.replica.raised import READS_NUMBERS, Untraceable, first_line
from canzona_compile.replica.randomness import draws
from canzona_compile.replica.twin import make_tensors, scratch_of
from canzona_compile.replica.watch import ChangeWatch

log = logging.getLogger(__name__)

WAYS: tuple[type[StepRecorder], ...] = (DynamoRecorder, DispatchRecorder)  # to capture a step, in the order of trials
KindKey = tuple[Any, ...]
LOOKAHEAD = 128  # steps; periodic work with a longer period is captured when it comes, which costs a new plan
MOST_FORM_CHANGES = 8  # if a state changes its form more often, its steps are interpreted for good
NOT_FAITHFUL = "its graph does not give the bits of its eager step: the code depends on being compiled"
READS_VARIABLES = "its step calls os.getenv, which Dynamo takes for a constant"
OWN_OBJECTS = "each matrix has an optimizer object of its own, which one_per_matrix= makes"
COMPILED_BY_USERS = "its step calls functions that the user compiled, which round in a way of their own"


@dataclass(eq=False)
class Capture:
    """Captures each kind of parameter of one optimizer once, and each variant of its step once."""

    optimizer: HeldOptimizer = HeldOptimizer()  # noqa: RUF009 - a descriptor
    maker: Maker | None = None  # of `one_per_matrix=`
    kinds: dict[KindKey, ParamKind] = field(default_factory=dict)
    counts: set[Counter] = field(default_factory=set)  # what the step counts outside of states
    _closure: str | None = None  # why its step cannot take one; None before anybody asked
    watch: ChangeWatch = field(init=False)
    # By parameter, the memory of gradients that the optimizer may hold, as far as it is not freed. It outlives plans.
    given: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _rehearsals: dict[Any, Habits] = field(default_factory=dict)
    _separable: dict[KindKey, bool] = field(default_factory=dict)  # by manner, whether labels followed the step
    _eager_bits: set[tuple[str, ...]] = field(default_factory=set)  # see `has_eager_bits`
    _form_changes: dict[ParameterSpec, set[str]] = field(default_factory=dict)  # the counters at each
    _bake: set[str] = field(default_factory=set)  # scalars that graphs of this optimizer hold as constants

    def __post_init__(self) -> None:
        self.watch = ChangeWatch(self.optimizer, self.maker is not None)

    @property
    def captures(self) -> int:
        """The number of graphs that were captured, in either way."""
        return sum(len(kind.recorder.variants) for kind in self.kinds.values() if kind.recorder is not None)

    @uninterrupted
    def kind_of(self, like: ParamExample) -> ParamKind:
        """Find the kind of a parameter, with the variant of its next step. Capture what is new.

        Args:
            like: the parameter. State that differs from what a first step leaves makes another kind. It may have been
                loaded, or hyperparameters that decide about it changed since.
        """
        state = like.state
        key: KindKey = (like.spec, signature(like.group, self.group_counters()))
        kind = self._known(key, replace(like, state=None))
        if state and (kind.transitional or (kind.recorder is not None and leaf_forms(state) != kind.leaf_forms)):
            key = (*key, leaf_forms(state))
            kind = self._known(key, like)
        while kind.recorder is not None:
            try:
                if state or not kind.leaf_forms:  # without state the first step is like all others
                    self._learn(kind, StepInputs(like.group, python_leaves(state or {}), self.elsewhere()))
                if not state:
                    self._learn(kind, second_step(kind.recorder, like.group))
                break
            except FormChange as reason:
                return self._transitional(like, str(reason))
            except Untraceable as reason:
                last = kind.by_dispatch
                kind = self.interpreted(like.spec, str(reason)) if last else self._capture(like, failed=str(reason))
                self.kinds[key] = kind
        return kind

    def _known(self, key: KindKey, like: ParamExample) -> ParamKind:
        if key in self.kinds:
            self._note_form_change(self.kinds[key], like)
            return self.kinds[key]
        spec = like.spec
        tell(f"capturing the update of {spec.dims or 'a scalar'} {spec.dtype_name}, {like.name}")
        if self.maker is not None:
            self.kinds[key] = kind = self.interpreted(spec, OWN_OBJECTS)
            kind.maker = self.maker
            return kind
        if not self._separable.get((key[1], len(spec.shape)), True):
            self.check_rehearsed(like.name)
        interrupted_here()
        kind = self._capture_ahead(key, like)
        if kind.recorder is None:  # it may draw random numbers; if refused, it is not known
            del self.kinds[key]
            self.check_rehearsed(like.name)
        self.kinds[key] = kind
        return kind

    def check_rehearsed(self, name: str) -> None:
        """Raise unless a rehearsal has shown that parameters are independent, which no graph shows."""
        if self.rehearse().draws:
            raise UnsupportedOptimizer(
                f"{plain_class(self.optimizer).__name__} draws random numbers in code that cannot be traced, so "
                "canzona_compile cannot check whether parameters depend on one another",
                at=name,
                hint=f"{broken(5)}; {object_per_matrix(self.optimizer)}",
            )

    @uninterrupted
    def rehearse(self, names: NamesByGroup = ()) -> Habits:
        """Rehearse the optimizer, once for the groups and parameters that it has now."""
        self.watch.begin(self._counting())
        cast = self._cast()
        if self.maker is not None:  # each matrix steps alone
            if cast not in self._rehearsals:
                self._check_objects(self.maker)
            return self._rehearsals.setdefault(cast, Habits())
        if cast not in self._rehearsals:
            tell(f"rehearsing {plain_class(self.optimizer).__name__} in miniature")
            habits = self._rehearsed(names)
            self.counts.update(habits.counters)
            make_tensors(self.optimizer)
            self._check_separable(habits, names or default_names(self.optimizer))
            self._rehearsals |= dict.fromkeys([cast, self._cast()], habits)  # with the counters that it found, too
        return self._rehearsals[cast]

    def _check_objects(self, maker: Maker) -> None:
        """Raise if an object communicates by itself. Other errors are its own, and come with the real parameters."""
        try:
            try_objects(self.optimizer, maker)
        except UnsupportedOptimizer:
            raise
        except Exception as error:  # whatever its code raises
            log.info("an object for a small parameter fails: %s", first_line(error))

    def _rehearsed(self, names: NamesByGroup) -> Habits:
        try:
            return rehearse(self.optimizer, names)
        except UnsupportedOptimizer as refused:
            if not (hint := advice(self.optimizer)):
                raise
            hint = f"{hint}; {refused.hint or ''}".rstrip("; ")
            raise UnsupportedOptimizer(refused.problem, at=refused.at, hint=hint) from refused

    def _check_separable(self, habits: Habits, names: NamesByGroup) -> None:
        """Check at the real sizes that parameters of each manner are separable, see `check_separable`."""
        counted = {*habits.counters, *self.counts}
        self._separable.clear()  # of fewer parameters: more of them may be coupled
        for group, own in zip(self.optimizer.param_groups, names, strict=True):
            for param, name in zip(group["params"], own, strict=True):
                manner = signature(group, self.group_counters()), param.ndim
                if manner not in self._separable:
                    like = ParamExample(group, ParameterSpec.of(param), name)
                    counters = None if param.is_meta else counted  # without values nothing is rehearsed
                    self._separable[manner] = check_separable(self.optimizer, like, counters)

    def _cast(self) -> Any:
        counters = self.group_counters()
        return tuple((len(group["params"]), signature(group, counters)) for group in self.optimizer.param_groups)

    @uninterrupted
    def notice(self) -> bool:
        """Follow attributes of the optimizer and its parameters that users changed since the last step.

        Returns:
            Whether the optimizer runs in another way, or has other habits, so that all is to be captured and planned
            anew.
        """
        make_tensors(self.optimizer)
        moved, rehearse_again = self.watch.changes(self._counting())
        self.watch.check_followed()
        for recorder in {k.recorder for k in self.kinds.values() if k.recorder is not None} if moved else ():
            recorder.refresh(self.optimizer)
        if not rehearse_again or self.maker is not None:
            return False
        before = self._rehearsals.get(self._cast())
        self._rehearsals.clear()
        self._separable.clear()
        now = self.rehearse()
        if before == now:
            return False
        self.forget_kinds()
        return True

    def forget_kinds(self) -> None:
        """Forget what was captured, so that all of it is captured anew, under the names that it had at first."""
        self.kinds.clear()

    def _counting(self) -> set[str]:
        """The attributes of the optimizer in which the step counts."""
        return {counter.key for counter in self.counts if counter.home == "self"}

    def _draws(self) -> bool:
        """Whether steps draw random numbers, the first one at least."""
        return any(habits.draws for habits in self._rehearsals.values())

    @uninterrupted
    def check_closure(self) -> None:
        """Raise unless `step(closure)` may call the closure before all else."""
        if self._closure is None:
            self._closure = closure_problem(self.optimizer)
        if self._closure:
            raise no_closure(self.optimizer, self._closure)

    def group_counters(self) -> frozenset[str]:
        """Return the keys of parameter groups in which the step counts."""
        return frozenset(counter.key for counter in self.counts if counter.home == "group")

    def elsewhere(self) -> Counts:
        """Return the current counters that are neither in a parameter group nor in the state of a parameter."""
        return counts_elsewhere(self.optimizer, self.counts)

    def _capture(self, like: ParamExample, failed: str = "") -> ParamKind:
        """Capture a kind in the first way that can; without one its steps are interpreted."""
        if not failed and any(habits.reads_variables for habits in self._rehearsals.values()):
            failed = READS_VARIABLES
        reasons = [failed] if failed else []
        for way in WAYS[len(reasons) :]:
            try:
                recorder = way(self.optimizer, like, self._bake, why="; ".join(reasons))
            except FormChange as reason:
                return self._transitional(like, str(reason))
            except Untraceable as reason:
                reasons.append(str(reason))
                continue
            self.counts.update(recorder.counts.keys())
            leaves = recorder.first_leaves
            tensors = tuple(state_leaf(name, v) for name, v in leaves.items() if isinstance(v, torch.Tensor))
            return ParamKind(recorder, {}, tensors, recorder.counters())
        # The second way may give the same reason, with the line to blame.
        told = (reason for reason in dict.fromkeys(reasons) if not reasons[-1].startswith(f"{reason};"))
        return self.interpreted(like.spec, "; by dispatch: ".join(told))

    def _capture_ahead(self, key: KindKey, like: ParamExample) -> ParamKind:
        """Capture a kind in the first way that can, periodic work included.

        What cannot be captured in either way is met when it comes.
        """
        kind = self.kinds[key] = self._capture(like)
        interrupted_here()
        reason = self._look_ahead(kind, like.group)
        if reason and not isinstance(reason, FormChange) and not kind.by_dispatch:
            other = self.kinds[key] = self._capture(like, failed=str(reason))
            return kind if other.recorder is None or self._look_ahead(other, like.group) else other
        return kind

    def _look_ahead(self, kind: ParamKind, group: Mapping[str, Any]) -> Untraceable | None:
        """Meet periodic work before the first plan: let the counters run, on fake tensors.

        Returns:
            What cannot be captured there; None if all can.
        """
        recorder = kind.recorder
        if recorder is None:
            return None
        moment = second_step(recorder, group)
        path, counters = [], []
        try:
            for _ in range(LOOKAHEAD if kind.python_state or self.counts else 1):
                counters.append(self.counters_at(moment.group, moment.leaves, moment.elsewhere))
                template, moment = self._learn(kind, moment)
                path.append(template.name)
        except Untraceable as reason:
            return reason
        kind.templates = {v: t for v, t in kind.templates.items() if v in recorder.variants}
        numbers = {
            frozenset(leaf.name for leaf in t.inputs if leaf.role is Role.SCALAR) for t in kind.templates.values()
        }
        # A task that is ahead takes one graph with the numbers of another, which must be the same numbers then.
        if recorder.reads_counters or len(numbers) == 1:
            kind.variant_period = variant_period_of(path, counters)
        return None

    def counters_at(self, group: Mapping[str, Any], leaves: Mapping[str, Any], elsewhere: Counts) -> dict[Any, Any]:
        """Join all counters into one dict: leaves of the state by name, others by `Counter`."""
        own = {
            counter: group[counter.key] for counter in self.counts if counter.home == "group" and counter.key in group
        }
        return {**leaves, **elsewhere, **own}

    def _learn(self, kind: ParamKind, moment: StepInputs) -> tuple[Template, StepInputs]:
        """Add the template of the variant that the code takes at this moment."""
        recorder = kind.recorder
        assert recorder is not None
        variant, after = recorder.take(moment, self.group_counters())
        if variant in kind.templates:
            return kind.templates[variant], after
        label = self._label(recorder.spec)
        family = kind.template.family if kind.templates else label  # the first one may have been dropped since
        made = template_of(variant, label, recorder.spec)
        template = replace(made, family=family, state=kind.state, draws=self._draws())
        named = {leaf.name for leaf in template.inputs if leaf.role is Role.STATE} | {*template.writes} - {"param"}
        if late := named - recorder.paths.keys():
            raise Untraceable(f"it creates the state {min(late)!r} later than in its first step")
        if draws(template.graph):
            raise Untraceable("its step draws random numbers, which one rank has to do")
        if reads_numbers(template) and needs_whole_matrix(template):  # else each rank takes the step as written
            raise Untraceable(READS_NUMBERS)
        if not has_eager_bits(self.optimizer, recorder, template, moment, self._eager_bits):
            raise Untraceable(COMPILED_BY_USERS if recorder.calls_compiled else NOT_FAITHFUL)
        kind.templates[variant] = template
        return template, after

    @uninterrupted
    def interpreted(self, spec: ParameterSpec, reason: str) -> ParamKind:
        """Make a kind whose every step is the optimizer's own eager step, on an owner rank."""
        if scratch_of(self.optimizer):
            raise UnsupportedOptimizer(
                "its step holds numbers on itself, and no capture shows that it writes them before it reads them: "
                f"{reason}",
                hint=f"keep them in self.state[param]; or, {object_per_matrix(self.optimizer)}",
            )
        label = self._label(spec)
        log.info("%s is interpreted: %s", label, reason)
        made = interpreted_template(label, spec, reason, on_owner=self.maker is not None)
        template = replace(made, draws=self._draws())
        return ParamKind(None, {None: template}, (), {})

    def _transitional(self, like: ParamExample, reason: str) -> ParamKind:
        """Make a kind for the one step that changes the form of the state. What comes after it is another kind."""
        kind = self.interpreted(like.spec, reason)
        kind.transitional = True
        self._note_form_change(kind, like)
        return kind

    def _note_form_change(self, kind: ParamKind, like: ParamExample) -> None:
        """Give up on a state that changes its form again and again."""
        if kind.transitional:
            changes = self._form_changes.setdefault(like.spec, set())
            changes.add(str((python_leaves(like.state or {}), self.elsewhere())))
            kind.transitional = len(changes) <= MOST_FORM_CHANGES

    def _label(self, spec: ParameterSpec) -> str:
        kind = plain_class(self.optimizer).__name__.lower()
        label = f"{kind}_{spec.dims or 'scalar'}_{spec.dtype_name}{'_part' * spec.part}"
        known = [template for kind in self.kinds.values() for template in kind.templates.values()]
        taken = {template.name for template in known} | {template.family for template in known}
        names = [label, *(f"{label}_{i}" for i in range(2, len(taken) + 3))]
        return next(name for name in names if name not in taken)


def second_step(recorder: StepRecorder, group: Mapping[str, Any]) -> StepInputs:
    """Return what the code will see when a parameter that has no state yet takes its second step."""
    return recorder.second._replace(group={**group, **recorder.second.group})
