"""Compiles generated kernels for GPUs that are not there. A program of its own: kernels are defined for Triton's
compiler or for its interpreter, once per process. Prints JSON: by kernel, what the binary for an architecture needs.

    python -m tests.codegen.compiled_kernels ARCH
"""

from __future__ import annotations

import json
import operator
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from canzona_compile.codegen.launch import BLOCK, OPTIONS, loaded
from canzona_compile.codegen.source import KernelForm, PointwiseProgram, copying, expressions, opening, source
from canzona_compile.kernels.int8_blocks_triton import BLOCKS, decode_blocks, encode_blocks
from canzona_compile.kernels.int8_blocks_triton import OPTIONS as INT8_OPTIONS
from tests.codegen.pointwise import one_call
from tests.harness.samples import Builder, empty

aten = torch.ops.aten
SHAPE = (64, 64)
FLAT: tuple[KernelForm, ...] = ((1, True),)
ALL: tuple[KernelForm, ...] = ((1, True), (2, True), (1, False), (2, False), (4, False))


def muon_prepare(state: str = "") -> PointwiseProgram:
    """With the momentum as it is, or as `state=` stores it."""
    b = Builder(momentum_buffer=empty(SHAPE), grad=empty(SHAPE), momentum=0.95)
    weight = b.call("weight", operator.sub, 1.0, b["momentum"])
    average = b.call("average", aten.lerp.Scalar, b["momentum_buffer"], b["grad"], weight)
    ahead = b.call("ahead", aten.lerp.Scalar, b["grad"], average, b["momentum"])
    graph = b.returns(b.call("low", aten._to_copy.default, ahead, dtype=torch.bfloat16), average)
    stored = {"momentum_buffer": state} if state else {}
    made = opening(expressions(graph, [0, 1], SHAPE), stored, [False, state == "bfloat16"])
    return PointwiseProgram("prepare", made, tuple((dtype,) for _, dtype in made.results))


def muon_apply() -> PointwiseProgram:
    b = Builder(update=empty(SHAPE, torch.bfloat16), param=empty(SHAPE), decay=0.9, lr=0.1)
    shrunk = b.call("shrunk", aten.mul.Tensor, b["param"], b["decay"])
    graph = b.returns(b.call("moved", aten.add.Tensor, shrunk, b["update"], alpha=b["lr"]))
    return PointwiseProgram("apply", expressions(graph, [0], SHAPE), ((torch.float32,),))


def adam_apply() -> PointwiseProgram:
    """Adam's bias corrections from a 0-d counter, one divisor per row, 16-bit parameters: most of what there is."""
    b = Builder(
        param=empty(SHAPE, torch.bfloat16),
        mean=empty(SHAPE),
        square=empty(SHAPE),
        rows=empty((SHAPE[0], 1)),
        step=empty(()),
        lr=0.1,
        beta=0.9,
    )
    correction = b.call("correction", aten.pow.Scalar, 0.9, b["step"])
    left = b.call("left", aten.rsub.Scalar, correction, 1)
    unbiased = b.call("unbiased", aten.div.Tensor, b["square"], left)
    root = b.call("root", aten.sqrt.default, unbiased)
    shifted = b.call("shifted", aten.add.Tensor, root, 1e-8)
    ratio = b.call("ratio", aten.div.Tensor, b["mean"], shifted)
    bounded = b.call("bounded", aten.tanh.default, ratio)
    normal = b.call("normal", aten.div.Tensor, bounded, b["rows"])
    low = b.call("low", aten._to_copy.default, normal, dtype=torch.bfloat16)
    grown = b.call("grown", aten.exp.default, low)
    graph = b.returns(b.call("moved", aten.add.Tensor, b["param"], grown, alpha=b["lr"]))
    return PointwiseProgram("adam", expressions(graph, [0], SHAPE), ((torch.bfloat16,),))


def copy() -> PointwiseProgram:
    return PointwiseProgram("copy", copying(torch.bfloat16, torch.bfloat16), ((torch.bfloat16,),))


def addcmul() -> PointwiseProgram:
    return one_call(aten.addcmul.default, [torch.ones(SHAPE)] * 3).program()


KERNELS = {
    "prepare": ([muon_prepare()], FLAT),
    "prepare of codes": ([muon_prepare("int8")], FLAT),
    "prepare of halves": ([muon_prepare("bfloat16")], FLAT),
    "apply": ([muon_apply()], FLAT),
    "copy": ([copy()], ((1, True), (2, True))),
    "addcmul": ([addcmul()], FLAT),
    "mixed": ([muon_apply(), adam_apply(), copy()], ALL),
}


