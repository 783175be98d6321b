"""A plain optimizer and a wrapped one side by side: equal parameters, equal gradients, equal bits.

The plain one has whole tensors; the wrapped one may have a rank's fragments of them.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer
from torch.utils import _pytree as pytree

import canzona_compile
from canzona_compile.tensors import bytes_of
from tests.harness.layouts import ALONE, Case, Laid, full, local, replicate_of
from tests.harness.optimizers import SHARED, Shared, share_captures
from tests.harness.ranks import collectives

Shape = tuple[int, ...]
Make = Callable[[list[Any]], Optimizer]

TALL_AND_WIDE: tuple[Shape, ...] = ((6, 4), (4, 6))


def parameters(
    shapes: Iterable[Shape] = TALL_AND_WIDE, dtype: torch.dtype = torch.float32, seed: int = 0, size: float = 1.0
) -> list[Any]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter((torch.randn(shape, generator=random) * size).to(dtype)) for shape in shapes]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def feed(optimizer: Optimizer, step: int, seed: int = 0, size: float = 1.0) -> None:
    """Gradients that depend on the number of the step, the seed, and on nothing else."""
    random = torch.Generator().manual_seed(1000 + step + 100_000 * seed)
    for param in params_of(optimizer):
        param.grad = (torch.randn(param.shape, generator=random) * size).to(param.dtype)


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


def left_after(make: Callable[[], Any], use: Callable[[Any], Any]) -> list[str]:
    """What is alive of an optimizer that was made and used, once nobody holds it and before Python looks for garbage.

    Its parameters, which nobody else holds, the tensors of its state, its programs' memory, and what captured its code.
    """
    gc.collect()
    gc.disable()
    try:
        optimizer = make()
        use(optimizer)
        found = {"optimizer": weakref.ref(optimizer)}
        for i, own in enumerate(getattr(optimizer, "optimizers", [optimizer])):
            session = own.canzona.session if canzona_compile.is_wrapped(own) else None
            driver = None if session is None else session.driver
            programs = [] if driver is None else [program.executor for program in driver.programs]
            held = {
                "optimizer": [own],
                "parameter": params_of(own),
                "state": [leaf for leaf in pytree.tree_leaves(list(own.state.values())) if isinstance(leaf, Tensor)],
                "session": [] if session is None else [session, session.capture],
                "memory": [slot for executor in programs for slot in executor.slots],
            }
            found |= {f"{what} {i}.{j}": weakref.ref(one) for what, some in held.items() for j, one in enumerate(some)}
            del session, driver, programs, held, own
        del optimizer
        return [name for name, one in found.items() if one() is not None]
    finally:
        gc.enable()


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
    return torch.equal(bytes_of(a), bytes_of(b))


def same(found: Any, whole: Any, laid: Laid | None = None, place: int | None = None) -> bool:
    """Has a leaf the bits of the plain optimizer's? Objects that do not say what makes them equal count by their class.

    Compared is what torch gathers, and this rank's fragment where the leaf is laid out as the parameter at `place` is.
    """
    if isinstance(found, DTensor) and isinstance(whole, DTensor):  # a snapshot of this rank's
        return same_bits(local(found), local(whole))
    if isinstance(found, DTensor):
        gathered = full(found) if gathers(found) else whole  # a collective: on every rank, whatever this rank holds
        param: Any = None if laid is None or place is None else laid.params[place]
        if isinstance(param, DTensor) and (found.shape, found.placements) == (param.shape, param.placements):
            assert laid is not None
            assert place is not None
            if not same_bits(local(found).flatten(), laid.fragment(whole.detach(), place).flatten()):
                return False
        return same_bits(gathered, whole)
    says_what_is_equal = any("__eq__" in vars(kind) for kind in type(whole).__mro__[:-1])
    if not says_what_is_equal or callable(whole):
        return isinstance(found, type(whole))  # wrap makes a subclass of an optimizer's class
    return same_bits(found, whole)


def gathers(tensor: DTensor) -> bool:
    """Does torch gather it right? Where ranks descend it puts fragments in the wrong order."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    return bool(ranks == sorted(ranks))


