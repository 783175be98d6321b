"""Switches of torch and Python that people set for their whole process: equal bits with each, whenever it is set.

The plain optimizer runs under the same switch at the same moments. A step leaves every switch as it was.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import canzona_compile
from canzona_compile.compat.matmul_precision import BACKENDS, own_value
from canzona_compile.compat.torch_private import count_function_modes, dispatch_modes, set_fp32_precision
from canzona_compile.errors import CanzonaError
from tests.harness.marks import crossed
from tests.harness.toys import DecoratedMuon

MOMENTS = {  # the steps that a switch is set for, of five
    "from before wrap on": range(-1, 5),
    "from the first step on": range(5),
    "after the first step": range(1, 5),
    "for two steps": range(1, 3),
    "until the second step": range(-1, 2),
}


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def called(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def precision(owner: Any, value: str) -> AbstractContextManager[None]:
    """One of the new switches, which is not set otherwise."""
    return called(lambda own: setattr(owner, "fp32_precision", own), value, "none")


@contextlib.contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


backends = torch.backends
PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fp32 precision of all backends": lambda: precision(backends, "tf32"),
    "fp32 precision of cuda": lambda: precision(backends.cuda.matmul, "tf32"),
    "fp32 precision of mkldnn": lambda: precision(backends.mkldnn.matmul, "bf16"),
    "fp32 precision of convolutions": lambda: precision(backends.cudnn.conv, "tf32"),
    "the old precision": lambda: called(torch.set_float32_matmul_precision, "medium", "highest"),
    "allow_tf32": lambda: attribute(backends.cuda.matmul, "allow_tf32", True),
}
SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "deterministic": lambda: called(torch.use_deterministic_algorithms, True, False),
    "deterministic, warns": lambda: called(
        lambda own: torch.use_deterministic_algorithms(own, warn_only=own), True, False
    ),
    "float64 by default": lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: called(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta by default": lambda: called(torch.set_default_device, "meta", None),
    "cpu by default": lambda: called(torch.set_default_device, "cpu", None),
    "with the meta device": lambda: torch.device("meta"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "gradients are off": lambda: called(torch.set_grad_enabled, False, True),
    "autocast": lambda: torch.autocast("cpu"),
    "a function mode": Functions,
    "a dispatch mode": Operators,
    "uninitialized memory": lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "denormals are flushed": lambda: called(torch.set_flush_denormal, True, False),
    "no mkldnn": lambda: backends.mkldnn.flags(enabled=False),
    "no dynamo": lambda: torch._dynamo.config.patch(disable=True),
    "errors are suppressed": lambda: torch._dynamo.config.patch(suppress_errors=True),
    "few recompiles": lambda: torch._dynamo.config.patch(recompile_limit=1),
    "as written": lambda: torch.compiler.set_stance("force_eager"),
    "no recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "warnings are errors": warnings_as_errors,
    "recursion": lambda: called(sys.setrecursionlimit, 600, sys.getrecursionlimit()),
    "saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
}
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "traced": lambda params: torch.optim.Muon(params, lr=0.02),
    "dispatched": lambda params: DecoratedMuon(params),
}


def set_now() -> dict[str, Any]:
    """What a step must leave as it was."""
    return {
        "precision": [own_value(name, what) for name in BACKENDS for what in ("matmul", "all")],
        "deterministic": torch.get_deterministic_debug_mode(),
        "dtype": torch.get_default_dtype(),
        "modes": (len(dispatch_modes()), count_function_modes()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "filters": list(warnings.filters),
        "signal": signal.getsignal(signal.SIGINT),
        "recursion": sys.getrecursionlimit(),
        "random": torch.get_rng_state().tolist(),
    }


def train(make: Callable[[Any], Optimizer], switch: Callable[[], Any], steps: range, wrapped: bool) -> list[Tensor]:
    """Five steps, with a switch set for some of them; parameters and state after each."""
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(6, 4, generator=random)) for _ in range(2)]
    optimizer = make(params)
    with contextlib.ExitStack() as stack:
        if -1 in steps:
            stack.enter_context(switch())
        if wrapped:
            canzona_compile.wrap(optimizer)
        for step in range(5):
            if step == steps.start:
                stack.enter_context(switch())
            if step == steps.stop:
                stack.close()
            for param in params:
                param.grad = torch.randn(6, 4, generator=random, device="cpu", dtype=torch.float32)
            before = set_now()
            optimizer.step()
            after = set_now()
            assert not wrapped or after == before
    state = optimizer.state_dict()["state"]
    leaves = [value for own in state.values() for value in own.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*params, *leaves)]


def check(switch: Callable[[], Any], kind: str, moment: str, fails: str = "") -> None:
    """Compare with the plain optimizer; if that fails by itself, the wrapped one has to say the same words."""
    if fails:
        for wrapped in (False, True):
            with pytest.raises((RuntimeError, CanzonaError), match=fails):
                train(KINDS[kind], switch, MOMENTS[moment], wrapped)
        return
    plain, ours = (train(KINDS[kind], switch, MOMENTS[moment], wrapped) for wrapped in (False, True))
    assert len(plain) == len(ours) == 4
    assert all(map(torch.equal, plain, ours))


def failure(name: str, kind: str, moment: str) -> str:
    """What the plain optimizer says that fails under a switch; empty if it does not fail."""
    if kind == "dispatched" and "meta" in name:  # it makes a tensor of a number
        return "Tensor on device meta is not on the expected device cpu"
    if (name, moment) == ("inference mode", "until the second step"):  # it has made its state in that mode
        return "Inplace update to inference tensor outside InferenceMode"
    return ""


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """The switches of precision as they are in a new process."""
    before = torch.get_float32_matmul_precision()
    kept = [(name, what, own_value(name, what)) for name in BACKENDS for what in ("matmul", "all")]
    for name in BACKENDS:
        set_fp32_precision(name, "matmul", "none")
    yield
    torch.set_float32_matmul_precision(before)
    for name, what, value in kept:
        set_fp32_precision(name, what, value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind", "moment"), crossed(list(PRECISIONS), list(KINDS), list(MOMENTS)))
def test_precisions(name: str, kind: str, moment: str) -> None:
    check(PRECISIONS[name], kind, moment)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "kind", "moment"), crossed(list(SWITCHES), list(KINDS), list(MOMENTS)))
def test_switches(name: str, kind: str, moment: str) -> None:
    check(SWITCHES[name], kind, moment, failure(name, kind, moment))