def operators(dtype: torch.dtype) -> list[PointwiseProgram]:
    """Every rule, on operands of one dtype."""
    x, y, flag = torch.ones(SHAPE, dtype=dtype), torch.ones(SHAPE, dtype=dtype), torch.ones(SHAPE, dtype=torch.bool)
    unary = "sqrt rsqrt reciprocal exp exp2 log log2 sin cos erf tanh sigmoid neg abs sign square floor ceil relu"
    works = [one_call(getattr(aten, name).default, [x]) for name in unary.split()]
    works += [
        one_call(op, [x, y]) for op in (aten.maximum.default, aten.minimum.default, aten.le.Tensor, aten.div.Tensor)
    ]
    works += [one_call(op, [x, y], alpha=0.3) for op in (aten.add.Tensor, aten.sub.Tensor)]
    works += [one_call(op, [x, y, x], value=0.3) for op in (aten.addcmul.default, aten.addcdiv.default)]
    works += [
        one_call(aten.div.Tensor, [x], 0.3),
        one_call(aten.rsub.Scalar, [x], 0.3),
        one_call(aten.gt.Scalar, [x], 0.3),
    ]
    works += [one_call(aten.pow.Tensor_Scalar, [x], power) for power in (2, 3, 0.5, -2, 1.7)]
    works += [one_call(aten.pow.Tensor_Tensor, [x, y]), one_call(aten.lerp.Scalar, [x, y], 0.3)]
    works += [one_call(aten.lerp.Tensor, [x, y, x]), one_call(aten.clamp.default, [x], -0.3, 0.3)]
    works += [one_call(aten.where.self, [flag, x, y]), one_call(aten.logical_not.default, [flag])]
    works += [one_call(aten.full_like.default, [x], 0.3), one_call(aten.mul.Tensor, [x, flag])]
    others = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
    works += [one_call(aten._to_copy.default, [x], dtype=other) for other in others]
    return [work.program() for work in works]


def compile_for(arch: int, text: str, programs: Sequence[PointwiseProgram]) -> dict[str, Any]:
    width, operands = (max(own) for own in zip(*((p.width, len(p.dtypes)) for p in programs), strict=True))
    return needs_of(
        arch,
        ASTSource(
            fn=loaded(text),
            signature={
                "segments": "*i32",
                "rows": "*i64",
                "addresses": "*i64",
                "numbers": "*i64",
                "tiles": "i32",
                "WIDTH": "constexpr",
                "OPERANDS": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={(5,): width, (6,): operands, (7,): BLOCK},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(4)},
        ),
        OPTIONS,
    )


def int8_blocks(arch: int) -> dict[str, dict[str, Any]]:
    """Of float32, with rows of whole blocks."""
    places = {"width": "i32", "per_row": "i32", "count": "i32"}
    shared = {"codes": "*i8", "scales": "*fp32"}
    found = {}
    for kernel, types in (
        (decode_blocks, {**shared, "out": "*fp32", **places}),
        (encode_blocks, {"value": "*fp32", **shared, **places, "least": "fp32", "low": "i32"}),
    ):
        names = list(types)
        made = ASTSource(
            fn=kernel,
            signature={**types, "BLOCKS": "constexpr", "BLOCK": "constexpr"},
            constexprs={(len(names),): BLOCKS, (len(names) + 1,): 128},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names[:4]},  # pointers, and the width
        )
        found[kernel.__name__] = needs_of(arch, made, INT8_OPTIONS)
    return found


def needs_of(arch: int, made_of: ASTSource, options: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a kernel, and read off what it needs."""
    made = triton.compile(made_of, target=GPUTarget("cuda", arch, 32), options=dict(options))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    needs = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said)
    assert needs is not None, said
    names = ("registers", "stack", "shared", "local")
    found = {name: int(value) for name, value in zip(names, needs.groups(), strict=True)}
    memory = re.findall(r"(?:ld|st)\.global\S*", made.asm["ptx"])
    flushing = re.findall(r"\w+(?:\.\w+)*\.ftz(?:\.\w+)*", made.asm["ptx"])
    fused = made.asm["ptx"].count("fma.rn.f32") + made.asm["ptx"].count("fma.rn.f32x2")  # these are two
    products = len(re.findall(r"mul(?:\.rn)?\.f32", made.asm["ptx"]))
    found |= {"fused": fused, "products": products}
    looped = sorted(set(re.findall(r"ld\.global\S*", "\n".join(loops(made.asm["ptx"])))))
    loads = len(re.findall(r"ld\.global", made.asm["ptx"]))
    found |= {"loads": loads, "looped": looped}
    return found | {"memory": sorted(set(memory)), "flushing": sorted(set(flushing))}


def loops(ptx: str) -> list[str]:
    """The instructions between a label and a later branch back to it."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))}
    found_in: set[int] = set()
    for i, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if jump and labels[jump[1]] < i:
            found_in |= {*range(labels[jump[1]], i)}
    return [lines[i] for i in sorted(found_in)]


if __name__ == "__main__":
    results, arch = {}, int(sys.argv[1])
    for name, (programs, forms) in KERNELS.items():
        branches = [(i, form) for i in range(len(programs)) for form in forms]
        text = source(name, programs, branches)
        results[name] = compile_for(arch, text, programs)
    for dtype in (torch.float32, torch.float64) if arch == 90 else ():
        programs = operators(dtype)
        text = source("operators", programs, [(i, (1, True)) for i in range(len(programs))])
        needs = compile_for(arch, text, programs)
        results[str(dtype)] = needs | {"functions": text.count("@triton.jit") - 1}
    print(json.dumps(results | int8_blocks(arch)))