def unlike(what: str, found: Any, whole: Any, laid: Laid | None = None, place: int | None = None) -> list[str]:
    """The leaves of two nested values that differ; of those that are found, which may be fragments, of the second."""
    mine, yours = (
        {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(value)[0]}
        for value in (found, whole)
    )
    wrong = [f"{what}{name} is on one side" for name in sorted(mine.keys() ^ yours.keys())]
    # Gathering is a collective: all ranks do it in one order.
    return wrong + [
        f"{what}{name}" for name in sorted(mine.keys() & yours.keys()) if not same(mine[name], yours[name], laid, place)
    ]


def different(plain: Optimizer, other: Optimizer, laid: Laid | None = None, states: bool = True) -> list[str]:
    """Parameters, and leaves of their states, of one optimizer that are not those of a plain one.

    Args:
        laid: the fragments that are the other's parameters; None if they are whole, or need only be gathered.
        states: whether states are compared.
    """
    at = {id(param): i for i, param in enumerate(laid.params if laid else ())}
    places = [at.get(id(param)) for param in params_of(other)]
    pairs = enumerate(zip(params_of(other), params_of(plain), places, strict=True))
    found = [f"parameter {i}" for i, (a, b, place) in pairs if not same(a.detach(), b.detach(), laid, place)]
    one, two = (dict(o.state_dict()["state"]) if states else {} for o in (plain, other))
    for key in sorted(one.keys() | two.keys(), key=str):
        place = places[key] if isinstance(key, int) else None
        found += unlike(f"state {key}", two.get(key, {}), one.get(key, {}), laid, place)
    return found


class Pair:
    """A plain optimizer of whole parameters and a wrapped one of a rank's fragments of them, made and fed alike."""

    def __init__(
        self,
        make: Make = muon,
        shapes: Iterable[Shape] = TALL_AND_WIDE,
        case: Case | Sequence[Case] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        sizes: tuple[float, float] = (1.0, 1.0),
        captures_anew: bool = False,
        among: Shared = SHARED,
        compares_state: bool = True,
        **options: Any,
    ) -> None:
        """Make both.

        Args:
            case: the layout of the wrapped one's parameters, or several by turns; None leaves them whole.
            seed: of values and gradients.
            sizes: standard deviations of the first parameters and of the gradients.
            captures_anew: do without what pairs before this one captured: for tests of how and how often that is done.
            among: those that share captures, see `share_captures`.
            compares_state: whether states are compared; objects of their own keep theirs elsewhere.
            options: of `wrap`.
        """
        self.seed, self.size, self.compares_state = seed, sizes[1], compares_state
        whole, values = (parameters(tuple(shapes), dtype, seed, sizes[0]) for _ in range(2))
        cases = [case] if isinstance(case, Case) else list(case or ())
        self.laid = Laid([value.detach() for value in values], *(cases or [ALONE]))
        self.plain = make(whole)
        self.wrapped: Any = canzona_compile.wrap(
            make(self.laid.params), **({"replicate": replicate_of(*cases)} if cases else {}), **options
        )
        if not captures_anew:
            share_captures(self.wrapped, among)
        self.number = 0  # of steps
        self.started = 0  # collectives of the wrapped optimizer's last step

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
        feed(self.plain, self.number, self.seed, self.size)
        for i in missing:
            params_of(self.plain)[i].grad = None
        self.share()

    def share(self) -> None:
        """Give the wrapped optimizer its fragments of the plain one's gradients."""
        place = {id(param): i for i, param in enumerate(self.laid.params)}
        for whole, own in zip(params_of(self.plain), params_of(self.wrapped), strict=True):
            at, grad = place.get(id(own)), whole.grad  # those that are not laid out have no place
            own.grad = grad if grad is None else grad.clone() if at is None else self.laid.like_param(grad, at)

    def take(self) -> None:
        """Take a step with the gradients that are there."""
        self.plain.step()
        before = collectives()
        self.wrapped.step()
        self.started = collectives() - before
        self.number += 1

    def go(self, count: int) -> None:
        """Take steps that are not compared: a comparison asks for the state, of all ranks."""
        for _ in range(count):
            self.feed()
            self.take()

    def different(self) -> list[str]:
        """What of the wrapped optimizer is not that of the plain one."""
        return different(self.plain, self.wrapped, self.laid, self.compares_state)

    def check(self) -> None:
        assert self.different() == [], f"after step {self.number}"

    def step(self, *missing: int) -> None:
        """One step of both; parameters at the positions `missing` have no gradient."""
        self.feed(*missing)
        self.take()
        self.check()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
