"""Every claim of canzona_compile.ir.bit_exactness, measured against the torch of the machine that runs this."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from canzona_compile.ir.bit_exactness import (
    POSITION_FREE_NAMES,
    POSITION_FREE_ON_CPU,
    batches_equal,
    foreach_equal,
    placed_equally,
    position_free,
    reductions_equal,
)
from canzona_compile.ir.layout import WHOLE_VECTORS
from canzona_compile.lowering.batch_graph import FOREACH
from canzona_compile.machine.hardware import Machine
from canzona_compile.tensors import bytes_of
from tests.harness.marks import crossed
from tests.harness.samples import CPU, Builder

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread")  # which the claims are about
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
NARROW = (torch.bfloat16, torch.float16)

# Operands: whole tensor, one row, one column, 0-d tensor, mask. Everything else in a call is a number.
F, R, C, S, M = "full", "row", "column", "scalar", "mask"


@dataclass(frozen=True)
class Call:
    """An operator and its operands."""

    target: Any
    operands: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    positive: bool = False

    def __str__(self) -> str:
        return f"{self.target}({', '.join(map(str, self.operands))}){self.options or ''}"

    def shapes(self, m: int, n: int) -> list[tuple[int, ...] | None]:
        sizes = {F: (m, n), R: (1, n), C: (m, 1), S: (), M: (m, n)}
        return [sizes.get(o) if isinstance(o, str) else None for o in self.operands]

    def dtype(self, i: int, dtypes: Sequence[torch.dtype]) -> torch.dtype:
        return torch.bool if self.operands[i] == M else dtypes[i % len(dtypes)]

    def run(self, values: Sequence[Any]) -> Tensor:
        result: Tensor = self.target(*values, **self.options)
        return result

    def node(self, dtypes: Sequence[torch.dtype], m: int = 6, n: int = 5) -> fx.Node:
        """The call in a graph."""
        tensors = {
            f"x{i}": torch.empty(shape, dtype=self.dtype(i, dtypes), device="meta")
            for i, shape in enumerate(self.shapes(m, n))
            if shape is not None
        }
        b = Builder(**tensors)
        args = [b[f"x{i}"] if f"x{i}" in tensors else o for i, o in enumerate(self.operands)]
        return b.call("result", self.target, *args, **self.options)


def calls(target: Any, *operands: tuple[Any, ...], positive: bool = False, **options: Any) -> list[Call]:
    return [Call(target, own, options, positive) for own in operands]


PAIRS = ((F, F), (F, R), (F, C), (F, S), (R, F), (C, F), (S, F))
TRIPLES = ((F, F, F), (F, R, F), (F, F, C), (F, S, F), (F, F, S), (C, F, R))
TABLE: dict[str, list[Call]] = {
    "add": calls(aten.add.Tensor, *PAIRS, (F, 0.37)) + calls(aten.add.Tensor, *PAIRS, (F, 0.37), alpha=-0.37),
    "sub": calls(aten.sub.Tensor, *PAIRS, (F, 0.37)) + calls(aten.sub.Tensor, *PAIRS, (F, 0.37), alpha=0.37),
    "rsub": calls(aten.rsub.Scalar, (F, 1), (F, 0.37), (F, 0.37, 0.7)) + calls(aten.rsub.Tensor, *PAIRS, alpha=0.37),
    "mul": calls(aten.mul.Tensor, *PAIRS, (F, 0.37)),
    "div": calls(aten.div.Tensor, *PAIRS, (F, 0.37)),
    "lerp": calls(aten.lerp.Scalar, (F, F, 0.37), (F, R, 0.37), (F, C, 0.63)) + calls(aten.lerp.Tensor, *TRIPLES),
    "addcmul": calls(aten.addcmul.default, *TRIPLES) + calls(aten.addcmul.default, *TRIPLES, value=-0.37),
    "addcdiv": calls(aten.addcdiv.default, *TRIPLES) + calls(aten.addcdiv.default, *TRIPLES, value=-0.37),
    "sqrt": calls(aten.sqrt.default, (F,), positive=True),
    "square": calls(aten.square.default, (F,)),
    "neg": calls(aten.neg.default, (F,)),
    "abs": calls(aten.abs.default, (F,)),
    "sign": calls(aten.sign.default, (F,)),
    "reciprocal": calls(aten.reciprocal.default, (F,)),
    "maximum": calls(aten.maximum.default, *PAIRS),
    "minimum": calls(aten.minimum.default, *PAIRS),
    "clamp": calls(aten.clamp.default, (F, -0.3, 0.4), (F, None, 0.4)) + calls(aten.clamp.Tensor, *TRIPLES),
    "clamp_min": calls(aten.clamp_min.default, (F, 0.2)) + calls(aten.clamp_min.Tensor, *PAIRS[:4]),
    "clamp_max": calls(aten.clamp_max.default, (F, 0.2)) + calls(aten.clamp_max.Tensor, *PAIRS[:4]),
    **{
        name: calls(getattr(aten, name).Tensor, *PAIRS) + calls(getattr(aten, name).Scalar, (F, 0.2))
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    "where": calls(aten.where.self, (M, F, F), (M, F, R), (M, C, F), (M, S, F)),
    "copy": calls(aten.copy.default, (F, F), (F, R), (F, C), (F, S)),
    "_to_copy": [c for d in DTYPES for c in calls(aten._to_copy.default, (F,), dtype=d)],
    "clone": calls(aten.clone.default, (F,)),
    "detach": calls(aten.detach.default, (F,)),
    "alias": calls(aten.alias.default, (F,)),
    "zeros_like": calls(aten.zeros_like.default, (F,)),
    "ones_like": calls(aten.ones_like.default, (F,)),
    "full_like": calls(aten.full_like.default, (F, 0.37)),
}
CHOOSING = {"maximum", "minimum", "clamp", "clamp_min", "clamp_max"}  # of 0.0 and -0.0 they may take either
# What the table leaves out: the bits of an element depend on its position for at least one of these.
LEFT_OUT = {
    "rsqrt, 16 bits": (calls(aten.rsqrt.default, (F,), positive=True), NARROW),
    "pow": (calls(aten.pow.Tensor_Scalar, (F, 1.7), positive=True), WIDE),
    "pow of tensors": (calls(aten.pow.Tensor_Tensor, (F, F), positive=True), WIDE),
    "sigmoid": (calls(aten.sigmoid.default, (F,)), WIDE),
    "scaled add, 16 bits": (calls(aten.add.Tensor, (F, F), alpha=-0.37), NARROW),
    "scaled sub, 16 bits": (calls(aten.sub.Tensor, (F, F), alpha=0.37), NARROW),
    "scaled add of a column": (calls(aten.add.Tensor, (F, C), alpha=-0.37), DTYPES),
    "scaled add of a 0-d tensor": (calls(aten.add.Tensor, (F, S), alpha=-0.37), DTYPES),
    "scaled add of a number": (calls(aten.add.Tensor, (F, 0.37), alpha=0.7), DTYPES),
}


# -- measuring ---------------------------------------------------------------------------------


def random_values(call: Call, dtypes: Sequence[torch.dtype], m: int, n: int, random: torch.Generator) -> list[Any]:
    """Operands for a whole tensor of m x n, with a few numbers among them that are special."""
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, float("nan")])
    values: list[Any] = list(call.operands)
    for i, shape in enumerate(call.shapes(m, n)):
        if shape is None:
            continue
        value = torch.randn(shape, generator=random)
        if call.positive:
            value = value.abs() + 0.01
        elif shape:
            strange = torch.rand(shape, generator=random) < 0.05
            value[strange] = special[torch.randint(6, (int(strange.sum()),), generator=random)]
        values[i] = (value > 0 if call.operands[i] == M else value).to(call.dtype(i, dtypes))
    return values


def fragment(value: Any, rows: slice, columns: slice, offset: int) -> Any:
    """A part of an operand in memory of its own, `offset` elements from its start as in a buffer."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    m, n = value.shape
    part = value[rows if m > 1 else slice(None), columns if n > 1 else slice(None)]
    memory = torch.empty(offset + part.numel(), dtype=value.dtype)
    own = memory[offset:].view(part.shape)
    return own.copy_(part)


