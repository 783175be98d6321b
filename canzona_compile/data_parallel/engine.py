"""ZeRO-1 for one model: backward reduces gradients to owners, steps update what they own, a gather returns it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from canzona_compile.compat.optimizer_class import HeldOptimizer, plain_class
from canzona_compile.compat.torch_private import node_of_backward
from canzona_compile.data_parallel.collectives import BucketMemory, DataParallelGroup, all_reduce, largest, send
from canzona_compile.data_parallel.fragment import Filling, Fragment
from canzona_compile.data_parallel.gathering import ForwardHooks, Gathering
from canzona_compile.data_parallel.gradient import ReducedGradient
from canzona_compile.data_parallel.hooks import MARK, Hook, ReadHook
from canzona_compile.data_parallel.norms import check_reduced, clip_by_norm, cut_by_mesh, total_norm
from canzona_compile.data_parallel.reduction import Reduction
from canzona_compile.errors import CanzonaError, problem_of, some
from canzona_compile.ir.bucket import Bucket
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.ir.layout import laid_out_like
from canzona_compile.runtime.agreement import Agreement, Details
from canzona_compile.runtime.meeting import Purpose, meet_all
from canzona_compile.runtime.step_clock import StepClock
from canzona_compile.session.variant_selection import described
from canzona_compile.tensors import finite

GatherAt = Literal["step", "forward"]
WHOLE_PARAMETERS = Purpose(
    "reading whole parameters",
    'because gather="forward" has not gathered the parameters since the last step',
    "call state_dict(), or the model under no_grad(), on all ranks; or first call optimizer.canzona.synchronize() on "
    "all of them",
)


@dataclass(eq=False)
class Member:
    """An optimizer of the model.

    Attributes:
        index: its position among those of the call of `zero1`, for messages.
        group_of: by name of each of its parameters, the index of the group that it was planned in.
    """

    index: int
    group_of: Mapping[str, int]
    optimizer: HeldOptimizer = HeldOptimizer()  # noqa: RUF009 - a descriptor

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its parameters."""
        return frozenset(self.group_of)


