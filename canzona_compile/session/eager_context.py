"""What eager steps need besides tensors: the optimizer, its parameter groups, and the rule on random numbers."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.twin import marks_of, plain_class
from canzona_compile.errors import DrawsRandomNumbers, UnsupportedOptimizer
from canzona_compile.session.joint_step import JointStep
from canzona_compile.session.plan import Plan
from canzona_compile.session.residents import ResidentTasks
from canzona_compile.session.state import StateStore


class PlanContext:
    """The context of the eager steps of one plan. Implements `program_ops.EagerContext`.

    Args:
        optimizer: the wrapped optimizer.
        plan: the plan.
        store: the tensors of the plan's tasks.
        residents: the optimizer objects of the plan's resident tasks.
        joint: steps all parameters at once; None if they step one by one.
    """

    def __init__(
        self, optimizer: Optimizer, plan: Plan, store: StateStore, residents: ResidentTasks, joint: JointStep | None
    ) -> None:
        self.optimizer, self.plan, self.store, self.residents, self.joint = optimizer, plan, store, residents, joint
        self._warned = False

    def eager_optimizer(self) -> Optimizer:
        """Return the optimizer whose own code takes the step."""
        return self.optimizer

    def param_group_of(self, task: str) -> dict[str, Any]:
        """Return the current parameter group of a task."""
        return self.optimizer.param_groups[self.plan.bound[task].param_group]

    def marks_of(self, task: str) -> dict[str, Any]:
        """Return the attributes that users gave to the parameter of a task."""
        return marks_of(self.plan.bound[task].origin)

    def state_of(self, task: str) -> dict[str, Any]:
        """Return the state that the eager step of a task reads and writes, see `StateStore.eager_state`."""
        return self.store.eager_state(task)

    def step_resident(self, task: str, param: Tensor, grad: Tensor) -> Tensor:
        """Take the step of a task by its own optimizer object; return the new parameter."""
        return self.residents.step(task, param, grad)

    def bring(self, task: str, param: Tensor, grad: Tensor | None) -> None:
        """Keep a whole parameter, and its gradient if it has one, until all of them step at once."""
        assert self.joint is not None
        self.joint.bring(task, param, grad)

    def take(self, task: str) -> Tensor:
        """Return the new parameter, once they have stepped."""
        assert self.joint is not None
        return self.joint.take(task)

    def drew_random_numbers(self, task: str) -> None:
        """Warn, once per plan, that the step of a task drew random numbers.

        Args:
            task: the name of the task.

        Raises:
            UnsupportedOptimizer: several ranks compute the task, and each would draw different numbers.
        """
        own, kind = self.plan.owned.task(task), plain_class(self.optimizer).__name__
        if own.owner is None and own.layout.grid.size > 1:
            raise UnsupportedOptimizer(
                f"{kind} draws random numbers, and every rank computes this matrix: their copies would differ",
                at=task,
                hint='wrap with strategy="owner"',
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                DrawsRandomNumbers(
                    f"{kind} draws random numbers (first for {task}). They come from the generator of the matrix's "
                    "owner, so the result is not, bit by bit, that of the plain optimizer on one device."
                ),
                stacklevel=2,
            )
