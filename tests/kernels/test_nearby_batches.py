"""What a measurement says of the same matrices in batches that were not measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from canzona_compile.kernels.dispatch import (
    DEEP,
    MULTIPROCESSORS,
    SQUARE,
    WIDE,
    KernelChoice,
    Problem,
    choose,
    measured,
)

LIBRARY, WON, OTHER = KernelChoice("library"), KernelChoice("tma", WIDE), KernelChoice("tma", DEEP)
ONE = Problem("sym_gemm", 1, 1024, 4096, torch.bfloat16, torch.bfloat16, 16)


def batch(n: int, **changed: object) -> Problem:
    return replace(ONE, batch=n, **changed)  # type: ignore[arg-type]


def kernel(problem: Problem, verdicts: dict[Problem, KernelChoice], processors: int = 1) -> str:
    """Which kernel measurements name; "" where they say nothing. One processor is never idle."""
    found = measured(problem, verdicts, processors)
    return "" if found is None else f"{found.kernel} {found.tile.stages}" if found.tile else found.kernel


def test_its_own_verdict_goes_first() -> None:
    verdicts = {batch(4): OTHER, batch(8): WON, batch(16): OTHER}
    assert kernel(batch(8), verdicts) == "tma 3"


def test_between_two_batches_that_agree() -> None:
    verdicts = {batch(4): WON, batch(16): WON}
    found = measured(batch(9), verdicts, 1)
    assert found is not None
    assert found.same_kernel(WON)
    assert "batches 4 and 16" in found.reason
    assert [kernel(batch(n), verdicts) for n in (1, 3, 17, 64)] == [""] * 4  # beyond them nothing is known


def test_the_nearest_batches_count() -> None:
    verdicts = {batch(1): LIBRARY, batch(4): WON, batch(16): WON, batch(64): OTHER, batch(128): LIBRARY}
    assert kernel(batch(5), verdicts) == "tma 3"
    assert kernel(batch(2), verdicts) == "library"  # one of two
    assert kernel(batch(32), verdicts) == ""  # two kernels win, and neither was measured at the other's batch
    assert kernel(batch(100), verdicts) == "library"
    assert kernel(batch(500), verdicts) == "library"  # the nearest one, whatever the rules say


@pytest.mark.parametrize(
    "changed",
    [
        {"m": 2048},
        {"k": 2048},
        {"dtype": torch.float16},
        {"out_dtype": torch.float32},
        {"alignment": 8},
        {"op": "gemm_axpby"},
    ],
    ids=str,
)
def test_other_matrices_say_nothing(changed: dict[str, object]) -> None:
    verdicts = {batch(4, **changed): WON, batch(16, **changed): WON}
    assert kernel(batch(9), verdicts) == ""


def test_a_batch_whose_last_wave_is_emptier_is_the_librarys() -> None:
    """Tiles of 128 x 256 of a matrix of 1024: 20. On 40 processors batches of 2 and 4 fill all waves, 3 leaves idle."""
    verdicts = {batch(2): WON, batch(4): WON, batch(8): WON}
    assert kernel(batch(3), verdicts, 40) == "library"
    assert kernel(batch(6), verdicts, 40) == "tma 3"
    assert kernel(batch(3), verdicts, 20) == "tma 3"
    across = {batch(2, op="gemm_axpby"): WON, batch(4, op="gemm_axpby"): WON}  # 8 x 16 tiles
    assert kernel(batch(3, op="gemm_axpby"), across, 128) == "tma 3"
    assert kernel(batch(3, op="gemm_axpby"), across, 256) == "library"


def test_a_measurement_overrides_the_rules_for_other_batches() -> None:
    large = replace(ONE, m=4096, k=4096)
    assert choose(large, 90).kernel == "tma"
    assert choose(large, 90, {replace(large, batch=2): LIBRARY}).kernel == "library"
    assert choose(large, 90, {replace(large, batch=2): WON}).kernel == "tma"


def test_no_kernel_is_chosen_beyond_what_was_measured() -> None:
    """For any verdicts of four batches: a kernel only at a batch where it won, or between two such neighbours."""
    batches = (2, 4, 8, 16)
    for made in itertools.product((None, LIBRARY, WON, OTHER), repeat=4):
        verdicts = {batch(n): choice for n, choice in zip(batches, made, strict=True) if choice is not None}
        for n in (1, 2, 3, 4, 6, 8, 12, 16, 32):
            found = measured(batch(n), verdicts, MULTIPROCESSORS[90])
            if found is None or found.kernel == "library":
                continue
            known = sorted(own.batch for own in verdicts)
            near = [n] if n in known else [max(x for x in known if x < n), min(x for x in known if x > n)]
            assert all(verdicts[batch(x)].same_kernel(found) for x in near)


def test_the_number_of_processors_is_the_devices() -> None:
    """A part of an H200 with 66 of them takes more than four waves of wide tiles, where all 132 take two and idle."""
    problem = Problem("sym_gemm", 1, 4096, 4096, torch.bfloat16, torch.bfloat16, 16)
    assert choose(problem, 90).tile == SQUARE
    assert choose(problem, 90, processors=132).tile == SQUARE
    assert choose(problem, 90, processors=66).tile == WIDE
