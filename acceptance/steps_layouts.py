"""Every layout against the plain optimizer, first call by call; and ZeRO-1. The verdict says what is promised."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from acceptance.side_by_side import REFRESH, SideBySide, even, stacks, uneven
from acceptance.step import AcceptanceRank, AcceptanceStep, OnRanks, needs_of
from canzona_compile.tools.verification.layouts import LAYOUTS

STEPS = REFRESH + 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUTS = ("fsdp", "ddp", "fsdp_columns", "tp", "hsdp", "tp_ddp", "both_dims", "stages")
MEANING = (
    "The wrapped optimizer gives different results from the plain one on this device. A relative distance near "
    "rounding points to a product in another order or precision (check TF32 and similar settings), a large one to "
    "fragments in wrong places or memory that is read too early. Compare with the other steps: if only layouts with "
    "several ranks fail, communication is wrong; if `whole` fails too, a kernel is wrong."
)
ZERO1_STEPS = 8
ZERO1_MEANING = (
    "Backward reduced gradients to wrong owners or too early, the step updated parameters of other owners, or "
    "parameters were read before they were gathered. If only gather=forward fails, it is the last: find the code that "
    "reads parameters outside of a module's forward pass. If it hangs, ranks start buckets in different orders: see "
    "their stacks."
)


def same_as_plain(rank: AcceptanceRank, optimizer: str, layout: str, dtype: str, odd: bool) -> str:
    """Step call by call, while gradients are elsewhere in every step.

    Args:
        odd: whether shapes do not divide; they are padded on CUDA, so that sums have another order.
    """
    shapes = stacks if optimizer == "stacks" else uneven if odd else even
    both = SideBySide(rank, optimizer, layout, shapes(rank), DTYPES[dtype], cuda_graphs=False)
    both.step(STEPS, in_place=False)
    return both.verdict()


def muon_beside_adamw(rank: AcceptanceRank, layout: str) -> str:
    """Step Muon on matrices and AdamW on vectors and matrices, one after the other."""
    vectors = ((24,), (10, 16)) if rank.tiny else ((1000,), (512, 100))
    pairs = [
        SideBySide(rank, "muon", layout, even(rank), cuda_graphs=False),
        SideBySide(rank, "adamw", layout, vectors, seed=1, cuda_graphs=False),
    ]
    for _ in range(STEPS):
        for both in pairs:
            both.step(in_place=False)
    return "; ".join(f"{name} {both.verdict()}" for name, both in zip(("muon", "adamw"), pairs, strict=True))


def same_under_zero1(rank: AcceptanceRank, optimizer: str, gather: str, odd: bool) -> str:
    """Train on gradients of a backward pass, whose means over ranks are exact.

    Args:
        odd: whether shapes do not divide.
    """
    both = SideBySide(rank, optimizer, "zero1", (uneven if odd else even)(rank), gather=gather)
    both.step(ZERO1_STEPS)
    return both.verdict()


def step_of(optimizer: str, layout: str, dtype: str = "float32", odd: bool = False) -> AcceptanceStep:
    """The step for one combination."""
    shapes, words = ("-uneven", " and dims that do not divide") if odd else ("", "")
    return AcceptanceStep(
        f"layouts/{optimizer}/{layout.replace('_', '-')}{shapes}/{dtype}",
        f"{optimizer} in {dtype} is the plain optimizer, {LAYOUTS[layout].words}{words}",
        MEANING,
        OnRanks(same_as_plain, (optimizer, layout, dtype, odd)),
        needs_of(layout),
    )


def first_layouts() -> Iterator[AcceptanceStep]:
    """The two that say most: one device by itself, and FSDP2."""
    yield step_of("muon", "whole")
    yield step_of("muon", "fsdp")


def other_layouts() -> Iterator[AcceptanceStep]:
    """All other layouts, optimizers and dtypes."""
    yield step_of("muon", "fsdp", odd=True)
    yield AcceptanceStep(
        "layouts/muon-beside-adamw/fsdp",
        "Muon and AdamW on parts of one model, each wrapped, are the plain ones",
        MEANING,
        OnRanks(muon_beside_adamw, ("fsdp",)),
        ("ranks",),
    )
    yield from (step_of("muon", layout) for layout in CUTS[1:])
    yield from (step_of("muon", layout, "bfloat16") for layout in ("whole", *CUTS))
    yield from (step_of("stacks", layout) for layout in ("whole", "fsdp", "ddp", "hsdp"))
    for optimizer in ("soap", "shampoo"):
        yield step_of(optimizer, "whole")
        yield step_of(optimizer, "fsdp", odd=True)
        yield from (step_of(optimizer, layout) for layout in ("ddp", "fsdp_columns", "hsdp"))
        yield step_of(optimizer, "fsdp", "bfloat16")


def data_parallel() -> Iterator[AcceptanceStep]:
    """ZeRO-1 with both gathers, and with dims that do not divide."""
    for optimizer, gather, odd in (
        ("muon", "step", False),
        ("muon", "forward", False),
        ("muon", "step", True),
        ("adamw", "forward", True),
        ("soap", "step", True),
    ):
        shapes, words = ("-uneven", " and dims that do not divide") if odd else ("", "")
        yield AcceptanceStep(
            f"zero1/{optimizer}/gather-{gather}{shapes}",
            f"{optimizer} under ZeRO-1 is the plain optimizer, with gather={gather}{words}",
            ZERO1_MEANING,
            OnRanks(same_under_zero1, (optimizer, gather, odd)),
            ("ranks", "power of two"),
            300.0,
        )
