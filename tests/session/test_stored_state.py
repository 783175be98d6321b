"""State in 8 and 16 bits, and in host memory: the bits of the plain optimizer whose state is rounded, on any layout."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer

import canzona_compile
from canzona_compile.api.round_state import rounding
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.storage import Stored, parse_state, rounded, rules_of, storage_of
from canzona_compile.optimizers import KLSOAP, SOAP, NorMuon, Shampoo
from canzona_compile.optimizers import Muon as StackMuon
from canzona_compile.session.cells import Cells
from canzona_compile.session.step_driver import StepDriver
from canzona_compile.tools.verification.layouts import like
from tests.data_parallel.runs import compare, step_alone
from tests.harness.layouts import ALONE, Case, mesh_of
from tests.harness.layouts import full as full_tensor
from tests.harness.marks import first, full
from tests.harness.mistakes import attempt
from tests.harness.pairs import Pair, different, parameters, params_of
from tests.harness.ranks import run
from tests.harness.toy_optimizers import HostReading
from tests.harness.traps.grammar import toy


class OddState(HostReading):
    """An eager step whose state has a tuple, one tensor under two names, and an expanded one."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            shared = torch.zeros_like(param)
            state |= {"pair": (torch.zeros_like(param), 3), "one": shared, "two": shared}
            state["same"] = torch.zeros(1, 1).expand(param.shape)
        state["one"].lerp_(grad, 0.3)
        state["pair"][0].add_(state["two"])
        super().update(param, grad + state["pair"][0] + state["same"], group, state)


# Powers of a mean of gradients: nothing is divided by it.
Cubes = toy("cubes")("""
    average = state.setdefault("average", torch.zeros_like(param))
    average.mul_(0.9).add_(grad)
    param.add_(average.pow(3.0), alpha=-group["lr"])
""")
MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1),
    "stacks": lambda params: StackMuon(params, lr=0.1),
    "soap": lambda params: SOAP(params, lr=0.01, every=2),
    "kl-soap": lambda params: KLSOAP(params, lr=0.01, every=2),
    "shampoo": lambda params: Shampoo(params, lr=0.01, every=2),
    "normuon": lambda params: NorMuon(params, lr=0.01),
    "adamw": lambda params: AdamW(params, lr=0.01),
    "eager": lambda params: HostReading(params, lr=0.1),
    "cubes": lambda params: Cubes(params, lr=0.1),
    "odd eager": lambda params: OddState(params, lr=0.1),
}
INT8 = {"momentum_buffer": "int8"}
MEANS = {"momentum_buffer": "int8", "second_moment": "bfloat16 cpu"}
ADAM = {"exp_avg": "int8 cpu", "exp_avg_sq": "bfloat16"}
FLOAT = torch.float32
SHAPES = ((12, 200), (200, 12), (6, 6))
STACKS = ((4, 6, 130), (6, 8))
# Of (6, 256), two ranks cut columns between blocks; of (8, 200) within one, so that the owner stores them.
COLUMNS = ((6, 256), (8, 200))

WAYS = [
    ("muon", INT8, SHAPES, Case("fsdp", (2,))),
    ("muon", INT8, SHAPES, ALONE),
    ("cubes", {"average": "int8"}, SHAPES, ALONE),
    ("muon", INT8, COLUMNS, Case("fsdp_columns", (2,))),
    ("muon", INT8, SHAPES, Case("ddp", (2,))),
    ("muon", {"*": "int8 cpu"}, ((7, 9), (1, 130), (5, 3)), Case("fsdp", (4,))),
    ("muon", INT8, COLUMNS, Case("tp_columns", (2,))),
    ("muon", INT8, SHAPES, Case("hsdp", (2, 2))),
    ("muon", INT8, SHAPES, Case("fsdp_tp", (2, 2))),
    ("muon", "cpu", SHAPES, Case("fsdp", (2,))),
    ("stacks", INT8, STACKS, Case("fsdp", (2,))),
    ("normuon", MEANS, SHAPES, Case("fsdp", (2,))),
    ("soap", "bfloat16", SHAPES, Case("fsdp", (2,))),
    ("soap", "cpu", SHAPES, Case("ddp", (2,))),
    ("kl-soap", "bfloat16 cpu", SHAPES, Case("fsdp", (2,))),
    ("shampoo", {"momentum_buffer": "int8", "*": "bfloat16"}, SHAPES, Case("fsdp", (2,))),
    ("eager", "bfloat16 cpu", SHAPES, Case("fsdp", (2,))),
    ("eager", "bfloat16", ((1, 8), (6, 6)), Case("fsdp", (1,))),
    ("odd eager", "bfloat16", SHAPES, Case("fsdp", (2,))),
    ("adamw", ADAM, SHAPES, Case("fsdp", (2,))),
    ("adamw", "bfloat16", ((5, 3), (3, 130)), Case("fsdp", (2,))),
]


