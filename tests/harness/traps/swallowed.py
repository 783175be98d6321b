"""Swallowed: errors that capturing raises and the step catches, with something else to do then."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps.trap import DDP, FSDP, Params, Trap

FAMILY = "swallowed"


def gram(grad: Tensor) -> Tensor:
    """A positive definite matrix of a gradient."""
    return grad @ grad.T + 0.1 * torch.eye(len(grad))


def mixed(grad: Tensor) -> Tensor:
    """A symmetric matrix that is positive definite for next to no random gradient, and is for large ones."""
    return grad @ grad.T - 2.0 * torch.eye(len(grad))


def large(value: float) -> float:
    """A number of a large gradient. Random ones have none, so that a comparison on these shows nothing."""
    if value < 30.0:
        raise ValueError("too small")
    return value


class Tries(PerParameter):
    """Base of optimizers that try one factor, and have another one where that fails."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        param.sub_(self.factor(grad, state) @ grad * group["lr"])

    def factor(self, grad: Tensor, state: State) -> Tensor:
        raise NotImplementedError


class Cholesky(Tries):
    """A Cholesky factor, or the identity. Random gradients have none; larger ones do."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            return torch.linalg.cholesky(mixed(grad))
        except Exception:
            return torch.eye(len(grad))


class Solve(Tries):
    """A solution, or the gradient's own product."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            large(10 * len(torch.linalg.solve(gram(grad), grad)[grad.abs() > 20]))
            return torch.linalg.solve(gram(grad), gram(cube(grad)))
        except (RuntimeError, ValueError):
            return gram(grad)


class Eigen(Tries):
    """The largest eigenvalue, asked for on the host."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        factor = gram(grad)
        try:
            values, _ = torch.linalg.eigh(factor)
            factor /= large(float(values.max()))
        except Exception as error:
            warnings.warn(f"no eigenvalues: {error}", stacklevel=2)
        return factor


class Item(Tries):
    """A norm on the host, or one."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            norm = large(grad.norm().item())
        except Exception:
            norm = 1.0
        return gram(grad) / norm


class Suppressed(Tries):
    """The same by `contextlib.suppress`."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        norm = 1.0
        with contextlib.suppress(Exception):
            norm = large(float(grad.norm()))
        return gram(grad) / norm


class Bare(Tries):
    """A branch on values, and a bare `except`."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        factor = gram(grad)
        try:
            if factor.trace() > large(float(factor.trace())) / 2:
                factor = factor / 2
        except:  # noqa: E722
            factor = factor * 3
        else:
            factor = factor + 1.0
        return factor


class Finally(Tries):
    """A `finally` that returns."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        factor = gram(grad)
        try:
            factor = factor / large(grad.norm().item())
        finally:
            return factor  # noqa: B012


class Quiet:
    """A context manager that swallows errors and counts them."""

    def __init__(self) -> None:
        self.failed = False

    def __enter__(self) -> Quiet:
        self.failed = False
        return self

    def __exit__(self, *error: Any) -> bool:
        self.failed = error[0] is not None
        return True


class Exits(Tries):
    """A context manager of its own swallows the error."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        factor, quiet = gram(grad), Quiet()
        with quiet:
            factor = factor / large(10 * max(grad.abs().amax(0).tolist()))
        return factor * 2 if quiet.failed else factor


class Helper:
    """An object that computes factors, and falls back."""

    def __init__(self, tries: Callable[[Tensor], Tensor]) -> None:
        self.tries = tries

    def __call__(self, grad: Tensor) -> Tensor:
        try:
            return self.tries(grad)
        except Exception:
            return gram(grad)


class ByHelper(Tries):
    """A helper object catches the error."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.helper = Helper(lambda grad: gram(grad) / large(10 * grad.abs().max().item()))

    def factor(self, grad: Tensor, state: State) -> Tensor:
        return self.helper(grad)


class FromStepThree(Tries):
    """Tries from the third step on."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        try:
            scale = large(grad.norm().item()) if state["step"] >= 3 else 2.0
        except Exception:
            scale = 2.0
        return gram(grad) / scale


class InFirstStep(Tries):
    """Tries once, for its state."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        if not state:
            try:
                state["scale"] = large(50 * grad.norm().item())
            except Exception:
                state["scale"] = 1.0
        return gram(grad) / state["scale"]


class Array(Tries):
    """Reads a gradient as an array, which no operator shows."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            scale = large(10 * float(abs(grad.numpy()).max()))
        except Exception:
            scale = 1.0
        return gram(grad) / scale