class Zero1:
    """Everything that one call of `zero1` sets up on this rank. Sessions of optimizers join it.

    Args:
        wire: the dtype in which gradients travel; None is that of the gradients.
        gather: when parameters are whole again: when `step` returns, or when a module needs them.
    """

    def __init__(
        self,
        model: nn.Module,
        filling: Filling,
        group: DataParallelGroup,
        wire: torch.dtype | None,
        gather: GatherAt,
        zeros: bool,
        agreement: Agreement,
    ) -> None:
        self.filling, self.group, self.gather, self.agreement = filling, group, gather, agreement
        self.fragments, self.buckets = filling.fragments, filling.buckets
        self.members: list[Member] = []  # the optimizers that are not unwrapped
        self._model = weakref.ref(model)
        # Gradients refer to it. The garbage collector does not see references from tensors, so it would keep all alive.
        engine: Zero1 = weakref.proxy(self)
        memory = BucketMemory(max(b.starts[-1] * t.itemsize for b in self.buckets for t in (b.dtype, wire or b.dtype)))
        self.gathering = Gathering(filling, group, agreement, memory)
        settle = partial(Zero1.synchronize, engine)
        self.forward = ForwardHooks(model, self.gathering, settle) if gather == "forward" else None
        self.reduction = Reduction(self.gathering, self.forward, wire, agreement, engine, zeros)
        self._held = [frozenset(names) for names in filling.names]
        self._trained = {id(fragment.param) for fragment in self.fragments.values()}
        # By bucket, the parameters that were updated since it was gathered last.
        self._stepped: list[frozenset[str]] = [frozenset()] * len(self._held)
        self._scalings: list[str] = []  # of the gradients that were reduced last
        self._scaled = 0  # the number of those gradients
        self._used = 0  # the number of the gradients that an optimizer has stepped with
        self._asked = 0  # the number of the gradients of which is known whether they are finite
        self._finite = True  # whether what this rank owns of those is
        self._state = ""  # what the ranks compare about the state of the optimizer that steps
        self._announcing = False  # whether this step was announced
        self._agreed = False  # whether all ranks take this step, and it is not over
        self._hooks: list[RemovableHandle | ReadHook] = [
            *self.reduction.hooks,
            *(self.forward.hooks if self.forward is not None else ()),
        ]
        for module in model.modules():  # parts of the model may be called or saved by themselves
            # Also under gather="step": a step that failed may leave parameters that are not whole.
            self._hooks.append(module.register_state_dict_pre_hook(Hook(self.synchronize, self._check_copied)))
            if self.forward is not None:
                self._hooks.append(module.register_forward_pre_hook(Hook(self.flush), prepend=True))
                # Buckets under way hold values from before the load, and would overwrite it on other ranks.
                self._hooks.append(module.register_load_state_dict_pre_hook(Hook(self.synchronize)))

    def join(self, optimizer: Optimizer, group_of: Mapping[str, int]) -> Member:
        """Take in an optimizer, with the names and groups of its parameters. Ranks do so in the same order."""
        self.members.append(Member(len(self.members), group_of, optimizer))
        return self.members[-1]

    def release(self, member: Member) -> None:
        """Leave out an optimizer that is unwrapped, and leave the model alone after the last one. A collective."""
        self.synchronize()
        self.members = [own for own in self.members if own is not member]
        for hook in self._hooks if not self.members else ():
            hook.remove()
        for fragment in self.fragments.values() if not self.members else ():
            fragment.param.__dict__.pop(MARK, None)

    # -- around a step ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, member: Member, state_text: Callable[[], str]) -> Iterator[None]:
        """The context of a step, which sees to the gradients before and to the parameters after it.

        In it, the session calls `begun` once it is certain that this rank can take the step.

        Args:
            state_text: says what users did to the state, and raises if ranks cannot do it alike.
        """
        self._state = ""
        self._announcing, self._agreed = False, False
        try:
            self._state = state_text()
            self._before()
            yield
            self._after(member)
        except BaseException as error:
            if self._agreed or not isinstance(error, Exception):
                self.agreement.interrupt(error)
            elif not self._announcing:  # the other ranks must learn of it, and nothing has started
                known = error if isinstance(error, CanzonaError) else CanzonaError(f"{type(error).__name__}: {error}")
                self.begun(member, error=known)
            raise
        finally:
            self._agreed = False

    def begun(
        self, member: Member, measured: str = "", error: CanzonaError | None = None, skips_nonfinite: bool = False
    ) -> bool:
        """Announce a step, and compare what ranks must have in common for it, such as what was `measured` so far.

        Args:
            skips_nonfinite: whether no rank takes the step if the gradients of any parameter are not finite.

        Returns:
            Whether that is so.
        """
        self._announcing = True
        scalings = self._scalings if self._scaled == self.reduction.number else []
        details = {
            "gradients": self._bare(),
            "scalings": "; ".join(scalings),
            "state": self._state,
            "numbers": numbers_of(member.optimizer) + measured,
            "nonfinite": "yes" if skips_nonfinite and not self._are_finite() else "",
        }
        told: Sequence[Details] = []
        call = f"step() of optimizer {member.index} ({plain_class(member.optimizer).__name__})"
        try:
            told = self.agreement.compare(call, details, error, self.gathering)
        except CanzonaError as found:
            if found is not error:
                raise
        self._agreed, self._used = error is None, self.reduction.number
        return any(own["nonfinite"] for own in told)

    def _are_finite(self) -> bool:
        """Whether what this rank owns of all gradients is finite; an optimizer's step may write to them."""
        if self._asked != self.reduction.number:
            self._asked = self.reduction.number
            grads = (fragment.param.grad for fragment in self.fragments.values())
            self._finite = finite(part for g in grads if isinstance(g, ReducedGradient) for part in g.parts)
        return self._finite

    def _bare(self) -> str:
        """The parameters whose reduced gradients are gone on this rank, as text."""
        held = self.reduction.present if self.reduction.reduced else frozenset[str]()
        bare = [name for name, fragment in self.fragments.items() if name in held and fragment.param.grad is None]
        return f"no gradient for {', '.join(bare)}" if bare else ""

    def _before(self) -> None:
        """See to it that gradients are with their owners."""
        reduction = self.reduction
        self.agreement.check()
        self._check_params()
        grads = [f.param.grad for f in self.fragments.values()]
        if reduction.under_way or any(g is not None and not isinstance(g, ReducedGradient) for g in grads):
            self._announcing = True
            reduction.finish()
            self._announcing = False
        elif not any(isinstance(g, ReducedGradient) for g in grads):
            self._check_model()
            raise CanzonaError(
                "no parameter has a gradient",
                at="step()",
                hint="on every rank, call backward() before each step() and zero_grad() after it",
            )

    def _check_model(self) -> None:
        """Raise if the model has other parameters than those of which gradients were to come."""
        model = self._model()
        now = {} if model is None else canonical_params(model)
        if replaced := [n for n, f in self.fragments.items() if n in now and now[n] is not f.param]:
            raise CanzonaError(
                "parameters of the model were replaced after zero1(), so the new ones receive the gradients",
                at=some(replaced),
                hint="move or replace parameters before zero1(), and load checkpoints without assign=True",
            )

    def _check_params(self) -> None:
        """Raise unless the optimizers still have the parameters that buckets hold, each in its group."""
        for member in self.members:
            groups = {id(p): g for g, group in enumerate(member.optimizer.param_groups) for p in group["params"]}
            names = member.group_of.items()
            if moved := [name for name, g in names if groups.get(id(self.fragments[name].param)) != g]:
                raise CanzonaError(
                    "the parameter is in another group of its optimizer, or in none, since zero1() was called",
                    at=some(moved),
                    hint="move parameters between groups and optimizers before zero1()",
                )
            for g, group in enumerate(member.optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    if param.requires_grad and id(param) not in self._trained:
                        raise CanzonaError(
                            f"a trained parameter of shape {list(param.shape)} was not in the optimizer when zero1() "
                            "was called",
                            at=f"parameter {i} of group {g}",
                            hint="add or replace parameters, and set requires_grad, before zero1()",
                        )

    def _after(self, member: Member) -> None:
        """Gather every bucket whose parameters have all been updated, or, to return them whole, all that were."""
        if not self.reduction.reduced:
            return
        present = self.reduction.present
        updated = member.names & present
        if self.gather == "step":  # of a shared bucket, the part that this optimizer may have updated
            own, part = member.names, self.filling.part
            self._gather([part(i, own) for i, held in enumerate(self._held) if held & updated])
            return
        self._stepped = [done | held & updated for held, done in zip(self._held, self._stepped, strict=True)]
        pairs = enumerate(zip(self._held, self._stepped, strict=True))
        self._gather([self.buckets[i] for i, (held, done) in pairs if done and held & present <= done])

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._stepped[bucket.index] = frozenset()
        self.gathering.queue(buckets)
        if self.forward is None:
            self.gathering.wait()
        else:
            self.forward.updated(bucket.index for bucket in buckets)

    def flush(self) -> None:
        """Gather what an optimizer updated while another one, which shares its buckets, took no step."""
        if any(self._stepped):
            if not torch.is_grad_enabled():
                self._meet()  # this rank may be the only one that reads
            self._agree("gathering of stepped parameters", {})
            self._gather([self.buckets[i] for i, done in enumerate(self._stepped) if done])

    def synchronize(self) -> None:
        """Wait until all parameters are whole on this rank."""
        if any(self._stepped) or self.gathering.unsettled:
            self._meet()
        with torch.enable_grad():  # so this does not wait for the ranks again
            self.flush()
        self.gathering.wait()
        if self.forward is not None:
            self.forward.forget()

    def _meet(self) -> None:
        """Wait for all ranks before parameters are gathered for this one to read. Raises if one does not come."""
        if (meeting := self.agreement.meeting) is not None:
            meet_all({meeting.ranks: ""}, lambda _: meeting, WHOLE_PARAMETERS)

    def _check_copied(self) -> None:
        """Raise if the model is copied or saved while parameters are not whole. A copy has nothing to wait for."""
        if self.gathering.outstanding or any(self._stepped):
            raise CanzonaError(
                "the model was copied before its parameters were gathered",
                at=f'zero1(..., gather="{self.gather}")',
                hint="first call optimizer.canzona.synchronize() on all ranks",
            )

    def measure(self, clock: StepClock | None) -> None:
        """Let a clock note how long reductions and gathers take, until it stops, in place of another one."""
        self.reduction.clock = self.gathering.clock = clock

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, backward passes accumulate gradients on each rank and reduce nothing."""
        return self.reduction.paused()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, of: Optimizer | None = None
    ) -> Tensor:
        """Scale the gradients of an optimizer, or of all, so that their norm is at most `max_norm`. A collective."""
        if self.reduction.under_way:
            self.reduction.finish()
        number = next((i for i, member in enumerate(self.members) if member.optimizer is of), None)
        names = self.fragments if number is None else self.members[number].names
        fragments = {name: own for name, own in self.fragments.items() if name in names}
        limit = max_norm if not isinstance(max_norm, Tensor) or max_norm.device.type == "cpu" else "a tensor"
        arguments = f"max_norm={limit}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}, of={number}"
        error = problem_of(lambda: check_reduced(fragments)) if of is None or number is not None else no_such(of)
        self._agree("clip_grad_norm_()", {"gradients": self._bare(), "arguments": arguments}, error)
        with self.agreement.on_its_way():
            norm = total_norm(fragments, self.group, self.reduction.waiter, norm_type)
        clip_by_norm(fragments, norm, max_norm, norm_type, error_if_nonfinite)
        return norm

    def _agree(self, call: str, details: Details, error: CanzonaError | None = None) -> None:
        self.agreement.compare(call, details, error, self.gathering)

    # -- what operations on gradients tell, see `gradient.GradientEngine` ---------------------------------

    def note_scaling(self, operation: str) -> None:
        """Remember that this rank scales gradients."""
        number = self.reduction.number
        if self._used == number:
            error = CanzonaError(
                f"gradients were scaled ({operation}) after another optimizer had stepped",
                hint="scale gradients before any optimizer steps",
            )
            self.tell(error)
            raise error
        self._scalings = [*(self._scalings if self._scaled == number else ()), operation]
        self._scaled = number

    def tell(self, error: CanzonaError) -> None:
        """Tell the other ranks of an error that this rank raises, and that changed nothing."""
        if node_of_backward() is not None:
            self.reduction.abandon(error)
        elif self.agreement.channel is not None:
            self.agreement.channel.note(error)

    def whole(self, gradient: ReducedGradient) -> Tensor:
        """Gather a gradient from its owners. This is a collective."""
        fragment = self.fragments[gradient.origin]
        self._agree(f"full_tensor() of the gradient of {fragment.name}", {})
        with self.agreement.on_its_way():
            return self._whole(gradient, fragment)

    def _whole(self, gradient: ReducedGradient, fragment: Fragment) -> Tensor:
        whole = torch.empty_like(fragment.values())
        own = dict(zip(fragment.owned, gradient.parts, strict=True))
        for part in fragment.slices:
            elements = own[part].clone() if part in own else whole.new_empty(part.length)
            send(self.group, elements, part.owner, self.reduction.waiter)
            fragment.parts[part.key].put(whole, elements)
        found = laid_out_like(whole, fragment.param)
        full: Tensor = found.full_tensor() if isinstance(found, DTensor) else found
        return full

    def share_infinity(self, found: Tensor) -> None:
        """Make `found` the maximum over all ranks. This is a collective."""
        self._agree("unscaling of gradients", {"gradients": self._bare()})
        with self.agreement.on_its_way():
            largest(self.group, found, self.reduction.waiter)
            for cut in cut_by_mesh(list(self.fragments.values())):
                all_reduce(found, ReduceOp.MAX, cut.groups(), self.reduction.waiter)


def numbers_of(optimizer: Optimizer) -> str:
    """The hyperparameters of an optimizer, one line for each parameter group."""
    kind, groups = plain_class(optimizer).__name__, optimizer.param_groups
    return "\n".join(f"group {g} of {kind} has {described(group)}" for g, group in enumerate(groups))


def no_such(optimizer: Optimizer) -> CanzonaError:
    """The error for an optimizer that a call of `zero1` was not given."""
    return CanzonaError(
        f"this {type(optimizer).__name__} was not passed to zero1 with the model",
        at="optimizer.canzona.clip_grad_norm_(of=)",
        hint="of=chain.optimizers[1]",
    )
