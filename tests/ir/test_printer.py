"""The text form: golden files of every pass, and what it must and must not say."""

from __future__ import annotations

import cProfile
import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx

from canzona_compile.eager.nodes import interpreted_template
from canzona_compile.ir import plan_file
from canzona_compile.ir.layout import Grid, Layout
from canzona_compile.ir.pipeline import Pass, PassHistory, run
from canzona_compile.ir.printer import differences, dtype_name, neutral, parts, show, show_argument, show_nodes
from canzona_compile.ir.step import Exchange, Form, Phase, Step, Task
from canzona_compile.ir.verifier import some_pairs
from canzona_compile.passes import (
    AssignOwners,
    Batching,
    Canonicalize,
    Emit,
    FormMicroGroups,
    FuseCollectives,
    Place,
    Schedule,
)
from canzona_compile.replica.parameter_spec import ParameterSpec
from tests.conftest import Golden
from tests.harness.samples import (
    TOY_SHAPE,
    Builder,
    empty,
    grid_of,
    muon_capture,
    muon_step,
    muon_template,
    rows_layout,
    toy_step,
    toy_template,
)

aten = torch.ops.aten

MATRIX, WIDE = (64, 32), (6, 20)  # cut by rows, WIDE is uneven and leaves a rank of four empty
CASES = ("fsdp2", "hsdp")


def passes(groups: int) -> list[Pass]:
    return [
        Canonicalize(),
        Place(),
        AssignOwners("owner"),
        FormMicroGroups(capacity=2**20, groups=groups),
        FuseCollectives(),
        Batching(),
        Schedule(),
        Emit(rank=0),
    ]


