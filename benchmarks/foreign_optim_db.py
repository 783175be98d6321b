"""Every optimizer and every input of torch's own table of optimizers, wrapped against plain: equal bits.

`foreign_tests.py` runs this file like the tests of others; alone, without the layer, it compares plain with plain.
The table is `torch.testing._internal.common_optimizers.optim_db`, which torch installs. It needs expecttest.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)
from torch.utils import _pytree as pytree

import foreign_layer

STEPS = 4
MATRICES, SHAPES = ((7, 5), (5, 7)), ((7, 5), (7,), (5, 7))
Seeded = Callable[[tuple[int, ...]], Tensor]


def cases(flags: bool) -> Iterator[Any]:
    """Every optimizer with every input, and those with and without foreach and fused, if wanted."""
    for info in optim_db:
        inputs = info.optim_inputs_func(device="cpu")
        if flags:
            inputs = _get_optim_inputs_including_global_cliquey_kwargs("cpu", None, info, skip=("differentiable",))
        for number, given in enumerate(inputs):
            yield pytest.param(info, given, id=f"{name_of(info)}-{number}-{given.desc or 'default'}")


def class_of(info: OptimizerInfo) -> Any:
    """The optimizer, which torch types as an object of it."""
    return info.optim_cls


def name_of(info: OptimizerInfo) -> str:
    return str(class_of(info).__name__)


class Training:
    """An optimizer of a few parameters, with the same gradients in each training with the same seed."""

    def __init__(self, info: OptimizerInfo, given: OptimizerInput, dtype: torch.dtype = torch.float32) -> None:
        self.info, self._random = info, torch.Generator().manual_seed(0)
        shapes = MATRICES if class_of(info) is torch.optim.Muon else SHAPES
        self.params = [torch.nn.Parameter(torch.randn(s, generator=self._random).to(dtype)) for s in shapes]
        groups: Any = self.params
        if info.supports_param_groups:
            groups = [{"params": self.params[:1], "weight_decay": 0.01}, {"params": self.params[1:]}]
        if info.only_supports_sparse_grads or not info.supports_param_groups:
            groups = self.params
        self.optimizer: Any = class_of(info)(groups, **copy.deepcopy(given.kwargs))

    def step(self, without: int | None = None) -> None:
        """Give every parameter a gradient, except one that has none, and step."""
        for number, param in enumerate(self.params):
            grad = torch.randn(param.shape, generator=self._random).to(param.dtype)
            if self.info.only_supports_sparse_grads:
                grad = torch.where(grad > 0, grad, 0).to_sparse()
            param.grad = None if number == without else grad
        if not self.info.step_requires_closure:
            self.optimizer.step()
            return

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = sum((p - 1).square().sum() for p in self.params)
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def take_over(self, optimizer: Any) -> None:
        """Go on with a copy of the optimizer, which has its own copies of the parameters."""
        self.optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"]]


def both(*given: Any) -> tuple[Training, Training]:
    """The same training with a plain optimizer, and with what the layer makes of one."""
    with foreign_layer.plain():
        plain = Training(*given)
    return plain, Training(*given)


def assert_same(plain: Training, ours: Training) -> None:
    """Parameters, gradients, state and groups are equal to the bit."""
    for a, b in zip(plain.params, ours.params, strict=True):
        assert_equal(a, b, "a parameter")
    assert_equal(plain.optimizer.state_dict(), ours.optimizer.state_dict(), "the state dict")


def assert_equal(plain: Any, ours: Any, what: str) -> None:
    """Trees with equal keys and values, and tensors with equal bits and dtypes."""
    expected, found = leaves_of(plain), leaves_of(ours)
    assert expected.keys() == found.keys(), f"{what} has not the same keys: {sorted(expected.keys() ^ found.keys())}"
    for path, a in expected.items():
        b, at = found[path], what + path
        assert type(a) is type(b), f"{at} is a {type(b).__name__}, not a {type(a).__name__}"
        if isinstance(a, Tensor):
            assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), f"{at} has another form"
            assert torch.equal(a, b), f"{at} differs by {(a - b).abs().max():g}"
        else:
            assert a == b, f"{at} is {b!r}, not {a!r}"


def leaves_of(tree: Any) -> dict[str, Any]:
    """Every leaf by its path; state that is empty is one, too."""
    found = pytree.tree_flatten_with_path(tree, is_leaf=lambda held: isinstance(held, dict) and not held)[0]
    return {pytree.keystr(path): leaf for path, leaf in found}


@pytest.mark.parametrize(("info", "given"), cases(flags=True))
def test_steps(info: OptimizerInfo, given: OptimizerInput) -> None:
    plain, ours = both(info, given)
    for number in range(STEPS):
        for training in (plain, ours):
            training.step(without=0 if number == 2 else None)
        assert_same(plain, ours)


@pytest.mark.parametrize(("info", "given"), cases(flags=False))
def test_steps_in_bfloat16(info: OptimizerInfo, given: OptimizerInput) -> None:
    plain, ours = both(info, given, torch.bfloat16)
    for _ in range(STEPS):
        plain.step()
        ours.step()
    assert_same(plain, ours)


@pytest.mark.parametrize(("info", "given"), cases(flags=False))
def test_loading(info: OptimizerInfo, given: OptimizerInput) -> None:
    """State of each goes into each; then all take the same steps."""
    plain, ours = both(info, given)
    for training in (plain, ours):
        training.step()
        training.step()
    loaded = []
    for saved in (plain, ours):
        for new in both(info, given):
            file = io.BytesIO()
            torch.save(saved.optimizer.state_dict(), file)
            file.seek(0)
            new.optimizer.load_state_dict(torch.load(file, weights_only=True))
            with torch.no_grad():
                for param, value in zip(new.params, saved.params, strict=True):
                    param.copy_(value)
            new._random.set_state(saved._random.get_state())
            loaded.append(new)
    for training in (plain, *loaded):
        training.step()
        training.step()
    for training in loaded:
        assert_same(plain, training)


@pytest.mark.parametrize(("info", "given"), cases(flags=False))
def test_hooks(info: OptimizerInfo, given: OptimizerInput) -> None:
    said: list[list[str]] = []
    trainings = both(info, given)
    for training in trainings:
        calls: list[str] = []
        training.optimizer.register_step_pre_hook(noting(calls, "before step"))
        training.optimizer.register_step_post_hook(noting(calls, "after step"))
        training.optimizer.register_state_dict_pre_hook(noting(calls, "before state_dict"))
        training.optimizer.register_state_dict_post_hook(noting(calls, "after state_dict"))
        training.optimizer.register_load_state_dict_pre_hook(noting(calls, "before load_state_dict"))
        training.optimizer.register_load_state_dict_post_hook(noting(calls, "after load_state_dict"))
        training.step()
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        training.step()
        said.append(calls)
    assert said[0] == said[1]
    assert_same(*trainings)


def noting(calls: list[str], what: str) -> Callable[..., None]:
    """A hook that notes that it was called."""

    def hook(*_: Any) -> None:
        calls.append(what)

    return hook


@pytest.mark.parametrize(("info", "given"), cases(flags=False))
def test_copies(info: OptimizerInfo, given: OptimizerInput) -> None:
    """Copies go on like the original, which stays as it was."""
    trainings = both(info, given)
    ways: list[Callable[[Any], Any]] = [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))]
    for training in trainings:
        for copied in ways:
            training.step()
            before = [param.detach().clone() for param in training.params]
            original = training.params
            training.take_over(copied(training.optimizer))
            training.step()
            for old, param in zip(before, original, strict=True):
                assert_equal(old, param.detach(), "a parameter of the original")
    assert_same(*trainings)


@pytest.mark.parametrize("info", optim_db, ids=name_of)
def test_schedulers(info: OptimizerInfo) -> None:
    trainings = both(info, info.optim_inputs_func(device="cpu")[0])
    every: Any = info.scheduler_inputs
    for inputs in every:
        for training in trainings:
            schedulers = [make(training.optimizer) for make in inputs]
            for _ in range(3):
                training.step()
                for scheduler in schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(*[1.0] if plateau else [])
        assert_same(*trainings)


@pytest.mark.parametrize("info", [i for i in optim_db if "differentiable" in i.supported_impls], ids=name_of)
def test_differentiable(info: OptimizerInfo) -> None:
    """The gradient through a step."""
    found: list[Any] = []
    for layer in (foreign_layer.plain(), nullcontext()):
        start = torch.arange(1.0, 11.0, requires_grad=True)
        param = start.clone()
        param.grad = torch.arange(10.0)
        with layer:
            optimizer: Any = class_of(info)([param], differentiable=True)
        optimizer.step()
        param.sum().backward()
        found.append(start.grad)
    assert_equal(found[0], found[1], "the gradient")


@pytest.mark.parametrize("info", [i for i in optim_db if i.supports_complex], ids=name_of)
def test_complex(info: OptimizerInfo) -> None:
    plain, ours = both(info, info.optim_inputs_func(device="cpu")[0], torch.complex64)
    for _ in range(STEPS):
        plain.step()
        ours.step()
    assert_same(plain, ours)


@pytest.mark.parametrize("info", [i for i in optim_db if i.supports_sparse], ids=name_of)
def test_sparse_gradients(info: OptimizerInfo) -> None:
    found = []
    for layer in (foreign_layer.plain(), nullcontext()):
        param = torch.nn.Parameter(torch.arange(-6.0, 6.0).reshape(4, 3))
        with layer:
            optimizer = class_of(info)([param])
        for _ in range(STEPS):
            param.grad = torch.where(param.detach() > 0, 1.0, 0.0).to_sparse()
            optimizer.step()
        found.append((param, optimizer.state_dict()))
    assert_equal(found[0], found[1], "a parameter or the state")
