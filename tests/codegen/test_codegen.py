"""Generated kernels in Triton's interpreter against torch: operators, random graphs, layouts, tables."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canzona_compile.codegen.launch import GroupedKernel
from canzona_compile.codegen.source import PointwiseProgram, copying, expressions
from canzona_compile.codegen.values import Spread, Unsupported
from canzona_compile.errors import CanzonaError
from tests.codegen.pointwise import Work, one_call, run_grouped
from tests.conftest import Golden
from tests.harness.random_graphs import NUMBERS, POINTWISE, equal, templates
from tests.harness.samples import Builder, empty

pytest.importorskip("triton")
aten = torch.ops.aten
SHAPE = (8, 48)  # no scalar tail in torch's own loops, whose bits would differ there
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def drawn(*dtypes: torch.dtype, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(d) for d in dtypes]


def positive(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [x.abs() + 0.01 for x in drawn(*dtypes)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return equal(a, b) if a.dtype.is_floating_point else a.dtype == b.dtype and torch.equal(a, b)


# -- operators -----------------------------------------------------------------------------------


def exact_calls(d: torch.dtype) -> list[Work]:
    """Operators whose bits are torch's."""
    x, y, z = drawn(d, d, d)
    (p,) = positive(d)
    works = [
        one_call(aten.add.Tensor, [x, y]),
        one_call(aten.add.Tensor, [x, y], alpha=-0.0037),
        one_call(aten.sub.Tensor, [x, y], alpha=0.0037),
        one_call(aten.add.Scalar, [x], 0.25, -0.0037),
        one_call(aten.mul.Tensor, [x, y]),
        one_call(aten.mul.Tensor, [x], 0.9973),
        one_call(aten.div.Tensor, [x, y]),
        one_call(aten.div.Tensor, [x], 0.9973),
        one_call(aten.lerp.Scalar, [x, y], 0.05),
        one_call(aten.lerp.Scalar, [x, y], 0.95),
        one_call(aten.lerp.Tensor, [x, y, z]),
        one_call(aten.addcmul.default, [x, y, z], value=0.05),
        one_call(aten.addcdiv.default, [x, y, z], value=-0.05),
        one_call(aten.rsqrt.default, [p]),
        one_call(aten.reciprocal.default, [x]),
        one_call(aten.neg.default, [x]),
        one_call(aten.abs.default, [x]),
        one_call(aten.sign.default, [x]),
        one_call(aten.square.default, [x]),
        one_call(aten.floor.default, [x]),
        one_call(aten.maximum.default, [x, y]),
        one_call(aten.clamp.default, [x], -0.3, 0.7),
        one_call(aten.clamp.default, [x], max=0.5),
        one_call(aten.gt.Scalar, [x], 0.1),
        one_call(aten.le.Tensor, [x, y]),
        one_call(aten.where.self, [x > 0, x, y]),
        one_call(aten.zeros_like.default, [x]),
        one_call(aten.full_like.default, [x], 0.7),
        *(one_call(aten._to_copy.default, [x], dtype=other) for other in (*FLOATS, torch.float64, torch.int32)),
        *(one_call(aten.pow.Tensor_Scalar, [p], e) for e in (1, 2, -0.5, -1)),
    ]
    if d is torch.float32:  # in 16 bits ATen rounds the number first on CPU, but not on CUDA
        works += [one_call(aten.add.Tensor, [x], 0.3), one_call(aten.rsub.Scalar, [x], 0.3)]
    if d is not torch.float32:  # where torch widens to float32, rounds once, and no library of Intel's takes part
        works += [one_call(aten.sqrt.default, [p]), one_call(aten.pow.Tensor_Scalar, [p], 0.5)]
        works += [one_call(op, [x]) for op in (aten.exp.default, aten.tanh.default, aten.sigmoid.default)]
    return works


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_operators_have_torchs_bits(dtype: torch.dtype) -> None:
    works = exact_calls(dtype)
    found, kernel = run_grouped(works)
    wrong = [w.name for w, got in zip(works, found, strict=True) if not same(got[0][0], w.expected()[0][0])]
    assert wrong == []
    assert kernel.launches == 1


def test_operators_of_libraries_are_near() -> None:
    """CUDA takes its own library for these, which the interpreter lacks: 4 in the last place at most."""
    x, p = drawn(torch.float32)[0], positive(torch.float32)[0]
    names = ("sqrt", "exp", "exp2", "log", "log2", "sin", "cos", "erf", "tanh", "sigmoid")
    works = [one_call(getattr(aten, n).default, [p if n in ("sqrt", "log", "log2") else x]) for n in names]
    works.append(one_call(aten.pow.Tensor_Scalar, [p], 1.7))
    found, _ = run_grouped(works)
    for work, got in zip(works, found, strict=True):
        wide = Work(work.graph, SHAPE, [{"x0": work.fragments[0]["x0"].double()}]).expected()[0][0]
        scale = wide.abs().clamp(min=0.25)
        assert ((got[0][0].double() - wide).abs() / scale).max() < 4 * 2**-23, work.name


