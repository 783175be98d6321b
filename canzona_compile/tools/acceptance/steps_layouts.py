"""Every layout against the plain optimizer, first call by call, where every bit is promised."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from canzona_compile.tools.acceptance.arrangements import ARRANGEMENTS
from canzona_compile.tools.acceptance.side_by_side import REFRESH, SideBySide, even, uneven
from canzona_compile.tools.acceptance.step import AcceptanceRank, AcceptanceStep, OnRanks, StepNeed

BITS = ("muon", "adamw")  # the others decompose matrices, in stacks where that is faster
STEPS = REFRESH + 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CUTS: tuple[tuple[str, tuple[StepNeed, ...]], ...] = (
    ("fsdp", ("ranks",)),
    ("ddp", ("ranks",)),
    ("fsdp-columns", ("ranks",)),
    ("tp", ("ranks",)),
    ("hsdp", ("two mesh dims",)),
    ("tp-ddp", ("two mesh dims",)),
    ("both-dims", ("two mesh dims",)),
    ("stages", ("two stages",)),
)
MEANING = (
    "The wrapped optimizer computes something else than the plain one on this device. A relative distance near that of "
    "rounding points at a product in another order or precision (look at TF32 and other settings), a large one at "
    "fragments in wrong places or memory that is read too early. Compare with the steps beside it: if only layouts of "
    "several ranks fail, what moves between ranks is wrong; if `whole` fails too, a kernel is."
)


def same_as_plain(rank: AcceptanceRank, optimizer: str, layout: str, dtype: str, odd: bool) -> str:
    """Step call by call, while gradients are elsewhere in every step.

    Args:
        rank: this one.
        optimizer, layout: what is compared.
        dtype: a name of `DTYPES`.
        odd: whether shapes do not divide; they are padded on CUDA, so that sums have another order.
    """
    both = SideBySide(rank, optimizer, layout, (uneven if odd else even)(rank), DTYPES[dtype], cuda_graphs=False)
    for _ in range(STEPS):
        both.step(in_place=False)
    return both.verdict(bits=optimizer in BITS and not odd)


def muon_beside_adamw(rank: AcceptanceRank, layout: str) -> str:
    """Step Muon on matrices and AdamW on vectors and matrices, one after the other."""
    vectors = ((24,), (10, 16)) if rank.tiny else ((1000,), (512, 100))
    pairs = [
        SideBySide(rank, "muon", layout, even(rank), torch.float32, cuda_graphs=False),
        SideBySide(rank, "adamw", layout, vectors, torch.float32, seed=1, cuda_graphs=False),
    ]
    for _ in range(STEPS):
        for both in pairs:
            both.step(in_place=False)
    return "; ".join(f"{name} {both.verdict(bits=True)}" for name, both in zip(("muon", "adamw"), pairs, strict=True))


def step_of(optimizer: str, layout: str, dtype: str, needs: tuple[StepNeed, ...], odd: bool = False) -> AcceptanceStep:
    """The step for one combination."""
    shapes, words = ("-uneven", " and dims that do not divide") if odd else ("", "")
    return AcceptanceStep(
        f"layouts/{optimizer}/{layout}{shapes}/{dtype}",
        f"{optimizer} in {dtype} is the plain optimizer, {ARRANGEMENTS[layout].words}{words}",
        MEANING,
        OnRanks(same_as_plain, (optimizer, layout, dtype, odd)),
        needs,
    )


def first_layouts() -> Iterator[AcceptanceStep]:
    """The two that say most: one device by itself, and FSDP2."""
    yield step_of("muon", "whole", "float32", ())
    yield step_of("muon", "fsdp", "float32", ("ranks",))


def other_layouts() -> Iterator[AcceptanceStep]:
    """All other layouts, optimizers and dtypes."""
    yield step_of("muon", "fsdp", "float32", ("ranks",), odd=True)
    yield AcceptanceStep(
        "layouts/muon-beside-adamw/fsdp",
        "Muon and AdamW on parts of one model, each wrapped, are the plain ones",
        MEANING,
        OnRanks(muon_beside_adamw, ("fsdp",)),
        ("ranks",),
    )
    yield from (step_of("muon", layout, "float32", needs) for layout, needs in CUTS[1:])
    yield step_of("muon", "whole", "bfloat16", ())
    yield from (step_of("muon", layout, "bfloat16", needs) for layout, needs in CUTS)
    for optimizer in ("soap", "shampoo"):
        yield step_of(optimizer, "whole", "float32", ())
        yield step_of(optimizer, "fsdp", "float32", ("ranks",), odd=True)
        yield step_of(optimizer, "ddp", "float32", ("ranks",))
        yield step_of(optimizer, "fsdp-columns", "float32", ("ranks",))
        yield step_of(optimizer, "hsdp", "float32", ("two mesh dims",))
        yield step_of(optimizer, "fsdp", "bfloat16", ("ranks",))
