"""Several logical matrices in one parameter: the bits of an optimizer that has each of them as a parameter.

The oracle holds q, k, v, ... apart, in plain parameters in one process.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

import canzona_compile
from canzona_compile import CanzonaError, Split
from canzona_compile.ir.split import rows_of
from examples.optimizers.normuon import NorMuon
from examples.optimizers.soap import SOAP
from tests.harness.layouts import ALONE, Case, Laid, full, replicate_of
from tests.harness.marks import crossed, first, only
from tests.harness.optimizers import StackMuon, share_captures
from tests.harness.pairs import Pair, feed, parameters, params_of, same_bits
from tests.harness.ranks import do_alone, run
from tests.harness.toy_optimizers import HostReading
from tests.harness.traps.grammar import toy

Splits = Mapping[str, Split | Mapping[str, int]]
STEPS = 6
NAMES = ("attention.qkv", "mlp.gate_up", "mlp.down")
SHAPES = ((32, 16), (40, 16), (16, 20))
BLOCK: Splits = {"*.qkv": {"q": 16, "k": 8, "v": 8}, "*.gate_up": Split({"gate": 20, "up": 20})}
SPLITS: dict[str, Splits] = {
    "block": BLOCK,
    "interleaved": {
        "*.qkv": Split({"q": 16, "k": 8, "v": 8}, interleaved=4),
        "*.gate_up": Split({"gate": 20, "up": 20}, interleaved=2),
    },
    "heads": {"*.qkv": Split({"q": 16, "k": 8, "v": 8}, head=4), "*.gate_up": {"gate": 20, "up": 20}},
    "uneven": {"*.qkv": {"q": 15, "k": 15, "v": 2}, "*.gate_up": {"gate": 15, "up": 25}},
    "any order": {
        "*.qkv": Split({"q": 16, "k": 8, "v": 8}, order=torch.randperm(32, generator=torch.Generator().manual_seed(1)))
    },
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1, adjust_lr_fn="match_rms_adamw"),
    "normuon": lambda params: NorMuon(params, lr=0.1),
    "soap": lambda params: SOAP(params, lr=0.1, every=3),
    "interpreted": lambda params: HostReading(params, lr=0.1),
    "stack": lambda params: StackMuon(params, lr=0.1),
}


def apart(splits: Splits, name: str, weight: Tensor) -> list[Tensor]:
    """The logical matrices in a weight."""
    for pattern, split in splits.items():
        if name.endswith(pattern.removeprefix("*")):
            made = split if isinstance(split, Split) else Split(split)
            return [weight.index_select(made.dim, rows) for rows in rows_of(made).values()]
    return [weight]


class Both(Pair):
    """The wrapped optimizer of fused parameters on this rank, and the plain one of their parts."""

    def __init__(
        self, make: str, splits: Splits, case: Case | None, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any
    ) -> None:
        self.splits, self.shapes, self.names = splits, tuple(shapes), NAMES[: len(shapes)]
        self.options = {"split": splits, "replicate": case and replicate_of(case), **options}
        self.laid = Laid([param.detach() for param in parameters(self.shapes)], case or ALONE)
        self.plain = OPTIMIZERS[make]([nn.Parameter(part.clone()) for part in self.parts(parameters(self.shapes))])
        self.wrapped = self.wrap_one(make)
        self.number = 0

    def parts(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The logical matrices in tensors like the parameters."""
        pairs = zip(self.names, wholes, strict=True)
        return [part for name, whole in pairs for part in apart(self.splits, name, whole.detach())]

    def wrap_one(self, make: str) -> Any:
        named = {"params": self.laid.params, "param_names": list(self.names)}
        made = canzona_compile.wrap(OPTIMIZERS[make]([named]), **self.options)
        share_captures(made)
        return made

    def feed(self, *_missing: int) -> None:
        grads = parameters(self.shapes, seed=1000 + self.number)
        for param, part in zip(params_of(self.plain), self.parts(grads), strict=True):
            param.grad = part
        for i, param in enumerate(self.laid.params):
            param.grad = self.laid.like_param(grads[i].detach(), i)

    def different(self) -> list[str]:
        """What of the fused parameters, and of the state of their pieces, is not that of the plain ones."""
        found, left = [], iter(params_of(self.plain))
        state = self.wrapped.state_dict()["state"]
        for i, (name, param) in enumerate(zip(self.names, self.laid.params, strict=True)):
            own = {key: full(v) if isinstance(v, Tensor) else v for key, v in state[i].items()}
            for piece, part in zip(self.piece_names(name), apart(self.splits, name, full(param)), strict=True):
                expected = next(left)
                if not same_bits(part, expected.detach()):
                    found.append(f"{name}[{piece}]")
                for leaf, value in self.plain.state[expected].items():
                    if not any(same_bits(v, value) for v in self.candidates(own, name, piece, leaf)):
                        found.append(f"{leaf} of {name}[{piece}]")
        return found

    def piece_names(self, name: str) -> list[str]:
        split = next((s for p, s in self.splits.items() if name.endswith(p.removeprefix("*"))), None)
        return [""] if split is None else list(rows_of(split if isinstance(split, Split) else Split(split)))

    def candidates(self, state: dict[str, Any], name: str, piece: str, leaf: str) -> list[Any]:
        """Where the saved state may have a leaf of a piece: under its name, or in its rows of a fused tensor."""
        if f"{piece}.{leaf}" in state:
            return [state[f"{piece}.{leaf}"]]
        value = state[leaf]
        return [apart(self.splits, name, value)[self.piece_names(name).index(piece)] if piece else value]


