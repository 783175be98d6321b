"""A plain optimizer and a wrapped one side by side: equal parameters, equal gradients, equal bits.

The plain one has whole tensors; the wrapped one may have a rank's fragments of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.optim import Muon, Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from tests.harness.layouts import Case, Laid, full, replicate_of
from tests.harness.optimizers import share_captures

Shape = tuple[int, ...]
Make = Callable[[list[Any]], Optimizer]

TALL_AND_WIDE: tuple[Shape, ...] = ((6, 4), (4, 6))


def parameters(shapes: Iterable[Shape] = TALL_AND_WIDE, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Any]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def feed(optimizer: Optimizer, step: int) -> None:
    """Gradients that depend on the number of the step and on nothing else."""
    random = torch.Generator().manual_seed(1000 + step)
    for param in params_of(optimizer):
        param.grad = torch.randn(param.shape, generator=random).to(param.dtype)


def muon(params: list[Any], **hypers: Any) -> Muon:
    return Muon(params, **{"lr": 0.1, **hypers})


def wrapped_muon(shapes: Iterable[Shape] = TALL_AND_WIDE, **hypers: Any) -> Any:
    wrapped = canzona_compile.wrap(muon(parameters(shapes), **hypers))
    share_captures(wrapped)
    return wrapped


def capture_alone(optimizer: Optimizer, **options: Any) -> None:
    """Two wrapped steps of it: in the process that ranks are forked from, what each of them would capture by itself."""
    share_captures(canzona_compile.wrap(optimizer, **options))
    for _ in range(2):
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def same_bits(a: Any, b: Any) -> bool:
    """Are two tensors, or two other leaves of a state, the same? NaNs too."""
    if not isinstance(a, Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def different(plain: Optimizer, other: Optimizer) -> list[str]:
    """Parameters, and leaves of their states, that differ between two optimizers; the other's may be fragments."""
    found = different_params(plain, other)
    one, two = (pytree.tree_flatten_with_path(o.state_dict()["state"])[0] for o in (plain, other))
    mine, yours = ({pytree.keystr(path): leaf for path, leaf in leaves} for leaves in (one, two))
    found += [f"state {name} is on one side" for name in mine.keys() ^ yours.keys()]
    # Gathering is a collective: all ranks do it in one order.
    for name in sorted(mine.keys() & yours.keys()):
        other_leaf = full(yours[name]) if isinstance(yours[name], Tensor) else yours[name]
        if not same_bits(mine[name], other_leaf):
            found.append(f"state {name}")
    return found


def different_params(plain: Optimizer, other: Optimizer) -> list[str]:
    pairs = zip(params_of(plain), params_of(other), strict=True)
    return [f"parameter {i}" for i, (a, b) in enumerate(pairs) if not same_bits(a, full(b))]


class Pair:
    """A plain and a wrapped optimizer made alike."""

    def __init__(
        self,
        make: Make = muon,
        shapes: Sequence[Shape] = TALL_AND_WIDE,
        captures_anew: bool = False,
        compares_state: bool = True,
        case: Case | None = None,
        **options: Any,
    ) -> None:
        """Make both.

        Args:
            captures_anew: do without what pairs before this one captured: for tests of how and how often that is done.
            compares_state: whether steps compare the states; objects of their own keep theirs elsewhere.
            case: the layout of the wrapped one's parameters; None leaves them whole.
            options: of `wrap`.
        """
        self.plain = make(parameters(shapes))
        self.laid = Laid([param.detach() for param in parameters(shapes)], case or Case("plain", ()))
        if case is not None:
            options = {"replicate": replicate_of(case), **options}
        self.wrapped: Any = canzona_compile.wrap(make(self.laid.params), **options)
        if not captures_anew:
            share_captures(self.wrapped)
        self.number = 0
        self.different = different if compares_state else different_params

    @property
    def both(self) -> tuple[Optimizer, Any]:
        return self.plain, self.wrapped

    @property
    def report(self) -> canzona_compile.Report:
        found: canzona_compile.Report = self.wrapped.canzona.report()
        return found

    def set(self, name: str, value: Any, group: int = 0) -> None:
        """Change a hyperparameter of both."""
        for optimizer in self.both:
            optimizer.param_groups[group][name] = value

    def feed(self, *missing: int) -> None:
        """Give both the gradients of the next step; parameters at the positions `missing` have none."""
        feed(self.plain, self.number)
        place = {id(param): i for i, param in enumerate(self.laid.params)}
        for i, (whole, own) in enumerate(zip(params_of(self.plain), params_of(self.wrapped), strict=True)):
            if i in missing:
                whole.grad = None
            at = place.get(id(own))  # None of those that are not laid out
            grad = whole.grad
            own.grad = grad if grad is None else grad.clone() if at is None else self.laid.like_param(grad, at)

    def step(self, *missing: int) -> None:
        """One step of both; parameters at the positions `missing` have no gradient."""
        self.feed(*missing)
        for optimizer in self.both:
            optimizer.step()
        self.number += 1
        assert self.different(self.plain, self.wrapped) == [], f"after step {self.number}"

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