@cache
def history(case: str) -> PassHistory:
    """FSDP2 in two micro-groups, which overlap; HSDP in one, where rank 0 stacks two tasks."""
    if case == "fsdp2":
        return run(muon_step(grid_of(1, 4), MATRIX, MATRIX, WIDE), passes(2))[1]
    return run(muon_step(grid_of(2, 2), *[MATRIX] * 5, WIDE), passes(1))[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", [Form.CAPTURED, Form.SCHEDULED], ids=lambda f: f.name.lower())
def test_muon(golden: Golden, case: str, form: Form) -> None:
    step = history(case).records[0].before
    step = step if form is Form.CAPTURED else history(case).step_at(form)
    golden(show(step), f"{case}/{form.name.lower()}.ir")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", range(8), ids=lambda i: passes(1)[i].name)
def test_what_a_pass_changes(golden: Golden, case: str, number: int) -> None:
    record = history(case).records[number]
    changes = differences(show(record.before), show(record.after))
    golden(changes, f"{case}/{number + 1:03d}_{record.name}.diff")


@pytest.mark.parametrize("form", [Form.CAPTURED, Form.EMITTED], ids=lambda f: f.name.lower())
def test_toy(golden: Golden, form: Form) -> None:
    golden(show(toy_step(form)), f"toy/{form.name.lower()}.ir")


# -- the same text for the same step -----------------------------------------------------------


def fingerprint(step: Step) -> str:
    return plan_file.fingerprint(parts(step))


def test_two_captures_print_the_same() -> None:
    step = muon_step(grid_of(1, 4), MATRIX)
    for cached in (muon_template, muon_capture):
        cached.cache_clear()
    again = muon_step(grid_of(1, 4), MATRIX)
    assert step.templates[0].graph is not again.templates[0].graph
    assert show(step) == show(again)


@pytest.mark.parametrize("form", Form)
def test_forms_print_differently(form: Form) -> None:
    step = toy_step(form)
    assert show(step) == show(toy_step(form))
    others = [show(toy_step(other)) for other in Form if other is not form]
    assert show(step) not in others


def test_parts_make_the_whole_and_reasons_no_difference() -> None:
    """A plan's fingerprint is of the text without ` because ...`, and its digests are of consecutive parts of it."""
    step = history("fsdp2").step_at(Form.SCHEDULED)
    tasks = [replace(t, reason="this rank is idle") for t in step.tasks]
    told = replace(step, tasks=tuple(tasks), templates=(replace(step.templates[0], interpreted="0 graphs"),))
    assert "".join(f"{line}\n" for lines in parts(told).values() for line in lines) == show(told)
    bare = "".join(f"{line}\n" for lines in parts(told, reasons=False).values() for line in lines)
    assert show(told).count(" because ") == 1 + len(tasks)
    assert bare == re.sub(r"(?m) because .*$", "", show(told))
    firsts = [lines[0].split()[0] for lines in parts(step).values()]
    assert firsts == ["step", "layout", "group", "schedule"]


def with_layout(step: Step, layout: Layout) -> Step:
    return replace(step, tasks=(replace(step.tasks[0], layout=layout), *step.tasks[1:]))


def test_the_text_knows_the_arrangement_of_ranks() -> None:
    step = toy_step(Form.CAPTURED)
    turned = rows_layout(TOY_SHAPE, Grid(((0, 2), (1, 3))))
    assert str(turned.grid) == str(step.tasks[0].layout.grid)
    assert show(with_layout(step, turned)) != show(step)


def test_the_text_knows_every_digit() -> None:
    def step(alpha: float) -> Step:
        b = Builder(x=empty((2, 2)))
        graph = b.returns(b.call("y", aten.mul.Tensor, b["x"], alpha))
        return replace(toy_step(Form.CAPTURED), templates=(replace(toy_template(), graph=graph),))

    assert show(step(0.1)) == show(step(0.1))
    assert show(step(0.1)) != show(step(math.nextafter(0.1, 1)))


def test_nothing_in_it_differs_between_processes() -> None:
    spec = ParameterSpec(TOY_SHAPE, torch.float32, torch.float32, torch.device("cpu"))
    reason = "Unsupported: <Foo object at 0x7f3a> in /home/me/optimizers/foo.py\nand more"
    template = interpreted_template("toy", spec, reason)
    text = show(replace(toy_step(Form.CAPTURED), templates=(template,)))
    assert "because Unsupported: <Foo object at 0x...> in foo.py and more {" in text
    assert "%eager_step = eager_step(%task, %param, %grad)" in text
    assert "0x7f" not in text
    assert "/home" not in text


# -- what it says ------------------------------------------------------------------------------


ARGUMENTS = [
    (0.1 + 0.2, "0.30000000000000004"),
    (-1e-300, "-1e-300"),
    (math.inf, "inf"),
    (True, "True"),
    (None, "None"),
    ([1, 0], "[1, 0]"),
    ((2.0, [torch.float16]), "[2.0, [f16]]"),
    (slice(None, 3, None), "None:3:None"),
    ("nearest", "'nearest'"),
    (torch.device("cuda", 3), "cuda"),
    (torch.strided, "torch.strided"),
    (torch.ops.aten.mm.default, "aten.mm.default"),
]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "u8": torch.uint8, "bool": torch.bool}
DTYPES |= {"f8_e4m3fn": torch.float8_e4m3fn, "complex64": torch.complex64}
NEUTRAL = {
    "a/b and 1/2": "a/b and 1/2",
    "0xDEADbeef": "0x...",
    'File "/usr/lib/python3.11/abc.py"': 'File "abc.py"',
    "aten.mul at x.py:3": "aten.mul at x.py:3",
}


def test_words() -> None:
    assert [show_argument(value) for value, _ in ARGUMENTS] == [expected for _, expected in ARGUMENTS]
    assert {dtype_name(dtype): dtype for dtype in DTYPES.values()} == DTYPES
    assert {text: neutral(text) for text in NEUTRAL} == NEUTRAL