def train_on_ranks(make: str, splits: Splits, case: Case, **options: Any) -> list[dict[str, Any]]:
    """`train` on all ranks; what they share is captured once, before."""
    shapes = {"shapes": options["shapes"]} if "shapes" in options else {}
    return run(case.world, train, make, splits, case, after=alone(make, splits, **shapes), **options)


def alone(make: str, splits: Splits, **options: Any) -> partial[Any]:
    return partial(train, make, splits, None, restored=True, **options)


def train(make: str, splits: Splits, case: Case | None, restored: bool = False, **options: Any) -> dict[str, Any]:
    both = Both(make, splits, case, **options)
    for step in range(STEPS):
        if restored and step == STEPS // 2:
            both.wrapped.load_state_dict(both.wrapped.state_dict())
        both.go(1)
    both.check()
    report: dict[str, Any] = both.wrapped.canzona.report().to_dict()
    return report


@pytest.mark.parametrize(
    ("make", "splits"),
    [
        *only([("muon", "block"), ("muon", "any order")], ["muon", "soap"], list(SPLITS)),
        pytest.param("normuon", "block", marks=pytest.mark.full),
        ("interpreted", "heads"),
    ],
)
def test_in_one_process(make: str, splits: str) -> None:
    do_alone(alone(make, SPLITS[splits]))


CASES = [
    Case("fsdp", (3,)),
    Case("tp_rows", (2,)),
    Case("tp_columns", (2,)),
    Case("hsdp", (2, 2)),
    Case("fsdp_tp", (2, 2)),
    Case("ddp", (2,)),
]


@pytest.mark.parametrize(
    ("make", "case"),
    only([("muon", CASES[0]), ("muon", CASES[4])], ["muon", "soap"], CASES),
    ids=str,
)
def test_on_ranks(make: str, case: Case) -> None:
    splits = {"muon": "interleaved", "soap": "block"}[make]
    reports = train_on_ranks(make, SPLITS[splits], case, restored=True, strategy="owner")
    owners = {task["name"]: task["owner"] for task in reports[0]["tasks"]}
    assert owners.keys() == {
        *(f"{NAMES[0]}[{p}]" for p in "qkv"),
        *(f"{NAMES[1]}[{p}]" for p in ("gate", "up")),
        NAMES[2],
    }
    assert len(set(map(str, owners.values()))) == case.world, "pieces of one parameter have owners of their own"


@pytest.mark.parametrize(
    ("make", "splits", "layout"),
    [
        pytest.param("soap", "heads", "fsdp", marks=pytest.mark.full),
        ("muon", "uneven", "tp_rows"),
        pytest.param("normuon", "any order", "tp_columns", marks=pytest.mark.full),
    ],
)
def test_other_splits_on_ranks(make: str, splits: str, layout: str) -> None:
    train_on_ranks(make, SPLITS[splits], Case(layout, (2,)))


@pytest.mark.parametrize("layout", first(["fsdp", "ddp"]))
def test_interpreted_on_ranks(layout: str) -> None:
    train_on_ranks("interpreted", BLOCK, Case(layout, (2,)))


@pytest.mark.full
@pytest.mark.parametrize("layout", first(["stack_dim0", "stack_dim1", "stack_dim2"]))
def test_gate_and_up_of_a_stack_of_experts(layout: str) -> None:
    splits = {"*.qkv": Split({"gate": 32, "up": 64}, dim=1)}
    reports = train_on_ranks("stack", splits, Case(layout, (2,)), shapes=[(6, 96, 48)], strategy="owner")
    assert {task["strategy"] for task in reports[0]["tasks"]} == {"local" if layout == "stack_dim0" else "owner"}


# -- checkpoints -------------------------------------------------------------------------------


def save(make: str, layout: str) -> tuple[list[Tensor], dict[str, Any]]:
    both = Both(make, BLOCK, Case(layout, (2,)))
    both.go(4)
    saved = both.wrapped.state_dict()
    state = {i: {k: full(v) if isinstance(v, Tensor) else v for k, v in s.items()} for i, s in saved["state"].items()}
    return [full(p) for p in both.laid.params], {**saved, "state": state}


def load(make: str, params: list[Tensor], saved: dict[str, Any]) -> list[str]:
    both = Both(make, BLOCK, None)
    both.go(4)
    with torch.no_grad():
        for param, value in zip(both.laid.params, params, strict=True):
            param.copy_(value)
    both.wrapped = both.wrap_one(make)
    both.wrapped.load_state_dict(saved)
    both.go(4)
    return both.different()


