"""`optimizer.canzona` of an optimizer under ZeRO-1."""

from __future__ import annotations

import contextlib
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.api.handle import Canzona
from canzona_compile.compat.torch_private import calls_outside_dynamo
from canzona_compile.data_parallel.engine import Zero1
from canzona_compile.data_parallel.model_plan import ModelPlan
from canzona_compile.data_parallel.session import OwnerSession
from canzona_compile.ir.plan_file import PlanFile


@calls_outside_dynamo
class Zero1Canzona(Canzona):
    """`optimizer.canzona` of an optimizer under ZeRO-1: what `wrap` gives, and what is done to all gradients.

    Args:
        session: takes the steps.

    Attributes:
        zero1: the buckets of the model and their collectives; all optimizers of one call share it.
        joint: the plan of the model, which they share too.
    """

    def __init__(self, session: OwnerSession, zero1: Zero1, joint: ModelPlan) -> None:
        super().__init__(session)
        self.zero1, self.joint = zero1, joint

    def release(self) -> None:
        """Leave the optimizer as it would be without `zero1`, and the model too after the last one. A collective."""
        self.zero1.synchronize()  # as long as nothing is given up
        super().release()
        for session in self.sessions:
            self.zero1.release(session)

    def plan(self) -> PlanFile:
        """Owners, buckets and micro-groups of the whole model: all matrices, of all optimizers of the call of `zero1`.

        `canzona_compile.plan(model, mesh={"dp": ...}, optimizer=..., updates="zero1")` has the same fingerprint.
        """
        return PlanFile.of(self.joint.scheduled(self.sessions[0].options))

    def measure(self, steps: int = 5) -> None:
        """Time the next steps of the optimizer, and the reductions and gathers of the whole model around them.

        The arguments and errors are those of `Canzona.measure`.
        """
        with self.sessions[0].turns.take("measure()"):
            for session in self.sessions:
                clock = session.measuring.begin(steps, session.device)
                session.measuring.at_end = partial(self.zero1.end_measure, clock)  # unless another optimizer goes on
                self.zero1.measure(clock)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        of: Optimizer | None = None,
    ) -> Tensor:
        """Scale the gradients of the whole model so that their norm is at most `max_norm`. This is a collective.

        The gradients are those of all optimizers of the call of `zero1`. The result is that of
        `torch.nn.utils.clip_grad_norm_` on whole gradients, up to the order of one sum.

        Args:
            max_norm: the largest norm.
            norm_type: the order of the norm; `math.inf` for the largest absolute value.
            error_if_nonfinite: whether to raise if the norm is not finite.
            of: one of these optimizers, to clip the gradients of its parameters by their own norm; None for all.

        Returns:
            The norm before, a 0-d tensor of the dtype of gradients, equal on all ranks.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`.
            CanzonaError: gradients are not reduced yet, or `of` is none of the optimizers.
        """
        return self.zero1.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, of)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, backward passes accumulate gradients on each rank without communication.

        Run the last backward pass of a step outside of it.
        """
        return self.zero1.no_sync()

    def synchronize(self) -> None:
        """Wait until all parameters are whole on this rank.

        With `gather="forward"`, call this on every rank before anything but the model's forward pass reads parameters.
        """
        self.zero1.synchronize()