def test_dtypes_are_promoted_as_in_torch() -> None:
    f, b, h = drawn(torch.float32, torch.bfloat16, torch.float16)
    zero = torch.tensor(0.3)
    works = [
        one_call(aten.add.Tensor, [f, b], alpha=-0.02),
        one_call(aten.mul.Tensor, [b, f]),
        one_call(aten.add.Tensor, [b, h]),
        one_call(aten.mul.Tensor, [f.double(), f]),
        one_call(aten.mul.Tensor, [f.double()], 0.1),
        one_call(aten.mul.Tensor, [f, zero]),
        one_call(aten.add.Tensor, [f, torch.tensor(3)]),
        one_call(aten.mul.Tensor, [(f * 10).int(), torch.tensor(3)]),
        one_call(aten.mul.Tensor, [(f * 10).int()], 0.3),
        one_call(aten.add.Tensor, [(f * 10).long(), (f * 7).int()], alpha=3),
        one_call(aten.mul.Tensor, [f, f > 0]),
    ]
    found, _ = run_grouped(works)
    for work, got in zip(works, found, strict=True):
        assert same(got[0][0], work.expected()[0][0]), work.name


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00008000, 0x00018000, 0x7F800000, 0x7FC00000]
    )
    x = bits.to(torch.int32).view(torch.float32).reshape(1, 8)
    ((got,),), _ = run_grouped([one_call(aten._to_copy.default, [x], dtype=torch.bfloat16)])
    assert same(got[0], x.bfloat16())


@pytest.mark.parametrize(
    ("op", "operands", "reason"),
    [
        (aten.atan2.default, 2, "aten.atan2.default has no Triton spelling"),
        (aten.cumsum.default, 1, "aten.cumsum.default has no Triton spelling"),
    ],
)
def test_what_is_not_supported_says_why(op: Any, operands: int, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        one_call(op, drawn(*[torch.float32] * operands), *([0] if operands == 1 else [])).program()


def test_complex_numbers_are_not_supported() -> None:
    with pytest.raises(Unsupported, match="no kernels for complex64"):
        copying(torch.complex64, torch.complex64)


# -- random graphs -------------------------------------------------------------------------------


# Powers are a library's, whose last bit a later rounding to bfloat16 may blow up.
EXACT = tuple(op for op in POINTWISE if op != "power")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(templates(EXACT), min_size=1, max_size=3), st.integers(0, 2**16))
def test_random_graphs(made: list[Any], seed: int) -> None:
    """Several graphs, each on fragments of several sizes, in one launch; bit for bit.

    Rows are whole vectors, because what is left over behind a vector is other code in torch, which fuses less.
    """
    random = torch.Generator().manual_seed(seed)
    works = []
    for i, template in enumerate(made):
        names = [leaf.name for leaf in template.inputs if leaf.dtype is not None]
        shapes = [(rows, 64 * (i + 1)) for rows in (template.shape[0], 0, 33)]
        fragments = [NUMBERS | {n: torch.randn(shape, generator=random) for n in names} for shape in shapes]
        works.append(Work(template.graph, template.shape, fragments, f"random_{i}"))
    found, kernel = run_grouped(works)
    assert kernel.launches == 1
    for work, written in zip(works, found, strict=True):
        for got, expected in zip(written, work.expected(), strict=True):
            assert all(map(equal, got, expected))


# -- layouts -------------------------------------------------------------------------------------


def lerp_and_cast(shape: tuple[int, ...]) -> Any:
    """What Muon prepares: the new momentum, and the direction in bfloat16."""
    b = Builder(momentum_buffer=empty(shape), grad=empty(shape), momentum=0.95)
    weight = b.call("weight", operator.sub, 1.0, b["momentum"])
    average = b.call("average", aten.lerp.Scalar, b["momentum_buffer"], b["grad"], weight)
    ahead = b.call("ahead", aten.lerp.Scalar, b["grad"], average, b["momentum"])
    return b.returns(b.call("low", aten._to_copy.default, ahead, dtype=torch.bfloat16), average)