@pytest.mark.parametrize(("make", "layout"), crossed(["muon", "soap"], ["fsdp", "ddp"], most=1))
def test_saved_on_ranks_and_loaded_in_one_process(make: str, layout: str) -> None:
    captured = alone(make, BLOCK)
    params, saved = run(2, save, make, layout, after=captured)[0]
    assert run(1, load, make, params, saved, group=False, after=captured) == [[]]


def state_to_plain_and_back() -> None:
    both = Both("muon", BLOCK, None)
    both.go(1)
    plain = OPTIMIZERS["muon"]([nn.Parameter(p.detach().clone()) for p in both.laid.params])
    plain.load_state_dict(canzona_compile.unwrap(both.wrapped).state_dict())
    both.wrapped = both.wrap_one("muon")
    both.wrapped.load_state_dict(plain.state_dict())
    both.go(1)
    both.check()


def test_state_shaped_like_the_parameter_goes_to_the_plain_optimizer_and_back() -> None:
    do_alone(partial(state_to_plain_and_back))


@pytest.mark.full
def test_state_of_the_fused_matrix_is_refused() -> None:
    both = Both("soap", {}, None)
    both.go(1)
    fused = both.wrapped.state_dict()
    both.options["split"] = BLOCK
    other = both.wrap_one("soap")
    other.load_state_dict(fused)
    with pytest.raises(
        CanzonaError, match=r"'left' of shape \[32, 32\] cannot be split like its parameter(.|\n)*attention.qkv"
    ):
        other.step()


# -- around it ---------------------------------------------------------------------------------


def test_names_from_the_model() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(16, 32, bias=False), "out": nn.Linear(16, 16, bias=False)})
    optimizer = canzona_compile.wrap(Muon(model.parameters(), lr=0.1), model=model, split={"qkv.*": {"a": 16, "b": 16}})
    names = [row.name for row in canzona_compile.explain(optimizer).parameters]
    assert names == ["qkv.weight[a]", "qkv.weight[b]", "out.weight"]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [task["name"] for task in optimizer.canzona.report().to_dict()["tasks"]] == names


def miss_a_gradient() -> None:
    both = Both("soap", BLOCK, None)
    both.go(1)
    qkv, *_ = both.laid.params
    before = qkv.detach().clone()
    for param in both.laid.params[1:]:
        param.grad = torch.zeros_like(param)
    qkv.grad = None
    both.wrapped.step()
    assert torch.equal(before, qkv)


def test_a_missing_gradient_is_missing_for_every_piece() -> None:
    do_alone(partial(miss_a_gradient))


# An elementwise step at a rate that depends on the shape.
ScaledSign = toy("scaled-sign")("""
    param.sub_(grad.sign(), alpha=group["lr"] * (param.shape[0] / param.shape[1]) ** 0.5)
""")


# An elementwise step at an integer that depends on the shape.
CountedSign = toy("counted-sign")("param.sub_(grad.sign() * param.shape[0])")


@pytest.mark.parametrize("kind", [ScaledSign, CountedSign])
def test_elementwise_work_that_depends_on_the_shape_sees_the_pieces(kind: type[Optimizer]) -> None:
    parts = parameters([(4, 4)] * 3)
    fused = nn.Parameter(torch.cat([part.detach() for part in parts]))
    plain, wrapped = kind(parts), canzona_compile.wrap(kind([("qkv", fused)]), split={"qkv": {"q": 4, "k": 4, "v": 4}})
    for step in range(3):
        feed(plain, step)
        fused.grad = torch.cat([part.grad for part in parts])
        plain.step()
        wrapped.step()
    assert same_bits(torch.cat([part.detach() for part in parts]), fused)


def go_on_in_copies(make: str) -> None:
    both = Both(make, SPLITS["interleaved"], None)
    both.go(2)
    assert canzona_compile.wrap(both.wrapped, split=SPLITS["interleaved"]) is both.wrapped
    copies = [copy.deepcopy(both.wrapped), pickle.loads(pickle.dumps(both.wrapped))]
    for other in copies:
        share_captures(other)
    both.go(1)
    for other in copies:
        for mine, param in zip(params_of(other), both.laid.params, strict=True):
            assert param.grad is not None
            mine.grad = param.grad.clone()
        other.step()
        pairs = zip(params_of(other), both.laid.params, strict=True)
        assert all(same_bits(mine.detach(), param.detach()) for mine, param in pairs)
    both.check()


@pytest.mark.full
@pytest.mark.parametrize("make", first(["muon", "soap"]))
def test_copies_go_on_alike(make: str) -> None:
    do_alone(partial(go_on_in_copies, make))


def move() -> None:
    both = Both("muon", BLOCK, None)
    both.go(1)
    for param in both.laid.params:
        param.data = param.data.clone()
    both.go(1)
    both.check()


def test_a_parameter_that_moves_keeps_its_pieces() -> None:
    """Frameworks give a parameter other memory between steps: `model.to()`, offloading."""
    do_alone(partial(move))
