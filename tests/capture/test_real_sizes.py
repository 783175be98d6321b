"""Steps at the real sizes of parameters, on tensors that have fingerprints in place of values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from canzona_compile.rehearsal import declared_writes, fingerprints
from canzona_compile.rehearsal.fingerprints import Fingerprints
from canzona_compile.rehearsal.real_sizes import casts, coupled_at_real_sizes, taken
from canzona_compile.rehearsal.rehearsal import default_names, rehearse
from canzona_compile.replica.raised import Note
from tests.harness.toy_optimizers import PerParameter, State, cube
from tests.harness.traps import NAMED, grammar
from tests.harness.traps.sizes import BIG
from tests.harness.traps.sizes import coupled as dividing
from tests.harness.traps.trap import Params

Make = Callable[[Params], Optimizer]


def huge(*shapes: tuple[int, ...]) -> Params:
    """Parameters of any size that lie in one element."""
    return [nn.Parameter(torch.zeros(()).expand(shape)) for shape in shapes]


def coupled(make: Make, params: Params) -> str:
    """The parameter that depends on others at real sizes; empty if there is none."""
    optimizer = make(params)
    return coupled_at_real_sizes(optimizer, default_names(optimizer))


BLOCKS = NAMED["blocks-of-16-rows"].make
HUGE = ((50_000, 20_000), (20_000, 50_000), (50_000, 20_000), (50_000,))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: SGD(params, lr=0.1, momentum=0.9),
        AdamW,
        lambda params: AdamW(params, foreach=True, amsgrad=True),
        lambda params: AdamW(params, foreach=False, capturable=False),
        BLOCKS,
        lambda params: NAMED["diagonal-from-32-rows"].make(params[:3]),
        lambda params: Muon(params[:3]),
    ],
    ids=["sgd", "adamw", "adamw-foreach", "adamw-loops", "blocks", "diagonal", "muon"],
)
def test_sizes_that_no_memory_holds_are_stepped(make: Make) -> None:
    shapes = HUGE if make is not BLOCKS else ((640, 200), (200, 640))
    assert coupled(make, huge(*shapes)) == ""


# Couples matrices that are too large to be tried with values.
FROM_MILLIONS = grammar.optimizer("from-millions", **dividing("param.numel() > 500_000_000"))


def test_coupling_from_a_size_that_no_memory_holds_is_named() -> None:
    assert coupled(FROM_MILLIONS, huge(*HUGE[:3])) == "group0.param0"
    assert coupled(FROM_MILLIONS, huge((5_000, 2_000), (2_000, 5_000))) == ""


class Stacks(PerParameter):
    """Steps equal shapes as one stack, and divides large ones by what all of them have."""

    def __init__(self, params: Params, most: float) -> None:
        super().__init__(params)
        self.most = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = group["params"]
            updates = torch.stack([p.grad for p in params])
            scale = updates.abs().amax() if params[0].numel() > self.most else 1.0
            for param, update in zip(params, (updates / scale).unbind(), strict=True):
                param.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize(("most", "found"), [(math.inf, ""), (1000, "group0.param0")], ids=["never", "from a size"])
def test_of_stacks_the_calls_are_those_of_a_miniature(most: float, found: str) -> None:
    assert coupled(lambda params: Stacks(params, most), huge((40, 30), (40, 30))) == found


class Scales(PerParameter):
    """Computes the norm of all gradients always, and large matrices are divided by it."""

    def __init__(self, params: Params, most: float) -> None:
        super().__init__(params)
        self.most = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        norm = float(torch.stack([p.grad.norm() for p in params]).norm())
        for param in params:
            scale = norm if param.numel() > self.most else 1.0
            param.sub_(cube(param.grad), alpha=0.1 / scale)


@pytest.mark.parametrize(("most", "found"), [(math.inf, ""), (1000, "group0.param0")], ids=["never", "from a size"])
def test_numbers_that_are_read_count_where_they_are_used(most: float, found: str) -> None:
    assert coupled(lambda params: Scales(params, most), huge((40, 30), (40, 30))) == found


# Couples once a group has many elements; most of its matrices are small.
OF_MANY = grammar.optimizer("of-many", **dividing('sum(p.numel() for p in group["params"]) > 500'))


def test_parameters_beyond_those_that_step_are_there() -> None:
    assert coupled(OF_MANY, huge(*[(5, 6)] * 40)) == "group0.param0"


def test_what_is_read_as_an_array_is_not_tried_at_real_sizes() -> None:
    """A limit, which the documentation names."""
    norm = "math.sqrt(sum(float((p.grad.numpy() ** 2).sum()) for p in params))"
    by_array = grammar.optimizer("by-array", **dividing(BIG, norm))
    assert coupled(by_array, huge((40, 30), (40, 30))) == ""


class Loops(PerParameter):
    """Waits for a number that does not come."""

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        while grad.norm().item() < 1e9:
            grad = grad + 1


def test_a_loop_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "MOST_CALLS", 200)
    optimizer = Loops(huge((40, 30)))
    found, _ = taken(casts(optimizer, False)[0], Fingerprints(Note()))
    assert type(found.error).__name__ == "TooLong"


class ManyCalls(PerParameter):
    """Steps all parameters by many calls for lists, which are as many calls for each apart."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        updates = torch._foreach_mul([p.grad for p in params], 0.1)
        for _ in range(20):
            torch._foreach_mul_(updates, 0.9)
        torch._foreach_sub_(params, updates)