def test_a_graph_alone() -> None:
    b = Builder(x=empty((4, 2)), lr=0.5)
    scaled = b.call("scaled", aten.mul.Tensor, b["x"], b["lr"])
    graph = b.returns(b.call("low", aten._to_copy.default, scaled, dtype=torch.bfloat16), None)
    assert list(show_nodes(graph)) == [
        "%scaled = aten.mul.Tensor(%x, %lr) : f32[4x2]",
        "%low = aten._to_copy.default(%scaled, dtype=bf16) : bf16[4x2]",
        "return %low, None",
    ]


def test_renamed_placeholders_keep_their_leaf() -> None:
    """FX calls a placeholder `sum` sum_1, after the builtin; Adagrad has such a state."""
    template = toy_template()
    graph = fx.Graph()
    node = graph.placeholder("sum")
    graph.output((node,))
    leaf = replace(template.leaf("buffer"), name="sum")
    renamed = replace(template, inputs=(leaf,), writes=("sum",), graph=graph)
    text = show(replace(toy_step(Form.CAPTURED), templates=(renamed,)))
    assert f"state %sum = %{node.name} : f32[6x3]" in text
    assert f"return sum=%{node.name}" in text


def test_broken_steps_print() -> None:
    """A dump must not fail where the verifier will."""
    step = toy_step(Form.CAPTURED)
    broken = replace(step.templates[0], writes=("param",), inputs=step.templates[0].inputs * 2)
    assert "return %new_param, %new, %new_q" in show(replace(step, templates=(broken,)))


def test_small_grids_print_blocks_and_large_ones_totals() -> None:
    small, large = toy_step(Form.ROUTED, 2, 2), toy_step(Form.ROUTED, 4, 4)
    assert "blocks of replica 1\n" in show(small)
    assert "blocks" not in show(large)
    grid = large.tasks[0].layout.grid
    exchange = large.micro_groups[0].gather
    assert isinstance(exchange, Exchange)
    moved = [exchange.block(a, b)[0] for a, b in some_pairs(Phase.GATHER, grid)]
    carried = sum(p.box.numel * p.wire.itemsize for pieces in moved for p in pieces)
    assert f"total {carried} B" in show(large)


def test_wires_that_broadcast_are_counted_by_what_travels() -> None:
    step = toy_step(Form.ROUTED, 1, 16)
    exchange = step.micro_groups[0].scatter
    assert isinstance(exchange, Exchange)
    row = replace(exchange.items[0].wire, shape=(1, 3))
    narrow = replace(exchange, items=(replace(exchange.items[0], wire=row),))
    group = replace(step.micro_groups[0], scatter=narrow)
    # Six of sixteen ranks have a row, and each of them needs the row of 12 bytes.
    assert "a %update f32[1x3] 72 B" in show(replace(step, micro_groups=(group, *step.micro_groups[1:])))


def test_differences() -> None:
    assert differences("a\nb\n", "a\nb\n") == ""
    assert differences("a\nb\n", "a\nc\n") == "--- before\n+++ after\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"


MOST_CALLS = 400  # for a task more, on eight ranks


def printing_calls(num_tasks: int) -> int:
    """How many Python functions printing a step of so many tasks calls."""
    base = muon_step(grid_of(1, 8), MATRIX, WIDE)
    tasks: list[Task] = []
    for i in range(num_tasks):
        like = base.tasks[i % 2]
        layout = rows_layout(like.shape, grid_of(1, 8))  # each its own object, as from DTensors
        tasks.append(replace(like, name=f"layers.{i}.weight", index=i, layout=layout))
    step, _ = run(replace(base, tasks=tuple(tasks)), passes(2)[:-1])
    with cProfile.Profile() as profile:
        show(step)
    return sum(entry.callcount for entry in profile.getstats())


def test_a_task_more_costs_few_calls() -> None:
    """Every rank prints the step before the first collective, with hundreds of tasks."""
    few, many = printing_calls(100), printing_calls(200)
    assert (many - few) / 100 < MOST_CALLS
