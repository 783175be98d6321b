"""The kernels on a real GPU: the numerics of the interpreter's tests at the tiles that dispatch can choose.

Where there is none, the library takes their place.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from canzona_compile.kernels.dispatch import CANDIDATES, KernelChoice, candidates, recorded
from canzona_compile.kernels.gemm_axpby import gemm_axpby
from canzona_compile.kernels.sym_gemm import sym_gemm
from canzona_compile.kernels.tensor_args import machine
from canzona_compile.kernels.tune import tune
from canzona_compile.tools.tune import clock_for
from tests.harness.gpu import CUDA, DEVICE
from tests.kernels.kernel_cases import (
    ACCUMULATED,
    ALIGNED,
    LAYOUTS,
    Guarded,
    close,
    integers,
    mirrored,
    name_of,
    product,
    random,
    symmetric,
)

pytest.importorskip("triton")

HERE = machine(torch.device("cuda")) if CUDA else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the debug mode says that it is a prototype, drivers have their own
]

ARCH = 0 if HERE is None else HERE.arch
LIBRARY = KernelChoice("library")
HALF = (torch.bfloat16, torch.float16)


def choices(op: str) -> list[KernelChoice]:
    return [LIBRARY, *CANDIDATES.get((op, ARCH), ())]  # type: ignore[call-overload]


each_sym = pytest.mark.parametrize("choice", choices("sym_gemm"), ids=name_of)
each_axpby = pytest.mark.parametrize("choice", choices("gemm_axpby"), ids=name_of)
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def slack(choice: KernelChoice, dtype: torch.dtype) -> float:
    """A library rounds the product before it adds to the diagonal, and may add parts of a sum in 16 bits."""
    return 2.0**-8 / ACCUMULATED[DEVICE.type] if choice.tile is None and dtype in HALF else 1.0


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("shape", [(1, 512, 512), (3, 136, 264), (2, 384, 128), (1, 1032, 2056)], ids=str)
@each_half
@each_sym
def test_symmetric_products(choice: KernelChoice, dtype: torch.dtype, shape: tuple[int, int, int], trans: bool) -> None:
    batch, m, k = shape
    a = random(batch, *((k, m) if trans else (m, k)), dtype=dtype, device=DEVICE.type)
    c = symmetric(batch, m, m, dtype=dtype, device=DEVICE.type, seed=1)
    with recorded() as launches:
        result = sym_gemm(a, c=c, alpha=0.5, beta=-2.0, diag=0.25, trans=trans, choice=choice)
    assert [launch.choice for launch in launches] == [choice]
    exact, magnitude = product(a, None, c, 0.5, -2.0, 0.25, trans)
    close(result, exact, magnitude * slack(choice, dtype))
    if choice.tile is not None:
        assert torch.equal(result, result.mT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@each_sym
def test_layouts_of_symmetric_products(choice: KernelChoice, dtype: torch.dtype, layout: str) -> None:
    aligned = choice.kernel == "tma"
    if aligned and (layout not in ALIGNED or dtype == torch.float32):
        pytest.skip("not for tensor descriptors")
    if dtype == torch.float32 and choice.kernel != "library":
        pytest.skip("float32 is the library's: tiles of this size spill")
    m, k = (200, 136) if aligned else (197, 131)
    a, b = (LAYOUTS[layout](random(2, m, k, dtype=dtype, device=DEVICE.type, seed=s)) for s in (0, 1))
    c = LAYOUTS[layout](symmetric(2, m, m, dtype=dtype, device=DEVICE.type, seed=2))
    result = sym_gemm(a, b, c, beta=3.0, choice=choice)
    exact, magnitude = product(a, b, c, 1.0, 3.0, 0.0)
    if choice.kernel != "library":
        exact, magnitude = mirrored(exact), mirrored(magnitude)
    close(result, exact, magnitude * slack(choice, dtype))


@each_half
@each_sym
def test_whole_numbers_are_exact(choice: KernelChoice, dtype: torch.dtype) -> None:
    a = integers(2, 264, 24, dtype=dtype, device=DEVICE.type)
    c = integers(2, 264, 264, dtype=dtype, device=DEVICE.type, seed=1)
    c = c + c.mT
    result = sym_gemm(a, c=c, alpha=2.0, beta=-1.0, diag=4.0, choice=choice)
    expected = 2 * a.double() @ a.double().mT - c.double()
    expected += 4 * torch.eye(264, dtype=torch.float64, device=DEVICE.type)
    assert expected.abs().max() <= 256
    assert torch.equal(result.double(), expected)


@pytest.mark.parametrize("choice", [c for c in choices("sym_gemm") if c.tile], ids=name_of)
def test_other_values_are_no_reason_to_compile_again(choice: KernelChoice) -> None:
    from canzona_compile.kernels.sym_gemm_triton import sym_gemm_pointer, sym_gemm_tma

    kernel = {"tma": sym_gemm_tma, "pointer": sym_gemm_pointer}[choice.kernel]
    a = random(2, 256, 128, dtype=torch.bfloat16, device=DEVICE.type)
    sym_gemm(a, alpha=0.3, diag=0.7, choice=choice)
    compiled = sum(len(cache[0]) for cache in kernel.device_caches.values())
    for alpha, diag in itertools.product((0.0, 1.0, -2.5), (0.0, 1.0)):
        sym_gemm(a, alpha=alpha, diag=diag, choice=choice)
    assert compiled > 0
    assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == compiled


@each_sym
def test_out_is_written_inside_and_may_be_c(choice: KernelChoice) -> None:
    a = random(2, 200, 136, dtype=torch.bfloat16, device=DEVICE.type)
    held = torch.full((2, 200, 264), 7.0, dtype=torch.bfloat16, device=DEVICE.type)
    held[..., :200] = symmetric(2, 200, 200, dtype=torch.bfloat16, device=DEVICE.type, seed=1)
    inner = held[..., :200]
    exact, magnitude = product(a, None, inner, 0.25, 0.75, 0.0)
    assert sym_gemm(a, c=inner, alpha=0.25, beta=0.75, out=inner, choice=choice) is inner
    close(inner, exact, magnitude * slack(choice, torch.bfloat16))
    assert (held[..., 200:] == 7.0).all()


@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
@pytest.mark.parametrize("shape", [(1, 256, 512), (3, 137, 261), (2, 512, 128)], ids=str)
@each_half
@each_axpby
def test_axpby(choice: KernelChoice, dtype: torch.dtype, shape: tuple[int, int, int], right: bool) -> None:
    batch, m, n = shape
    if choice.kernel == "tma" and (m % 8 or n % 8):
        pytest.skip("not for tensor descriptors")
    x = random(batch, m, n, dtype=dtype, device=DEVICE.type)
    factor = random(batch, *((n, n) if right else (m, m)), dtype=dtype, device=DEVICE.type, seed=1)
    out = Guarded.like(shape, dtype, DEVICE.type)
    assert gemm_axpby(factor, x, alpha=1.5, beta=-0.5, right=right, out=out.inner, choice=choice) is out.inner
    f, v = factor.double(), x.double()
    product_, sizes = (v @ f, v.abs() @ f.abs()) if right else (f @ v, f.abs() @ v.abs())
    close(out.inner, 1.5 * v - 0.5 * product_, (1.5 * v.abs() + 0.5 * sizes) * slack(choice, dtype))
    assert out.untouched()


@pytest.mark.skipif(("sym_gemm", ARCH) not in CANDIDATES, reason="needs a GPU for which there are kernels")
def test_the_tuner_refuses_no_candidate() -> None:
    """All of them are right; which is fastest is not for a test."""
    for op in ("sym_gemm", "gemm_axpby"):
        verdict = tune(op, (2, 512, 1024), torch.bfloat16, DEVICE, candidates(op, ARCH), clock_for(DEVICE), rounds=1)  # type: ignore[arg-type]
        assert [trial.refused for trial in verdict.trials] == [""] * len(verdict.trials)