def strided(kind: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(len(kind))
    whole = torch.randn(96, 80, generator=random)
    match kind:
        case "flat":
            return whole
        case "odd":
            return whole[:31, :].reshape(-1)[: 31 * 17].reshape(31, 17)
        case "misaligned":
            return whole.reshape(-1)[3 : 3 + 32 * 64].reshape(32, 64)
        case "columns":
            return whole[:, 16:48]
        case "odd columns":
            return whole[:, 3:10]
        case "transposed":
            return whole.T
        case "one row":
            return whole[:1]
        case "every other":
            return whole[::2, ::3]
        case "stack":
            return whole.reshape(6, 16, 80)[:, :8, 16:32]
        case "empty":
            return whole[:0]
    raise AssertionError(kind)


FORMS = {
    "flat": (1, True),
    "odd": (1, False),
    "misaligned": (1, False),
    "columns": (2, True),
    "odd columns": (2, False),
    "transposed": (1, True),
    "one row": (1, True),
    "every other": (2, False),
    "stack": (3, True),
    "empty": None,
}


@pytest.mark.parametrize("kind", FORMS)
def test_layouts(kind: str) -> None:
    grad, buffer, target = strided(kind), strided(kind).mul_(0.5), strided(kind)  # each in memory of its own
    program = Work(lerp_and_cast(tuple(grad.shape)), tuple(grad.shape), []).program()
    program = PointwiseProgram("strided", program.expressions, ((torch.float32,), (torch.float32,)))
    average = torch.lerp(buffer, grad, 1 - 0.95)
    ahead = torch.lerp(grad, average, 0.95).bfloat16()
    kernel = GroupedKernel("layouts", [program], [0])
    kernel((([buffer], [grad], [target], [buffer]), (1 - 0.95, 0.95)))
    torch.testing.assert_close(buffer, average, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(target, ahead.float(), rtol=2**-7, atol=0)
    assert [s.form for s in kernel.table.segments] == ([FORMS[kind]] if FORMS[kind] else [])  # type: ignore[union-attr]
    assert kernel.launches == (0 if kind == "empty" else 1)


def test_operands_that_broadcast() -> None:
    """Per row, per column, and one for all, as NorMuon's second moment and a norm come."""
    x = drawn(torch.float32, shape=(33, 48))[0]
    rows, columns = drawn(torch.float32, shape=(33, 1))[0], drawn(torch.float32, shape=(1, 48))[0]
    works = [one_call(aten.mul.Tensor, [x, other]) for other in (rows, columns, torch.tensor(0.7), torch.rand(1, 1))]
    spreads = [w.program().spreads[1] for w in works]
    assert spreads == [Spread.PARTIAL, Spread.PARTIAL, Spread.ONE, Spread.ONE]
    found, _ = run_grouped(works)
    for work, got in zip(works, found, strict=True):
        assert torch.equal(got[0][0], work.expected()[0][0])


def test_groups_of_hyperparameters_and_sizes_share_a_launch_and_a_function() -> None:
    works = []
    for momentum, shapes in ((0.9, [(4, 16), (5, 7), (3000, 3)]), (0.7, [(1, 1), (64, 64)]), (0.5, [(2, 3)])):
        fragments = [
            {"momentum": momentum}
            | dict(zip(("momentum_buffer", "grad"), drawn(torch.float32, torch.float32, shape=s), strict=True))
            for s in shapes
        ]
        works.append(Work(lerp_and_cast(shapes[0]), shapes[0], fragments, f"momentum_{momentum}"))
    found, kernel = run_grouped(works)
    assert (kernel.launches, len(kernel.programs)) == (1, 1)
    assert kernel.source.count("@triton.jit") == 2
    for work, written in zip(works, found, strict=True):
        for got, expected in zip(written, work.expected(), strict=True):
            torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(got[0], expected[0], rtol=2**-7, atol=0)


@pytest.mark.parametrize("which", ["targets", "sources", "both"])
def test_more_strided_dims_than_a_row_has_room_for(which: str) -> None:
    """Torch makes contiguous copies; what lies between the elements stays."""
    half = (slice(None, None, 2),) * 5
    wholes = [torch.randn((4,) * 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    source, other, target = (w[half] for w in wholes)
    if which == "targets":
        source, other = source.contiguous(), other.contiguous()
    if which == "sources":
        target = torch.zeros(target.shape)
    work = one_call(aten.add.Tensor, [source, other], alpha=0.5)
    shared = one_call(aten.add.Tensor, drawn(torch.float32, torch.float32), alpha=0.5)
    kernel = GroupedKernel("strided", [work.program()], [0])
    (flat,), expected, before = shared.fragments, torch.add(source, other, alpha=0.5), wholes[2].clone()
    beside = torch.empty(SHAPE)
    for _ in range(2):
        kernel((([source, flat["x0"]], [other, flat["x1"]], [target, beside]), ()))
        assert torch.equal(target, expected)
        assert torch.equal(beside, shared.expected()[0][0])
    assert kernel.launches == 2
    wholes[2][half] = before[half]
    assert torch.equal(wholes[2], before)


def test_in_place_with_more_strided_dims_than_a_row_has_room_for() -> None:
    whole = torch.randn((4,) * 5)
    x = whole[(slice(None, None, 2),) * 5]
    work, expected = one_call(aten.mul.Tensor, [x], 0.5), x * 0.5
    GroupedKernel("strided", [work.program()], [0])((([x], [x]), ()))
    assert torch.equal(x, expected)


def test_offsets_are_int64() -> None:
    far = 2**32 + 3
    whole = torch.empty(far + 64, dtype=torch.uint8)  # pages that nobody touches are never there
    source, target = whole.as_strided((2, 5), (far, 1)), torch.zeros(2, 5, dtype=torch.uint8)
    source.copy_(torch.arange(10, dtype=torch.uint8).reshape(2, 5))
    kernel = GroupedKernel("far", [PointwiseProgram("copy", copying(torch.uint8, torch.uint8), ((torch.uint8,),))], [0])
    kernel((([source], [target]), ()))
    assert torch.equal(target, source)


# -- tables --------------------------------------------------------------------------------------


def copy_kernel() -> GroupedKernel:
    return GroupedKernel(
        "copies", [PointwiseProgram("copy", copying(torch.float32, torch.bfloat16), ((torch.bfloat16,),))], [0]
    )


def test_only_what_changed_is_sent() -> None:
    kernel = copy_kernel()
    sources, targets = drawn(torch.float32, torch.float32), drawn(torch.bfloat16, torch.bfloat16)
    for _ in range(3):
        kernel(((sources, targets), ()))
    words = kernel.words
    assert words is not None
    assert (kernel.launches, kernel.uploads, words.copies) == (3, 1, 1)
    sources[1] = sources[1].clone()  # a gradient at another address
    before = words.copied
    kernel(((sources, targets), ()))
    assert (kernel.launches, kernel.uploads, words.copies) == (4, 1, 2)
    assert words.copied - before == 8, "one address"
    built = kernel.table
    sources[0] = torch.randn(SHAPE[::-1]).T  # and one in columns
    kernel(((sources, targets), ()))
    assert kernel.table is not built
    assert all(torch.equal(t, s.bfloat16()) for s, t in zip(sources, targets, strict=True))


def test_numbers_are_read_anew() -> None:
    graph = one_number()
    program = Work(graph, SHAPE, []).program()
    kernel, x, y = GroupedKernel("numbers", [program], [0]), drawn(torch.float32)[0], torch.empty(SHAPE)
    for lr in (0.1, 0.2, math.inf):
        kernel((([x], [y]), (lr,)))
        assert torch.equal(y, x * lr)
    assert kernel.words is not None
    assert (kernel.uploads, kernel.words.copies) == (1, 3)


def test_the_sign_of_zero_is_sent() -> None:
    program = Work(one_number(), SHAPE, []).program()
    kernel, x, y = GroupedKernel("numbers", [program], [0]), torch.ones(SHAPE), torch.empty(SHAPE)
    for lr in (0.0, -0.0):
        kernel((([x], [y]), (lr,)))
        assert torch.equal(y.signbit(), (x * lr).signbit())


def one_number() -> Any:
    b = Builder(x=empty(SHAPE), lr=0.1)
    return b.returns(b.call("y", aten.mul.Tensor, b["x"], b["lr"]))


def test_an_operand_of_another_dtype_is_an_error() -> None:
    with pytest.raises(CanzonaError, match=r"an operand is torch\.float64, not torch\.float32"):
        copy_kernel()((([torch.zeros(2, 2).double()], [torch.zeros(2, 2).bfloat16()]), ()))


def test_a_result_of_another_shape_is_not_supported() -> None:
    b = Builder(x=empty(SHAPE), step=empty(()))
    graph = b.returns(b.call("next", aten.add.Tensor, b["step"], 1))
    with pytest.raises(Unsupported, match="another shape"):
        expressions(graph, [0], SHAPE)


# -- the text ------------------------------------------------------------------------------------


def test_the_source_is_readable(golden: Golden) -> None:
    program = Work(lerp_and_cast((64, 32)), (64, 32), [], "muon prepare").program()
    golden(GroupedKernel("g0 prepare of Muon, one launch", [program], [0]).source, "kernels/muon_prepare.py.txt")


def test_names_of_values_do_not_collide() -> None:
    b = Builder(row=empty(SHAPE), tl=empty(SHAPE))
    lanes = b.call("lanes", aten.mul.Tensor, b["row"], b["tl"])
    graph = b.returns(b.call("start", aten.add.Tensor, lanes, b["row"]))
    x, y = drawn(torch.float32, torch.float32)
    found, _ = run_grouped([Work(graph, SHAPE, [{"row": x, "tl": y}])])
    assert torch.equal(found[0][0][0], x * y + x)