def trained(name: str, state: Any, shapes: Any, case: Case, strategy: str = "owner") -> list[str]:
    """What differs from the plain optimizer whose state is rounded; first steps, steady ones, a missing gradient."""
    pair = Pair(
        MAKERS[name], shapes, None if case is ALONE else case, state=state, strategy=strategy, captures_anew=True
    )
    canzona_compile.round_state(pair.plain, state)
    pair.go(3)
    wrong = pair.different()
    pair.feed(0)
    pair.take()
    pair.go(2)
    return wrong + pair.different()


@pytest.mark.parametrize(("name", "state", "shapes", "case"), [*WAYS[:4], *(full(*w) for w in WAYS[4:])])
def test_the_bits_of_rounded_state(name: str, state: Any, shapes: Any, case: Case) -> None:
    if case is ALONE:
        assert trained(name, state, shapes, case) == []
        return
    assert run(case.world, trained, name, state, shapes, case) == [[]] * case.world


EVERY = {  # storages of each optimizer, with 8 bits where its step takes them
    "muon": INT8,
    "normuon": MEANS,
    "soap": {"exp_avg": "int8", "*": "bfloat16 cpu"},
    "kl-soap": {"exp_avg": "int8 cpu", "*": "bfloat16"},
    "shampoo": {"momentum_buffer": "int8", "*": "bfloat16"},
    "adamw": ADAM,
}
CASES = [Case("fsdp", (2,)), Case("fsdp", (4,)), Case("hsdp", (2, 2)), Case("tp_rows", (2,)), Case("tp_columns", (4,))]
CASES += [Case("fsdp_tp", (2, 2)), Case("ddp", (2,)), Case("ddp", (4,)), Case("tp_ddp", (2, 2))]
CUT = ("tp_columns", "fsdp_tp", "tp_ddp")  # within blocks, where elementwise updates take no codes


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_optimizer_on_every_layout(name: str, case: Case) -> None:
    state = {"*": "bfloat16"} if name == "adamw" and case.layout in CUT else EVERY[name]
    assert run(case.world, trained, name, state, SHAPES, case) == [[]] * case.world


@pytest.mark.parametrize(
    ("make", "state", "options"),
    [
        ("muon and adamw", {"momentum_buffer": "int8", "exp_avg*": "bfloat16"}, {}),
        full("muon and adamw", "int8", {}),
        full("muon and adamw", "cpu", {"gather": "forward"}),
        full("soap", "bfloat16 cpu", {"gather": "forward"}),
        full("shampoo", {"momentum_buffer": "int8", "*": "bfloat16"}, {}),
    ],
)
def test_under_zero1(make: str, state: Any, options: dict[str, Any]) -> None:
    after = partial(step_alone, make, FLOAT)
    found = run(2, compare, make, 5, ddp=True, bucket_bytes=40_000, state=state, after=after, **options)
    assert found == [[], []]


# -- chains, groups, checkpoints ---------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(40, 24), nn.Linear(24, 136, bias=False), nn.LayerNorm(136), nn.Linear(136, 24, bias=False)
    return nn.Sequential(*layers)


