"""What programs for CUDA read and write, launch and scatter: counted, so that none of it comes back unseen."""

from __future__ import annotations

from typing import Any

import pytest

from canzona_compile.ir.storage import rules_of
from canzona_compile.machine.hardware import hardware_of
from canzona_compile.simulation.simulate import simulate
from tests.lowering.emitted_steps import CUDA, emitted
from tests.lowering.traffic import Traffic, traffic

pytest.importorskip("triton")
TALL_AND_WIDE = ((128, 32), (32, 128))  # in 32 x 32 numbers of their Gram matrices are few
MATRICES = 8
ELEMENTS = MATRICES * 128 * 32
CODE = 1 + 4 / 128  # bytes


LAYER = ((64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192))  # of Qwen3-1.7B, divided by 32


def counted(grid: tuple[int, int], numerics: Any, matrices: int = MATRICES) -> dict[str, Traffic]:
    """Muon's step, float32, of tall and of wide matrices."""
    return traffic(emitted("muon", grid, matrices=matrices, shapes=TALL_AND_WIDE, numerics=numerics))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_bytes_per_element_on_one_gpu(numerics: Any) -> None:
    """Gradient, momentum and parameter are read, two of them written; what is between them has 16 bits."""
    found = counted((1, 1), numerics)
    assert {name: own.moved / ELEMENTS for name, own in found.items() if name != "compute"} == {
        "prepare": 4 + 4 + 4 + 2,
        "apply": 4 + 2 + 4,
    }
    # The norm reads, and the division reads and writes. Fast numerics also moves the diagonal of a first factor.
    assert 6 <= found["compute"].moved / ELEMENTS < {"exact": 6.1, "fast": 8.5}[numerics]


@pytest.mark.parametrize(
    ("state", "width", "moved"),
    [
        # The codes and a scale for 128 of them replace 4 bytes of momentum, and are written once it was rounded.
        pytest.param("int8", 128, {"prepare": 14 - 4 + CODE, "state": 4 + CODE, "apply": 10}, id="int8"),
        pytest.param("int8", 120, {"prepare": 14, "state": 2 * (4 + CODE), "apply": 10}, id="int8, parts of blocks"),
        pytest.param("bfloat16", 120, {"prepare": 14 - 2 * 2, "apply": 10}, id="bfloat16"),
    ],
)
def test_bytes_of_stored_state(state: str, width: int, moved: dict[str, float]) -> None:
    found = traffic(emitted("muon", (1, 1), shapes=((64, width),), state=rules_of({"momentum_buffer": state})))
    del found["compute"]
    assert found.keys() == moved.keys()
    for name, own in found.items():
        assert own.moved / (4 * 64 * width) == pytest.approx(moved[name], abs=0.02)


def test_plans_know_what_kernels_open() -> None:
    """State that is rounded as it is written takes no time and no memory of its own."""
    rules = {"": None, "bfloat16": rules_of("bfloat16"), "int8": rules_of("int8")}
    shapes = ((512, 128), (256, 384))
    found = {name: emitted("muon", (1, 1), matrices=24, shapes=shapes, state=own) for name, own in rules.items()}
    assert found[""].micro_groups == found["bfloat16"].micro_groups
    seconds = {name: dict(simulate(step, hardware_of(CUDA)).acts) for name, step in found.items()}
    assert [seconds[name].get("fetch", 0.0) for name in found] == [0.0] * 3
    assert (seconds["bfloat16"]["store"], seconds["int8"]["store"] > 0) == (0.0, True)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_tall_matrices_are_read_as_they_lie(grid: tuple[int, int], numerics: Any) -> None:
    assert {name for name, own in counted(grid, numerics).items() if own.scattered} == set()


def test_launches_do_not_grow_with_matrices() -> None:
    """Of two shapes: a norm, a clamp and a division each, and three products per step of Newton-Schulz."""
    few, many = counted((1, 1), "exact"), counted((1, 1), "exact", matrices=4 * MATRICES)
    assert {name: own.launches for name, own in few.items()} == {"prepare": 1, "compute": 2 * (3 + 15), "apply": 1}
    assert [own.launches for own in many.values()] == [own.launches for own in few.values()]


@pytest.mark.parametrize(("numerics", "launches", "moved"), [("exact", 194, 30.0), ("fast", 250, 32.4)])
def test_a_model_of_28_layers(numerics: Any, launches: int, moved: float) -> None:
    """As docs/gpu.md says, in seven micro-groups."""
    found = traffic(emitted("muon", (1, 1), matrices=196, shapes=LAYER, numerics=numerics, micro_groups=6))
    elements = 28 * sum(rows * columns for rows, columns in LAYER)
    assert sum(own.launches for own in found.values()) == launches
    assert round(sum(own.moved for own in found.values()) / elements, 1) == moved
    assert {name for name, own in found.items() if own.scattered} == set()