def cuts(m: int, n: int, unit: int = 1) -> Iterator[tuple[slice, slice]]:
    for rows, columns in ((m // 2, n), (m, n // 3), (m // 3, n // 2)):
        rows, columns = rows // unit * unit or m, columns // unit * unit or n
        yield slice(0, rows), slice(0, columns)
        yield slice(m - rows, m), slice(n - columns, n)


def same(a: Tensor, b: Tensor, signed_zeros: bool = True) -> bool:
    """Equal bits, or both NaN: which NaN is nobody's promise."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return False
    a, b = a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0)
    if not signed_zeros:
        return torch.equal(a, b)
    return torch.equal(bytes_of(a), bytes_of(b))


SIZES = [(1, 1), (1, 33), (47, 1), (6, 5), (17, 31), (16, 64), (40, 23), (64, 64), (13, 130), (70, 9)]
ALIGNED_SIZES = [(16, 64), (64, 64), (64, 192), (128, 65 * 2), (192, 128)]


def differences(
    call: Call,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[tuple[int, int]],
    unit: int = 1,
    signed_zeros: bool = True,
) -> int:
    """How many fragments have other bits than the whole tensor has there."""
    random = torch.Generator().manual_seed(1)
    count = 0
    for m, n in sizes:
        values = random_values(call, dtypes, m, n, random)
        whole = call.run(values).expand(m, n)
        for rows, columns in cuts(m, n, unit):
            if not whole[rows, columns].numel():
                continue
            if unit > 1 and (whole[rows, columns].numel() % WHOLE_VECTORS or whole.numel() % WHOLE_VECTORS):
                continue
            for offset in (0, 1):
                parts = [fragment(v, rows, columns, offset) for v in values]
                part = call.run(parts).expand(whole[rows, columns].shape)
                count += not same(part, whole[rows, columns], signed_zeros)
    return count


# -- positions ---------------------------------------------------------------------------------


def test_every_line_of_the_table_is_measured() -> None:
    assert set(TABLE) == set(POSITION_FREE_NAMES.split())
    assert len(POSITION_FREE_ON_CPU) == len(TABLE)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    crossed(list(TABLE), [*((d,) for d in DTYPES), (torch.float32, torch.bfloat16)]),
    ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value)),
)
def test_position_free_operators(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    free = 0
    for call in TABLE[name]:
        if len(dtypes) > 1 and "lerp" in name:
            continue  # it takes one dtype
        if not position_free(call.node(dtypes), CPU):
            continue
        free += 1
        assert differences(call, dtypes, SIZES, signed_zeros=name not in CHOOSING) == 0, str(call)
    assert free or len(dtypes) > 1


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_depends_on_the_position(name: str) -> None:
    own, dtypes = LEFT_OUT[name]
    assert not any(position_free(call.node((d,)), CPU) for call in own for d in dtypes)
    if not any(differences(call, (d,), SIZES * 3) for call in own for d in dtypes):
        pytest.skip("position does not matter on this CPU")


def test_nothing_is_claimed_for_operators_outside_the_table() -> None:
    for target in (aten.exp.default, aten.tanh.default, aten.log.default, aten.rsqrt.default):
        assert not position_free(Call(target, (F,)).node((torch.float32,)), CPU)
        assert position_free(Call(target, (F,)).node((torch.float32,)), Machine("cuda", "nccl", 1))


OTHERS = [aten.exp, aten.log, aten.tanh, aten.sin, aten.erf, aten.log1p, aten.sigmoid, aten.rsqrt]
ALIGNABLE = [Call(op.default, (F,), positive=True) for op in OTHERS]
ALIGNABLE += [call for own, _ in LEFT_OUT.values() for call in own if C not in call.operands]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", ALIGNABLE, ids=str)
def test_aligned_fragments_have_the_bits_of_the_whole(call: Call, dtype: torch.dtype) -> None:
    assert placed_equally(call.node((dtype,), 16, 64), CPU, aligned=True)
    assert differences(call, (dtype,), ALIGNED_SIZES, unit=8) == 0


def test_alignment_does_not_help_strided_and_broadcast_operands() -> None:
    scaled = Call(aten.add.Tensor, (F, C), {"alpha": 0.3})
    assert not placed_equally(scaled.node((torch.float32,), 64, 64), CPU, aligned=True)
    b = Builder(x=torch.empty(64, 64, device="meta"))
    flipped = b.call("flipped", aten.permute.default, b["x"], [1, 0])
    assert not placed_equally(b.call("y", aten.exp.default, flipped), CPU, aligned=True)
    assert placed_equally(b.call("z", aten.exp.default, b["x"]), CPU, aligned=True)
    assert not placed_equally(b.call("u", aten.exp.default, b["x"]), CPU, aligned=False)


# -- foreach -----------------------------------------------------------------------------------

SECOND: dict[Any, tuple[Any, ...]] = {
    aten.mul.Tensor: (F, 0.37),
    aten.add.Tensor: (F, 0.37),
    aten.sub.Tensor: (F, 0.37),
    aten.div.Tensor: (F, 0.37),
    aten.lerp.Scalar: (F,),
}


def foreach_calls() -> Iterator[Call]:
    for target in FOREACH:
        for second in SECOND.get(target, ("",)):
            operands: tuple[Any, ...] = (F, *([second] if second else []))
            yield Call(target, operands + ((0.37,) if target is aten.lerp.Scalar else ()), positive=True)
    yield Call(aten.add.Tensor, (F, F), {"alpha": -0.37})
    yield Call(aten.sub.Tensor, (F, F), {"alpha": 0.37})


def foreach_differs(call: Call, dtype: torch.dtype, in_place: bool) -> bool:
    """Run the operator one by one and torch's foreach function, and compare the bits."""
    random = torch.Generator().manual_seed(2)
    tasks = [random_values(call, (dtype,), m, n, random) for m, n in SIZES * 3]
    variant = getattr(getattr(aten, f"{call.target.overloadpacket.__name__}_"), call.target._overloadname)
    expected = [(variant if in_place else call.target)(v[0].clone(), *v[1:], **call.options) for v in tasks]
    columns: list[Any] = [list(c) if isinstance(c[0], Tensor) else c[0] for c in zip(*tasks, strict=True)]
    name = f"_foreach_{FOREACH[call.target]}{'_' if in_place else ''}"
    found = getattr(torch, name)(*columns, **call.options)
    return not all(map(same, columns[0] if in_place else found, expected))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", [*foreach_calls()], ids=str)
def test_foreach_functions(call: Call, dtype: torch.dtype, in_place: bool) -> None:
    differs = foreach_differs(call, dtype, in_place)
    if foreach_equal(call.node((dtype,)), in_place):
        assert not differs
    elif not differs:
        pytest.skip("equal on this CPU")


def test_only_scaling_in_place_in_16_bits_is_left_out_of_foreach() -> None:
    refused = {
        (str(call), dtype, in_place)
        for call in foreach_calls()
        for dtype in DTYPES
        for in_place in (False, True)
        if not foreach_equal(call.node((dtype,)), in_place)
    }
    assert refused == {(str(Call(aten.mul.Tensor, (F, 0.37))), dtype, True) for dtype in NARROW}


# -- batches -----------------------------------------------------------------------------------


def operands_of(random: torch.Generator, m: int, k: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Three pairs of factors for [m, k] @ [k, n], as lists of 3: contiguous, and transposed as in X @ X.T."""

    def draw(a: int, b: int) -> Tensor:
        return torch.randn(3, a, b, generator=random).bfloat16()

    yield draw(m, k), draw(k, n)
    yield draw(k, m).transpose(1, 2), draw(k, n)
    yield draw(m, k), draw(n, k).transpose(1, 2)


def batches_differ(target: Any, m: int, k: int, n: int, random: torch.Generator) -> bool:
    for left, right in operands_of(random, m, k, n):
        if target is aten.mm.default:
            batch, single = torch.bmm(left, right), [torch.mm(a, b) for a, b in zip(left, right, strict=True)]
        else:
            bias = torch.randn(3, m, n, generator=random).bfloat16()
            batch = torch.baddbmm(bias, left, right, beta=-4.775, alpha=2.0315)
            single = [
                torch.addmm(c, a, b, beta=-4.775, alpha=2.0315) for c, a, b in zip(bias, left, right, strict=True)
            ]
        if not all(map(same, batch, single)):
            return True
    return False


@pytest.mark.full
@pytest.mark.parametrize("target", [aten.mm.default, aten.addmm.default], ids=str)
def test_batched_products_of_multiples_of_16(target: Any) -> None:
    random = torch.Generator().manual_seed(3)
    for _ in range(60):
        m, k, n = (16 * int(torch.randint(1, 11, (1,), generator=random)) for _ in range(3))
        assert batches_equal(target, (m, k, n), torch.bfloat16, CPU) is (m * k * n > 16**3)
        assert m * k * n == 16**3 or not batches_differ(target, m, k, n, random), (m, k, n)


@pytest.mark.parametrize(
    "case",
    [
        (aten.mm.default, (16, 32, 24), torch.bfloat16, CPU),
        (aten.mm.default, (16, 16, 16), torch.bfloat16, CPU),
        (aten.mm.default, (16, 32, 16), torch.float32, CPU),
        (aten.bmm.default, (16, 32, 16), torch.bfloat16, CPU),
        (aten.mm.default, (16, 32, 16), torch.bfloat16, Machine("cpu", "gloo", 2)),
        (aten.mm.default, (16, 32, 16), torch.bfloat16, Machine("cuda", "nccl", 1)),
    ],
    ids=["odd", "small", "float32", "bmm", "threads", "cuda"],
)
def test_no_other_batches_are_claimed(case: tuple[Any, tuple[int, ...], torch.dtype, Machine]) -> None:
    assert batches_equal(aten.mm.default, (16, 32, 16), torch.bfloat16, CPU)
    assert not batches_equal(*case)


@pytest.mark.parametrize("target", [aten.mm.default, aten.addmm.default], ids=str)
def test_batched_products_of_the_smallest_shapes(target: Any) -> None:
    """Where torch begins to use oneDNN for a product; rare values differ there, so each shape has many draws."""
    random = torch.Generator().manual_seed(4)
    for m, k, n in itertools.product((16, 32), repeat=3):
        if batches_equal(target, (m, k, n), torch.bfloat16, CPU):
            assert not any(batches_differ(target, m, k, n, random) for _ in range(400)), (m, k, n)


# -- reductions of stacks ----------------------------------------------------------------------------

REDUCE = {
    "norm": lambda x, dims: torch.linalg.vector_norm(x, dim=dims),
    "sum": lambda x, dims: x.sum(dim=dims),
    "mean": lambda x, dims: x.mean(dim=dims),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REDUCE)
def test_reductions_of_a_stack(name: str, dtype: torch.dtype) -> None:
    assert reductions_equal(CPU)
    assert not reductions_equal(Machine("cpu", "gloo", 2))
    random = torch.Generator().manual_seed(0)
    for number in range(200):
        m, n = (int(torch.randint(1, 97, (), generator=random)) for _ in range(2))
        stack = torch.randn(3, m, n, generator=random).to(dtype)
        stack = stack.mT if number % 3 == 0 else stack
        alone = [matrix.clone() for matrix in stack]
        for dims in ((-2, -1), (-1,), (-2,)):
            each = torch.stack([REDUCE[name](matrix, dims) for matrix in alone])
            assert torch.equal(REDUCE[name](stack, dims), each)
        each = torch.stack([REDUCE[name](matrix, None) for matrix in alone])
        assert torch.equal(REDUCE[name](stack, (-2, -1)), each)