def test_what_is_too_long_to_be_compared_is_not_called_coupled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "MOST_CALLS", 100)
    params = huge(*[(40, 30)] * 4)
    whole, _ = taken(casts(ManyCalls(params), False)[0], Fingerprints(Note()))
    assert whole.error is None
    assert coupled(ManyCalls, params) == ""


@pytest.mark.parametrize(("make", "most"), [(Muon, 1200), (AdamW, 400)], ids=["muon", "adamw"])
def test_few_operators_are_called_however_many_parameters_there_are(make: Make, most: int) -> None:
    """Each takes a tenth of a millisecond, and a rehearsal is not to take much longer by that."""
    optimizer = make(huge(*[(4096, 1024), (1024, 4096)] * 100))
    _, prints = taken(casts(optimizer, False)[0], Fingerprints(Note()))
    assert len(prints.called) < most


def test_a_rehearsal_leaves_the_optimizer_and_its_values_alone() -> None:
    params = [nn.Parameter(torch.randn(40, 30)) for _ in range(2)]
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params)
    rehearse(optimizer)
    assert not optimizer.state
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(params, before, strict=True))


class DrawsNoise(PerParameter):
    """Draws into a tensor with values, for large matrices."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.noise = torch.zeros(4)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        if param.numel() > 1000:
            self.noise.normal_()
        param.sub_(cube(grad) * group["lr"])


def test_draws_of_a_trial_are_none_of_the_process() -> None:
    optimizer = DrawsNoise(huge((40, 30), (40, 30)))
    before = torch.get_rng_state()
    coupled_at_real_sizes(optimizer, default_names(optimizer))
    assert torch.equal(torch.get_rng_state(), before)


@torch.library.custom_op("canzona_tests::by_table", mutates_args=("param", "table"))
def by_table(param: Tensor, grad: Tensor, table: Tensor, rate: float) -> None:
    """Step by the entries of a table. That it writes the table is declared, but true of a rate below zero only."""
    param.sub_(grad.sign() * table.mean() * abs(rate))
    if rate < 0:
        table.add_(grad.abs().mean())


@by_table.register_fake
def _(param: Tensor, grad: Tensor, table: Tensor, rate: float) -> None:
    return None


class ByTable(PerParameter):
    """Steps by an operator that declares to write what all parameters share."""

    def __init__(self, params: Params, rate: float) -> None:
        super().__init__(params)
        self.rate, self.table = rate, torch.linspace(0, 1, 256)

    def update(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: State) -> None:
        by_table(param, grad, self.table, self.rate)


@pytest.fixture
def overstated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of `by_table` is one whose operators are known to declare too much."""
    monkeypatch.setattr(declared_writes, "OVERSTATED", {"canzona_tests"})


@pytest.mark.usefixtures("overstated")
def test_what_is_declared_to_be_written_and_is_not_couples_nothing() -> None:
    matrices = [nn.Parameter(torch.zeros(64, 48)), nn.Parameter(torch.zeros(48, 64))]
    assert coupled(lambda params: ByTable(params, 0.1), matrices) == ""
    assert coupled(lambda params: ByTable(params, -0.1), matrices) == "group0.param0"


def test_operators_of_unknown_packages_write_what_they_declare() -> None:
    matrices = [nn.Parameter(torch.zeros(64, 48)), nn.Parameter(torch.zeros(48, 64))]
    assert coupled(lambda params: ByTable(params, 0.1), matrices) == "group0.param0"


@pytest.mark.usefixtures("overstated")
def test_a_declared_call_that_is_too_large_to_be_made_couples() -> None:
    assert coupled(lambda params: ByTable(params, 0.1), huge((50_000, 20_000), (20_000, 50_000))) == "group0.param0"
    mixed = huge((50_000, 20_000), (20, 50))
    assert coupled(lambda params: ByTable(params, 0.1), mixed) == ""  # the small call speaks for the large one
