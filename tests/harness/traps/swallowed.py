"""Swallowed: errors that capturing raises and the step catches, with something else to do then."""

from __future__ import annotations

from typing import Any

from tests.harness.traps.grammar import EQUAL, REFUSED, Family, Said, nested
from tests.harness.traps.trap import DDP, FSDP

swallowed = Family("swallowed", EQUAL)
GROWS = "grad * 40 if step >= 2 else grad"  # gradients that are large from the third step on


def tries(name: str, **others: Any) -> Said:
    """A trap of a method that tries to compute a factor."""
    said = swallowed(name, base="Tries", **{"grads": GROWS, **others})
    return lambda text: said(nested("body:", nested("def factor(self, grad, state):", text)))


# A Cholesky factor, or the identity. Random gradients have none; larger ones do.
tries("cholesky-or-identity", steps=5)("""
    try:
        return torch.linalg.cholesky(mixed(grad))
    except Exception:
        return torch.eye(len(grad))
""")
# A norm on the host, or one.
tries("item-or-one")("""
    try:
        norm = large(grad.norm().item())
    except Exception:
        norm = 1.0
    return gram(grad) / norm
""")
# Reads a gradient as an array, which no operator shows.
tries("array-or-one")("""
    try:
        scale = large(10 * float(abs(grad.numpy()).max()))
    except Exception:
        scale = 1.0
    return gram(grad) / scale
""")
# Reads a gradient as an array from the third step on, beside work on tensors.
tries("array-from-step-3", steps=5)("""
    state["step"] = state.get("step", 0) + 1
    scale = 2.0
    try:
        if state["step"] >= 3:
            scale = large(10 * float(abs(grad.numpy()).max()))
    except Exception:
        scale = 3.0
    return gram(grad) / scale
""")
# A solution, or the gradient's own product.
tries("solve-or-product")("""
    try:
        large(10 * len(torch.linalg.solve(gram(grad), grad)[grad.abs() > 20]))
        return torch.linalg.solve(gram(grad), gram(cube(grad)))
    except (RuntimeError, ValueError):
        return gram(grad)
""")
# A norm by `contextlib.suppress`.
tries("item-suppressed")("""
    norm = 1.0
    with contextlib.suppress(Exception):
        norm = large(float(grad.norm()))
    return gram(grad) / norm
""")
# A branch on values, and a bare `except`.
tries("branch-in-bare-except")("""
    factor = gram(grad)
    try:
        if factor.trace() > large(float(factor.trace())) / 2:
            factor = factor / 2
    except:
        factor = factor * 3
    else:
        factor = factor + 1.0
    return factor
""")
# A `finally` that returns.
tries("finally-returns")("""
    factor = gram(grad)
    try:
        factor = factor / large(grad.norm().item())
    finally:
        return factor
""")
# A context manager of its own swallows the error.
tries("exit-swallows")("""
    factor, quiet = gram(grad), Quiet()
    with quiet:
        factor = factor / large(10 * max(grad.abs().amax(0).tolist()))
    return factor * 2 if quiet.failed else factor
""")
# A helper object catches the error.
swallowed("helper-swallows", base="Tries", grads=GROWS)("""
    begin: self.helper = Helper(lambda grad: gram(grad) / large(10 * grad.abs().max().item()))
    body:
        def factor(self, grad, state):
            return self.helper(grad)
""")
# A gradient of a gradient, or something else.
tries("differentiates-or-not")("""
    try:
        with torch.enable_grad():
            own = grad.detach().clone().requires_grad_()
            (second,) = torch.autograd.grad(gram(own).square().sum(), own)
        large(float(second.norm()) / 100)
        return gram(second)
    except Exception:
        return gram(grad)
""")
# Tries several times with more damping.
tries("damped-until-it-works", steps=5)("""
    for damping in (0.0, 1.0, 100.0):
        try:
            return torch.linalg.cholesky(mixed(grad) + damping * torch.eye(len(grad)))
        except torch.linalg.LinAlgError:
            continue
    return gram(grad)
""")
# Averages over ranks, where there are some.
tries("communicates-quietly", expected=REFUSED, says="communicates by itself", layouts=(FSDP, DDP))("""
    with contextlib.suppress(Exception):
        dist.all_reduce(grad)
    return gram(grad)
""")
# A nested function that Dynamo cannot trace, inside of `try`.
swallowed("breaks-in-try", base="Tries", grads=GROWS)("""
    body:
        def factor(self, grad, state):
            try:
                print(end="")
                return gram(grad) / self.largest(grad)
            except Exception:
                return gram(grad)

        def largest(self, grad):
            print(end="")
            return (grad @ grad.T).abs().max() * large(grad.norm().item())
""")