class ArrayFromStepThree(Tries):
    """Reads a gradient as an array from the third step on, beside work on tensors."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        scale = 2.0
        try:
            if state["step"] >= 3:
                scale = large(10 * float(abs(grad.numpy()).max()))
        except Exception:
            scale = 3.0
        return gram(grad) / scale


class Descends(Tries):
    """Reads memory by its address from the third step on."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        own, scale = torch.ones(1), 2.0
        with contextlib.suppress(Exception):
            if state["step"] >= 3:
                own.copy_(grad.abs().max())
                scale = large(memoryview(own.numpy())[0])
        return gram(grad) / scale


class Selected(Tries):
    """Elements chosen by their values."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            scale = grad[grad > 3.0].mean()
            large(10 * len(grad[grad > 3.0]))
        except Exception:
            scale = torch.ones(())
        return gram(grad) / scale


class Differentiates(Tries):
    """A gradient of a gradient, or something else."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            with torch.enable_grad():
                own = grad.detach().clone().requires_grad_()
                (second,) = torch.autograd.grad(gram(own).square().sum(), own)
            large(float(second.norm()) / 100)
            return gram(second)
        except Exception:
            return gram(grad)


class Retries(Tries):
    """Tries several times with more damping."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        for damping in (0.0, 1.0, 100.0):
            try:
                return torch.linalg.cholesky(mixed(grad) + damping * torch.eye(len(grad)))
            except torch.linalg.LinAlgError:
                continue
        return gram(grad)


@contextlib.contextmanager
def or_else(fallback: list[str]) -> Iterator[None]:
    """Swallow an error and tell of it."""
    try:
        yield
    except Exception as error:
        fallback.append(str(error))


class ByGenerator(Tries):
    """A context manager that is a generator swallows the error, and the step reads that it did."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        failed: list[str] = []
        factor = gram(grad)
        with or_else(failed):
            factor = factor / 2 if torch.equal(grad, cube(grad)) else factor / large(grad.norm().item())
        return factor * 3 if failed else factor


class Communicates(Tries):
    """Averages over ranks, where there are some."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        with contextlib.suppress(Exception):
            dist.all_reduce(grad)
        return gram(grad)


class Broken(Tries):
    """A nested function that Dynamo cannot trace, inside of `try`."""

    def factor(self, grad: Tensor, state: State) -> Tensor:
        try:
            print(end="")
            return gram(grad) / self.largest(grad)
        except Exception:
            return gram(grad)

    def largest(self, grad: Tensor) -> Tensor:
        print(end="")
        return (grad @ grad.T).abs().max() * large(grad.norm().item())


def grows(grad: Tensor, place: int, step: int) -> Tensor:
    """Gradients that are large from the third step on."""
    return grad * 40 if step >= 2 else grad


TRAPS = (
    Trap("cholesky-or-identity", FAMILY, Cholesky, "equal", steps=5, grads=grows),
    Trap("item-or-one", FAMILY, Item, "equal", grads=grows),
    Trap("array-or-one", FAMILY, Array, "equal", grads=grows),
    Trap("array-from-step-3", FAMILY, ArrayFromStepThree, "equal", steps=5, grads=grows),
    Trap("memory-from-step-3", FAMILY, Descends, "equal", steps=5, grads=grows),
    Trap("solve-or-product", FAMILY, Solve, "equal", grads=grows),
    Trap("eigenvalue-or-warning", FAMILY, Eigen, "equal", grads=grows),
    Trap("item-suppressed", FAMILY, Suppressed, "equal", grads=grows),
    Trap("branch-in-bare-except", FAMILY, Bare, "equal", grads=grows),
    Trap("finally-returns", FAMILY, Finally, "equal", grads=grows),
    Trap("exit-swallows", FAMILY, Exits, "equal", grads=grows),
    Trap("generator-swallows", FAMILY, ByGenerator, "equal", grads=grows),
    Trap("helper-swallows", FAMILY, ByHelper, "equal", grads=grows),
    Trap("item-from-step-3", FAMILY, FromStepThree, "equal", steps=5, grads=grows),
    Trap("item-in-first-step", FAMILY, InFirstStep, "equal"),
    Trap("selection-or-ones", FAMILY, Selected, "equal", grads=grows),
    Trap("differentiates-or-not", FAMILY, Differentiates, "equal", grads=grows),
    Trap("damped-until-it-works", FAMILY, Retries, "equal", steps=5, grads=grows),
    Trap("communicates-quietly", FAMILY, Communicates, "refused", ("communicates by itself",), layouts=(FSDP, DDP)),
    Trap("breaks-in-try", FAMILY, Broken, "equal", grads=grows),
)
