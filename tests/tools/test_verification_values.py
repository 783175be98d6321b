"""How far leaves are apart, what is kept of it, and how it is shown."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from canzona_compile.tools.verification import LeafDifference, Verification
from canzona_compile.tools.verification.compare import MOST, Distance, distance, ulps
from canzona_compile.tools.verification.findings import Tally, merged

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan


# -- distances -------------------------------------------------------------------------------------


def pair(dtype: torch.dtype, left: float, right: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([left], dtype=dtype), torch.tensor([right], dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulps(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for left, right, expected in [
        (1.5, 1.5, 0),
        (1.0, 1.0 + info.eps, 1),
        (1.0, 1.0 - info.eps / 2, 1),
        (-1.0, -1.0 - 3 * info.eps, 3),
        (0.0, 0.0, 0),
        (0.0, -0.0, 1),
        (0.0, info.smallest_normal * info.eps, 1),
        (-0.0, -info.smallest_normal * info.eps, 1),
        (-info.smallest_normal * info.eps, info.smallest_normal * info.eps, 3),
        (INF, INF, 0),
        (INF, info.max, 1),
        (-INF, -info.max, 1),
        (NAN, NAN, 0),
        (NAN, 1.0, MOST),
        (-INF, NAN, MOST),
        (1.0, 2.0, round(1 / info.eps)),
    ]:
        a, b = pair(dtype, left, right)
        assert ulps(a, b).item() == ulps(b, a).item() == expected, (left, right)


def test_ulps_of_all_numbers_of_16_bits() -> None:
    """From each number to the next one it is one step, by torch's own nextafter."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan() & ~values.isinf() & (values != 0)]
    after = torch.nextafter(values, torch.full_like(values, INF))
    assert (ulps(values, after) == 1 + (after == 0) * (values < 0) * ~after.signbit()).all()


def test_ulps_of_other_dtypes() -> None:
    assert ulps(torch.tensor([3, -4]), torch.tensor([5, -4])).tolist() == [2, 0]
    assert ulps(torch.tensor(True), torch.tensor(False)).item() == 1
    eight = torch.tensor([1.0, -2.0, NAN]).to(torch.float8_e4m3fn)
    assert ulps(eight, eight).tolist() == [0, 0, 0]


def test_distances() -> None:
    one = torch.ones(3)
    assert distance(one, one.clone()) == Distance(True, 0, 0.0)
    assert distance(torch.tensor([NAN, 1.0]), torch.tensor([-NAN, 1.0])).equal
    assert distance(torch.tensor([0.0]), torch.tensor([-0.0])) == Distance(False, 1, 0.0)
    assert distance(torch.tensor([4.0, 1.0]), torch.tensor([3.0, 1.0])) == Distance(False, 2**22, 0.25)
    assert distance(torch.tensor([1.0]), torch.tensor([-1.0])).relative == 2.0
    assert distance(one, one * NAN) == Distance(False, None, None, "NaN on one side only")
    assert distance(one, one * INF).ulps == 2**30
    assert distance(one, one * INF).relative is None
    assert distance(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])).relative == 0.5
    assert distance(one, torch.ones(4)).remark == "float32 [3], expected float32 [4]"
    assert distance(one.as_strided((1,), (2,)), one.double().float()[:1]).equal  # one element, whatever its stride
    assert distance(one, one.double()).remark == "float32 [3], expected float64 [3]"
    assert distance(one.t_().expand(2, 3), torch.ones(2, 3)).equal
    assert distance(torch.empty(0, 4), torch.empty(0, 4)).equal


def test_distances_of_what_is_no_tensor() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise TypeError

        __hash__ = None  # type: ignore[assignment]

        def __repr__(self) -> str:
            return "odd"

    assert distance(3, 3.0).equal
    assert distance(NAN, NAN).equal
    assert distance(Odd(), Odd()).equal
    assert distance(3, 4) == Distance(False, None, None, "3, expected 4")
    assert distance(torch.ones(1), 1.0).remark == "float32 [1], expected 1.0"


# -- rows ------------------------------------------------------------------------------------------


def test_every_leaf_has_its_row() -> None:
    tally = Tally(1)
    one, two = torch.ones(2, 3), torch.full((2, 3), 2.0)
    expected = {("w", "parameter"): one, ("w", "step"): 3, ("w", "lost"): one}
    tally.add(1, {**expected, ("w", "new"): 5}, {**expected, ("w", "new"): 5})
    found = {("w", "parameter"): two, ("w", "step"): 4, ("w", "new"): 5}
    tally.add(2, found, expected)
    rows = {row.leaf: row for row in merged([tally.rows, tally.rows])}
    assert rows["parameter"] == LeafDifference("w", "parameter", (2, 3), "float32", False, 2**23, 0.5, 2, (1,))
    assert rows["step"] == LeafDifference("w", "step", (), "int", False, None, None, 2, (1,), "4, expected 3")
    assert rows["lost"].remark == "only in the plain optimizer"
    assert rows["new"].remark == "only in the wrapped optimizer"


def test_ranks_are_merged_by_the_worst() -> None:
    row = LeafDifference("w", "parameter", (2,), "float32")
    late = row.seen(Distance(False, 7, 0.5), 4, [2])
    early = row.seen(Distance(False, 3, 0.75), 2, [0])
    assert merged([[row], [late], [early]]) == (
        LeafDifference("w", "parameter", (2,), "float32", False, 7, 0.75, 2, (0, 2)),
    )


# -- the table -------------------------------------------------------------------------------------


def result(**changes: Any) -> Verification:
    known = {"build": "train:build", "optimizer": "Muon", "steps": 5, "ranks": 2, "layout": "fsdp", "seed": 0}
    return Verification(**{**known, "options": {}, "torch": "2.13.0", "seconds": 8.0, **changes})


def text_of(found: Verification, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(found)
    return capture.get()


def test_the_table_shows_what_differs_first_and_in_full() -> None:
    long = ".".join(["a_module_with_a_long_name"] * 3)
    equal = [LeafDifference(f"w{i}", "parameter", (2, 3), "float32") for i in range(50)]
    odd = LeafDifference(long, "parameter", (2, 3), "bfloat16", False, None, None, 2, (0, 1), "NaN on one side only")
    text = text_of(result(leaves=(*equal, odd), eager={"w1": "it prints"}, compiled=("w0",), idle=("w2",)))
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert "1 of 51 leaves differ" in " ".join(text.split())
    assert text.index("differs") < text.index("w0")
    assert "and 11 more, equal" in text
    assert "1 eager, it prints: w1" in text
    wide = text_of(result(leaves=(odd,)), 200)
    assert long in wide
    assert "parameter (NaN on one side only)  2x3    bf16   differs         -          2  0,1" in wide


def test_the_json_is_plain() -> None:
    found = result(leaves=(LeafDifference("w", "parameter", (2,), "float32", False, None, None, 1, (0,), "NaN"),))
    said = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert said["leaves"][0]["max_ulps"] is None
    assert said["ok"] is False
    assert result(leaves=(LeafDifference("w", "parameter", (2,), "float32"),)).ok