def fed(params: Iterable[Tensor], step: int) -> None:
    """Equal gradients on every rank, laid out as the parameters are."""
    random = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = like(torch.randn(param.shape, generator=random), param)


def chained(state: Any, layout: str) -> list[str]:
    """What differs of a whole model, in one line, from the plain chain whose state is rounded."""
    whole, own = model(), model()
    if layout == "fsdp":
        fully_shard(own, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    ours = canzona_compile.muon_adamw(own, lr=0.01, state=state)
    plain = canzona_compile.unwrap(canzona_compile.muon_adamw(whole, lr=0.01))
    canzona_compile.round_state(plain, state)
    for step in range(4):
        for made in (whole, own):
            fed(made.parameters(), step)
        plain.step()
        ours.step()
    pairs = zip(whole.named_parameters(), own.parameters(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(a, full_tensor(b))]


@pytest.mark.parametrize("layout", first(["fsdp", "whole"]))
def test_one_text_for_a_chain(layout: str) -> None:
    """Codes for the momentum of matrices, 16 bits for all else."""
    assert run(2, chained, "int8", layout) == [[], []]


def begun(state: Any, after: Any) -> Any:
    """A state dict of whole tensors after three steps, in between of which it is loaded here, and the parameters.

    What ranks hold of it goes into another storage as well.
    """
    pair = Pair(MAKERS["muon"], SHAPES, Case("fsdp", (dist.get_world_size(),)), state=state, captures_anew=True)
    canzona_compile.round_state(pair.plain, state)
    pair.go(2)
    pair.wrapped.load_state_dict(copy.deepcopy(pair.wrapped.state_dict()))
    pair.go(1)
    pair.check()
    saved = pair.wrapped.state_dict()
    assert all(value.dtype == FLOAT for value in torch.utils._pytree.tree_leaves(saved["state"]))
    held = torch.utils._pytree.tree_map_only(Tensor, full_tensor, saved)
    values = [full_tensor(param).detach() for param in params_of(pair.wrapped)]
    assert resumed(held, values, after, saved) == []
    return held, values


def resumed(held: Any, values: list[Tensor], after: Any, fragments: Any = None) -> list[str]:
    """What differs after two more steps on these ranks, on another storage or none, of `fragments` if given."""
    pair = Pair(MAKERS["muon"], SHAPES, Case("fsdp", (dist.get_world_size(),)), state=after, captures_anew=True)
    with torch.no_grad():
        for i, (whole, own, value) in enumerate(zip(params_of(pair.plain), pair.laid.params, values, strict=True)):
            whole.copy_(value)
            own.copy_(pair.laid.like_param(value, i))
    pair.plain.load_state_dict(copy.deepcopy(held))
    pair.wrapped.load_state_dict(copy.deepcopy(fragments or held))
    rules = rules_of(after)
    if rules is not None:
        rounding(pair.plain, rules)()  # what is loaded is stored, too
        canzona_compile.round_state(pair.plain, after)
    pair.number = 3
    pair.go(2)
    return pair.different()


@pytest.mark.parametrize(
    ("before", "state", "other", "after"),
    [
        (2, INT8, 2, INT8),
        full(2, INT8, 2, None),
        full(2, {"*": "bfloat16 cpu"}, 2, INT8),
        full(2, "cpu", 2, {"*": "bfloat16"}),
        *(full(*ranks, after) for ranks in ((2, INT8, 4), (4, INT8, 2)) for after in (INT8, {"*": "bfloat16 cpu"})),
    ],
)
def test_a_checkpoint_goes_into_any_storage_on_any_number_of_ranks(
    before: int, state: Any, other: int, after: Any
) -> None:
    held, values = run(before, begun, state, after)[0]
    assert run(other, resumed, held, values, after) == [[]] * other


def test_a_checkpoint_gives_back_the_very_codes() -> None:
    made = [canzona_compile.wrap(MAKERS["muon"](parameters(SHAPES)), state=INT8) for _ in range(2)]
    for optimizer in made:
        fed(params_of(optimizer), 0)
        optimizer.step()
    made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
    held = []
    for optimizer in made:
        for param in params_of(optimizer):
            param.grad = None
        params_of(optimizer)[2].grad = torch.zeros(6, 6)  # the first two are not stepped
        optimizer.step()
        held.append([optimizer.state[param]["momentum_buffer"] for param in params_of(optimizer)[:2]])
    for one, other in zip(*held, strict=True):
        assert isinstance(one, Stored)
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_after_every_state_of_a_run() -> None:
    """Planned, stepped, measured, with a new group, released: calls work, and go on."""
    optimizer: Any = canzona_compile.wrap(MAKERS["muon"](parameters(SHAPES)), state=INT8)
    plain = MAKERS["muon"](parameters(SHAPES))
    canzona_compile.round_state(plain, INT8)
    assert "momentum_buffer stored as int8" in str(canzona_compile.explain(optimizer))
    optimizer.canzona.measure(1)
    for step in range(5):
        if step == 3:
            for own in (optimizer, plain):
                own.add_param_group({"params": parameters([(8, 20)])})
        for own in (optimizer, plain):
            fed(params_of(own), step)
            own.step()
        report = optimizer.canzona.report()
        (figure,) = report.state
        assert (figure.stored, figure.tensors) == ("int8", len(params_of(plain)))
        assert figure.bytes == sum(held["momentum_buffer"].nbytes for held in optimizer.state.values())
        pickle.loads(pickle.dumps(optimizer.state_dict()))
        if step == 3:
            optimizer.canzona.release()
    assert different(plain, optimizer) == []
    assert type(canzona_compile.unwrap(optimizer).state[params_of(optimizer)[0]]["momentum_buffer"]) is Tensor


def test_a_local_step_opens_portion_by_portion() -> None:
    """Elementwise state is opened for as many parameters as `capacity` says, from the first step on."""
    optimizer = canzona_compile.wrap(
        MAKERS["adamw"](parameters([(8, 128)] * 6)), state="bfloat16", capacity=8 * 128 * 8
    )
    opened: list[int] = []
    real = Stored.open

    def counted(own: Stored) -> Tensor:
        opened[-1] += 1
        return real(own)

    def portion(driver: Any, present: Any, real: Any = StepDriver._step_part) -> None:
        opened.append(0)
        real(driver, present)

    with mock.patch.object(Stored, "open", counted), mock.patch.object(StepDriver, "_step_part", portion):
        for step in range(2):
            fed(params_of(optimizer), step)
            optimizer.step()
    assert opened == [0, 0, 0, 4, 4, 4]


def test_a_first_step_needs_one_micro_group_more() -> None:
    """State that the optimizer's code creates is stored when its micro-group has been updated."""
    optimizer = canzona_compile.wrap(MAKERS["muon"](parameters([(16, 128)] * 12)), state=INT8, micro_groups=4)
    group = 3 * 16 * 128 * 4
    live, peak, peaks = [0], [0], []

    def count(tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        live[0] += size
        peak[0] = max(peak[0], live[0])
        weakref.finalize(tensor, lambda: live.__setitem__(0, live[0] - size))
        return tensor

    def step_alone(cells: Cells, *given: Any, real: Any = Cells.step) -> Any:
        new, state = real(cells, *given)
        count(state["momentum_buffer"])
        return new, state

    def opened(own: Stored, real: Any = Stored.open) -> Tensor:
        return count(real(own))

    with mock.patch.object(Stored, "open", opened), mock.patch.object(Cells, "step", step_alone):
        for step in range(3):
            fed(params_of(optimizer), step)
            peak[0] = live[0]
            optimizer.step()
            peaks.append(peak[0])
            assert live[0] == 0
    assert peaks == [2 * group, group, group]


# -- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("muon", {"momentum": "int8"}, "'momentum' fits no leaf of the state"),
        ("muon", {"momentum": "int8"}, "hint: there are momentum_buffer"),
        ("muon", "int4", "'int4' is none of 'int8', 'bfloat16', 'cpu'"),
        ("muon", "int8 int8", "is none of"),
        ("muon", {1: "int8"}, "is neither a text nor texts by patterns"),
        ("adamw", {"exp_avg_sq": "int8"}, "'exp_avg_sq' cannot be stored as int8: the step divides by it"),
        ("shampoo", {"left": "int8"}, "'left' cannot be stored as int8: the step divides by it"),
    ],
)
def test_what_cannot_be_stored(name: str, state: Any, words: str) -> None:
    def tried() -> None:
        optimizer = canzona_compile.wrap(MAKERS[name](parameters(SHAPES)), state=state)
        fed(params_of(optimizer), 0)
        optimizer.step()

    with pytest.raises(CanzonaError) as caught:
        tried()
    assert words in str(caught.value)


def test_a_pattern_of_a_command_counts_once() -> None:
    with pytest.raises(CanzonaError, match="--state has 'exp_avg' twice"):
        parse_state("exp_avg=int8,momentum_buffer=cpu,exp_avg=cpu")


def test_codes_need_a_captured_step() -> None:
    def tried() -> None:
        optimizer = canzona_compile.wrap(HostReading(parameters([(6, 8)]), lr=0.1), state={"average": "int8"})
        fed(params_of(optimizer), 0)
        optimizer.step()

    with pytest.raises(CanzonaError, match="its step runs eagerly"):
        tried()


def cut_codes(case: Case) -> str:
    """What an elementwise update, which no owner computes, says of codes that no fragment can keep."""
    pair = Pair(MAKERS["adamw"], ((8, 200),), case, state=ADAM)
    with pytest.raises(CanzonaError) as caught:
        pair.go(1)
    return str(caught.value)


def test_codes_of_elementwise_updates_are_not_cut() -> None:
    for said in run(2, cut_codes, Case("tp_columns", (2,))):
        assert "'exp_avg' cannot be stored as int8: ranks hold parts of its blocks" in said


def test_what_round_state_takes() -> None:
    optimizer = MAKERS["muon"](parameters(SHAPES))
    with pytest.raises(CanzonaError, match="the optimizer is wrapped"):
        canzona_compile.round_state(canzona_compile.wrap(MAKERS["muon"](parameters(SHAPES))), "int8")
    with pytest.raises(CanzonaError, match=r"takes a torch.optim.Optimizer, not a int"):
        canzona_compile.round_state(3, "int8")  # type: ignore[arg-type]
    canzona_compile.round_state(optimizer, "int8")
    fed(params_of(optimizer), 0)
    optimizer.step()
    optimizer.add_param_group({"params": parameters([(8, 20)])})  # which is rounded, too
    fed(params_of(optimizer), 1)
    optimizer.step()
    for param in params_of(optimizer):
        momentum = optimizer.state[param]["momentum_buffer"]
        assert torch.equal(rounded(momentum, storage_of("int8")), momentum)


def prepared_by_dcp(_: int) -> list[str]:
    """torch.distributed.checkpoint takes a step to make state, of each optimizer of a chain alone."""
    whole = model()
    fully_shard(whole, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    state = {"momentum_buffer": "int8", "exp_avg*": "bfloat16"}
    optimizer = canzona_compile.muon_adamw(whole, lr=0.01, state=state)
    get_optimizer_state_dict(whole, optimizer)
    fed(whole.parameters(), 0)
    optimizer.step()
    return []


def test_state_that_a_checkpoint_prepares() -> None:
    assert run(2, prepared_by_dcp, 0) == [[], []]


def disagreeing(name: str) -> str:
    state = "bfloat16" if dist.get_rank() else "cpu"
    pair = Pair(MAKERS[name], SHAPES, Case("fsdp", (2,)), state=state, captures_anew=True)
    found = attempt(lambda: pair.go(1))
    return found.error + found.said


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_ranks_that_disagree(name: str) -> None:
    for said in run(2, disagreeing, name):
        assert said.startswith("RankMismatch")
        assert "state" in said
