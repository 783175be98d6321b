"""See whether the step of two equal parameters lets a value of one reach the other: every value has labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.capture.fake_twin import FakeTwin
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.replica.leaves import state_leaves
from canzona_compile.replica.memory import given_to, storage_of
from canzona_compile.replica.parameter_spec import ParamExample
from canzona_compile.replica.raised import NoCollectives, Untraceable


def check_separable(optimizer: Optimizer, like: ParamExample) -> bool:
    """Step two equal parameters that have no values, and check that no value of one reaches the other.

    This takes no capture: values are labelled while the step runs as written. It is the step after the first one, as
    what creates state may look at all parameters, to see how many there are.

    Args:
        optimizer: the optimizer.
        like: what both parameters are like.

    Returns:
        Whether the step could be followed. If not, only a rehearsal shows whether parameters are independent.

    Raises:
        UnsupportedOptimizer: the parameters depend on one another.
    """
    try:
        twin = FakeTwin(optimizer, like, with_numbers=False, count=2)
        labels = Labels()
        for i, param in enumerate(twin.params):
            for tensor in held_by(twin, param):
                labels.put(tensor, frozenset({i}))
        twin.attempt(lambda: twin.step_eagerly(labels))
    except Untraceable:
        return False
    if any(len(labels.of(tensor)) > 1 for param in twin.params for tensor in held_by(twin, param)):
        raise UnsupportedOptimizer(
            f"{plain_class(optimizer).__name__} couples parameters: the update of one depends on others",
            at=like.name,
            hint="move the coupling (global norms, shared statistics) out of step(), for example to clip_grad_norm_",
        )
    return True


def held_by(twin: FakeTwin, param: Tensor) -> Iterator[Tensor]:
    """Yield a parameter of a twin, its gradient and the tensors of its state."""
    leaves = (leaf for _, leaf in state_leaves(twin.twin.state.get(param, {})))
    yield from (value for value in (param, param.grad, *leaves) if isinstance(value, Tensor))


class Labels(NoCollectives):
    """Inside this mode, and a mode of fake tensors around it, memory has labels: the parameters behind its values."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, frozenset[int]] = {}  # by memory
        self._alive: list[Tensor] = []  # so that no other memory gets the address of a known one

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Return the labels of a tensor."""
        return self._labels.get(storage_of(tensor), frozenset())

    def put(self, tensor: Tensor, labels: frozenset[int]) -> None:
        """Label a tensor."""
        self._labels[storage_of(tensor)] = labels
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check(func)
        found = func(*args, **(kwargs or {}))
        declared, given = func._schema.arguments, given_to(func, args, kwargs or {})
        fresh = [given.pop(a.name) for a in declared if a.is_out and fills_memory(given.get(a.name))]
        written = [given.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write]
        # Entry i of what a `_foreach_` operator gives depends on entries i alone.
        by_entry = "_foreach_" in str(func)
        count = max((len(v) for v in given.values() if by_entry and isinstance(v, list | tuple)), default=1)
        for i in range(count):
            behind = [self.of(tensor) for value in given.values() for tensor in entries(value, i, count)]
            for value in (found, *fresh, *written):
                for tensor in entries(value, i, count):
                    self.put(tensor, frozenset().union(*behind))
        return found


def fills_memory(value: Any) -> bool:
    """Tell whether nothing is left of the memory of a tensor once it is written whole."""
    return isinstance(value, Tensor) and value.numel() * value.itemsize == value.untyped_storage().nbytes()


def entries(value: Any, i: int, count: int) -> Iterator[Tensor]:
    """Yield the tensors of an operand or a result that concern entry i of some."""
    own = value if isinstance(value, list | tuple) else [value]
    yield from (entry for entry in (own[i : i + 1] if len(own) == count else own) if isinstance(entry, Tensor))
