"""Parameters of tensor classes that FSDP2 gathers in their own way: stepped as the plain optimizer steps them.

A class around one tensor, as torchao's for float8, is that tensor to plans. What is made of several tensors steps where
each rank steps its fragments by the class's own operators.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import canzona_compile
from canzona_compile import CanzonaError
from canzona_compile.tensors import local_part
from tests.harness.layouts import full, mesh_of
from tests.harness.marks import only
from tests.harness.model_pairs import update
from tests.harness.optimizers import share_captures
from tests.harness.pairs import params_of, same_bits
from tests.harness.published import imported
from tests.harness.ranks import run


class Around(Tensor):
    """A tensor around another one, on which all operators work; only views and copies are of the class again."""

    held: Tensor
    again = frozenset({"detach", "clone", "view", "slice", "split", "empty_like", "new_zeros", "as_strided", "copy_"})

    @staticmethod
    def __new__(cls, held: Tensor) -> Around:
        made: Around = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), dtype=held.dtype, requires_grad=held.requires_grad
        )
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.held})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> Around:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = partial(pytree.tree_map_only, Around, lambda own: own.held)
        found = func(*inside(args), **inside(kwargs or {}))
        if func.overloadpacket.__name__.endswith("_") and isinstance(args[0], Around):
            return args[0]
        again = cls.again is None or func.overloadpacket.__name__ in cls.again
        return pytree.tree_map_only(Tensor, cls, found) if again else found

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self.held,), None

    def fsdp_post_all_gather(self, outputs: Any, _metadata: Any, _dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


class AroundAll(Around):
    """All results are of the class, so that the plain optimizer holds state of it."""

    again = None  # type: ignore[assignment]


class Halved(Around):
    """Shows half of what it holds, so it is not the tensor that it is made of."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            return func(*(a.held / 2 if isinstance(a, Halved) else a for a in args))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Two(TwoTensor):
    """As that of torch's tests of FSDP2."""

    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs: Any, _metadata: Any, _dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Two(*outputs), outputs)


def two(weight: Tensor) -> Tensor:
    return Two(weight, weight.clone())


def float8(weight: Tensor) -> Tensor:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    config = imported("torchao.float8").Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    made: Any = imported("torchao.float8.float8_linear").Float8Linear.from_float(layer, config)
    return made.weight.detach()  # type: ignore[no-any-return]


CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    **{"around": Around, "around all": AroundAll, "halved": Halved},
    **{"two": two, "float8": float8},
}


def model_of(kind: str = "", shard: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.Linear(8, 6))
    for layer in model[1:3] if kind else ():
        layer.weight = nn.Parameter(CLASSES[kind](layer.weight.detach()))
    for layer in (*model, model) if shard else ():
        fully_shard(layer, mesh=mesh_of((2,), ("dp",)))
    return model


def backward(model: nn.Module, step: int) -> None:
    """On all ranks the same, so that the average over two of them is exact."""
    tokens = torch.randint(0, 6, (2, 5), generator=torch.Generator().manual_seed(step))
    model(tokens).square().mean().backward()


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def muon(model: nn.Module) -> Any:
    return torch.optim.Muon([(n, p) for n, p in model.named_parameters() if n in ("1.weight", "2.weight")], lr=0.1)


def both(model: nn.Module) -> Any:
    return canzona_compile.chain(muon(model), torch.optim.AdamW([model[0].weight, model[3].weight], lr=0.01))


OPTIMIZERS = {"adamw": adamw, "muon": muon, "both": both}


def plain_values(tensor: Any) -> Tensor:
    """What a tensor shows, whole."""
    whole = full(tensor.detach())
    return whole.a if isinstance(whole, Two) else local_part(whole)


def train(kind: str, name: str, shard: bool = False, between: Callable[[Any], None] | None = None) -> list[str]:
    """What differs from the plain optimizer of plain parameters, on one device; before and after a checkpoint."""
    model, expected = model_of(kind, shard), model_of()
    optimizer, plain = canzona_compile.wrap(OPTIMIZERS[name](model)), OPTIMIZERS[name](expected)
    share_captures(optimizer)
    wrong = []
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = OPTIMIZERS[name](model)
            optimizer.load_state_dict(saved)
        if step == (3 if shard else 4):  # alone, the plain optimizer has gone on from what the wrapped one saved
            share_captures(canzona_compile.wrap(optimizer))
        backward(model, step)
        for own, whole in zip(model.parameters(), expected.parameters(), strict=True):
            whole.grad = plain_values(own.grad).clone()
        update((optimizer, plain))
        if between is not None:
            between(model)
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        wrong += [f"{i} after {step}" for i, (a, b) in enumerate(pairs) if not same_bits(plain_values(a), b.detach())]
    return wrong


COVERED = [("around", "both"), ("around all", "adamw")]


@pytest.mark.parametrize(
    ("kind", "name"), only([*COVERED, ("around all", "muon")], ["around", "around all"], OPTIMIZERS)
)
def test_alone(kind: str, name: str) -> None:
    assert train(kind, name) == []


@pytest.mark.parametrize(("kind", "name"), only(COVERED, ["around", "around all"], OPTIMIZERS))
def test_under_fsdp2(kind: str, name: str) -> None:
    assert run(2, train, kind, name, True, after=partial(train, kind, name)) == [[]] * 2


def test_float8_of_torchao() -> None:
    """With a scale that is computed before the next all-gather, as torchtitan does after each step."""
    assert train("float8", "both", between=scaled) == []


def scaled(model: nn.Module) -> None:
    for layer in model[1:3]:  # type: ignore[index]
        layer.weight._precomputed_scale = torch.tensor(2.0)


def stepped(kind: str, name: str, shard: bool = True) -> str:
    """The error of a step; else what differs from the plain optimizer, or nothing."""
    try:
        return str(train(kind, name, shard) or "")
    except CanzonaError as error:
        return str(error)


def test_what_several_tensors_make_up_steps_elementwise_and_has_no_owner() -> None:
    assert run(2, stepped, "two", "adamw") == [""] * 2
    for text in run(2, stepped, "two", "both"):
        assert "the parameter is a Two, made of a, b, but its update needs the whole matrix as one plain" in text


def test_a_class_that_shows_other_values_than_it_holds() -> None:
    assert stepped("halved", "adamw", False) == ""
    assert "the parameter is a Halved, made of held, but its update" in stepped("halved", "muon", False)


def under_zero1(kind: str) -> str:
    model = model_of(kind)
    try:
        optimizer = canzona_compile.zero1(model, adamw(model), mesh=mesh_of((2,), ("dp",)))
        backward(model, 0)
        optimizer.step()
    except CanzonaError as error:
        return str(error)
    return ""


def test_zero1() -> None:
    assert run(2, under_zero1, "around") == [""] * 2
    assert all("made of a, b, but zero1 sends slices of plain tensors" in text for text in run(2, under_zero1, "two"))


def test_copies() -> None:
    optimizer = canzona_compile.wrap(muon(model_of("around")))
    share_captures(optimizer)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for param in params_of(made):
            assert type(param) is Around
            param.grad = torch.ones(param.shape)
        made.step()
