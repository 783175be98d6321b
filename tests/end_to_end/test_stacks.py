"""Stacks of matrices: our optimizers step each of them as if it were alone, Muon as torch's does, on ranks too."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from canzona_compile import CanzonaError, Split, muon_adamw, optimizer_for, wrap
from canzona_compile.errors import UnsupportedOptimizer
from canzona_compile.ir.printer import show
from canzona_compile.optimizers import KLSOAP, SOAP, KLShampoo, Muon, NorMuon, Shampoo
from tests.harness.layouts import Case, mesh_of
from tests.harness.layouts import full as gathered
from tests.harness.marks import also, crossed, first
from tests.harness.pairs import Pair, parameters
from tests.harness.ranks import do_alone, run
from tests.harness.training import Training, check, on_ranks
from tests.harness.traps.grammar import toy

ODD = ((5, 17, 31), (2, 31, 17), (3, 24, 24))  # dims for which a batched product rounds otherwise
EVEN = ((8, 64, 32), (6, 32, 48), (3, 48, 48))
DTYPES = [torch.float32, torch.bfloat16]


def nothing(optimizer: Any) -> Any:
    return lambda step: None


MUON = partial(Muon, lr=0.02)
OTHERS: dict[str, Any] = {kind.__name__: partial(kind, every=2) for kind in (SOAP, KLSOAP, Shampoo, KLShampoo)}
OTHERS["NorMuon"] = NorMuon
TRAININGS = {
    name: Training(kind, shapes, steps=5, schedule=nothing, sizes=(0.1, 1e-3))
    for name, (kind, shapes) in {
        **{"odd": (MUON, ODD), "even": (MUON, EVEN), "one": (MUON, EVEN[:1])},
        **{name: (kind, EVEN) for name, kind in OTHERS.items()},
        "one of SOAP": (OTHERS["SOAP"], EVEN[:1]),
    }.items()
}


# -- the plain optimizer ---------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.5, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(24, 16), (5, 17, 31), (2, 3, 31, 17)], ids=str)
def test_each_matrix_gets_the_bits_of_torch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    (whole,), (own,) = parameters([shape]), parameters([shape])
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in own.detach().flatten(0, -3)] if own.ndim > 2 else [own]
    ours, torchs = Muon([whole], **options), torch.optim.Muon(alone, **options)
    for step in range(4):
        whole.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for param, grad in zip(alone, whole.grad.flatten(0, -3) if whole.ndim > 2 else [whole.grad], strict=True):
            param.grad = grad.clone()
        ours.step()
        torchs.step()
    found = whole.detach().flatten(0, -3) if whole.ndim > 2 else whole.detach()[None]
    assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("kind", OTHERS)
def test_each_matrix_steps_as_if_it_were_alone(kind: str, dims: int) -> None:
    """Of a stack, or of a stack of convolutions; so does its state."""
    (whole,), (own,) = parameters([(2, 8, 6, 2, 2)]), parameters([(2, 8, 6, 2, 2)])
    lead = whole.ndim - dims
    alone = [nn.Parameter(one.reshape(one.shape[0], -1).clone()) for one in own.detach().flatten(0, lead - 1)]
    together = OTHERS[kind]([{"params": [whole], "matrix_dims": dims}])
    apart = OTHERS[kind](alone)
    for step in range(5):
        whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
        for param, grad in zip(alone, whole.grad.flatten(0, lead - 1), strict=True):
            param.grad = grad.reshape(param.shape).clone()
        together.step()
        apart.step()
    assert torch.equal(whole.detach().reshape(-1, *alone[0].shape), torch.stack([*alone]).detach())
    for name, value in together.state[whole].items():
        ones = [apart.state[param][name] for param in alone]
        if not isinstance(value, torch.Tensor):
            assert ones == [value] * len(ones)
        elif ones[0].shape == alone[0].shape:
            assert value.shape == whole.shape
            assert torch.equal(value.reshape(-1, *ones[0].shape), torch.stack(ones))
        else:
            assert torch.equal(value.flatten(0, lead - 1), torch.stack(ones))


@pytest.mark.parametrize("kind", [partial(MUON, adjust_lr_fn="original"), *OTHERS.values()], ids=["Muon", *OTHERS])
@pytest.mark.parametrize("shape", [(16, 24), (2, 24, 16), (2, 16, 16)], ids=str)
def test_matrices_whose_rows_are_inputs_are_stepped_transposed(shape: tuple[int, ...], kind: Any) -> None:
    (own,), (turned,) = parameters([shape]), parameters([shape])
    plain = nn.Parameter(own.detach().mT.clone(memory_format=torch.contiguous_format))
    ours, theirs = kind([{"params": [turned], "rows_are_inputs": True}]), kind([plain])
    for step in range(5):
        turned.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        plain.grad = turned.grad.mT.clone(memory_format=torch.contiguous_format)
        ours.step()
        theirs.step()
    torch.testing.assert_close(turned.detach().mT, plain.detach(), rtol=2e-3, atol=2e-4)
    alike = [name for name, value in ours.state[turned].items() if name in ("exp_avg", "momentum_buffer")]
    assert all(ours.state[turned][name].shape == shape for name in alike)


def test_gpt_2_under_fsdp_is_stepped_transposed() -> None:
    run(2, conv1d, after=partial(conv1d))


def conv1d() -> None:
    """A line that tells sides apart finds weights [inputs, outputs] by their class."""
    transformers = pytest.importorskip("transformers")
    made = [nn.Sequential(transformers.pytorch_utils.Conv1D(48, 16), nn.Linear(48, 4, bias=False)) for _ in range(2)]
    own, plain = made
    plain.load_state_dict(own.state_dict())
    if dist.is_initialized():
        fully_shard(own, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    optimizer = optimizer_for(own, partial(NorMuon, lr=0.1), partial(torch.optim.AdamW, lr=0.1))
    weight = plain[0].weight
    expected = NorMuon([{"params": [weight], "rows_are_inputs": True}], lr=0.1)
    for step in range(3):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        for param in own.parameters():
            param.grad = torch.zeros_like(param)
        grad: Any = own[0].weight.grad
        if isinstance(grad, DTensor):
            grad.copy_(distribute_tensor(weight.grad, grad.device_mesh, grad.placements, src_data_rank=None))
        else:
            grad.copy_(weight.grad)
        optimizer.step()
        expected.step()
    assert torch.equal(gathered(own[0].weight), weight.detach())
    assert [group.get("rows_are_inputs", False) for group in optimizer.param_groups] == [False, True, False]


@pytest.mark.parametrize("kind", ["SOAP", "NorMuon"])
def test_state_of_a_convolution_may_be_in_channels_last(kind: str) -> None:
    (one,), (other,) = parameters([(8, 3, 3, 2)]), parameters([(8, 3, 3, 2)])
    both = [OTHERS[kind]([{"params": [param], "matrix_dims": 4}]) for param in (one, other)]
    for step in range(4):
        for param, optimizer in zip((one, other), both, strict=True):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        for name, value in both[1].state[other].items() if step == 1 else ():
            if isinstance(value, torch.Tensor) and value.ndim == 4:
                both[1].state[other][name] = value.to(memory_format=torch.channels_last)
    assert torch.equal(one, other)


SHARED: tuple[tuple[int, ...], ...] = ((5, 16, 24), (1, 24, 16), (4, 24, 24), (16, 24))
PLACES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "entries": ((2,), [Shard(0)]),
    "entries, cut": ((2, 2), [Shard(0), Shard(1)]),
    "cut": ((2,), [Shard(1)]),
}


class Beside:
    """SOAP of some stacks and a matrix in a layout, which several sets of ranks share, beside the plain one."""

    def __init__(self, places: str) -> None:
        sizes, self.placements = PLACES[places]
        self.mesh = mesh_of(sizes, ("a", "b")[: len(sizes)])
        self.plain = [nn.Parameter(one.detach().clone()) for one in parameters(list(SHARED))]
        self.own = [nn.Parameter(self.laid(one.detach())) for one in self.plain]
        makers = [partial(OTHERS["SOAP"], [(f"p{i}", p) for i, p in enumerate(own)]) for own in (self.plain, self.own)]
        self.expected, self.wrapped = makers[0](), wrap(makers[1]())

    def laid(self, value: torch.Tensor) -> DTensor:
        """The matrix is shared by all ranks."""
        every = self.placements if value.ndim > 2 else [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        return distribute_tensor(value.clone(), self.mesh, every, src_data_rank=None)

    def step(self, number: int, without: int | None = None) -> None:
        for i, (plain, own) in enumerate(zip(self.plain, self.own, strict=True)):
            grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(10 * number + i))
            plain.grad, own.grad = (None, None) if i == without else (grad, self.laid(grad))
        self.expected.step()
        self.wrapped.step()

    def different(self) -> list[str]:
        pairs = zip(self.plain, self.own, strict=True)
        found = [str(i) for i, (plain, own) in enumerate(pairs) if not torch.equal(gathered(own), plain.detach())]
        state = self.wrapped.state_dict()["state"]
        for i, own in self.expected.state_dict()["state"].items():
            for name, value in own.items():
                saved = state[i][name]
                if not alike(gathered(saved) if isinstance(saved, DTensor) else saved, value):
                    found.append(f"{i} {name}")
        return found


def alike(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


def plain_state(places: str) -> tuple[list[str], list[str]]:
    """Load what a plain optimizer has saved; what differs then, and the classes of what ranks save."""
    beside = Beside(places)
    for step in range(6):
        if step == 3:
            beside.wrapped.load_state_dict(copy.deepcopy(beside.expected.state_dict()))
        beside.step(step)
    saved = beside.wrapped.state_dict()["state"]
    kinds = [f"{i} {name} {type(value).__name__}" for i, own in saved.items() for name, value in own.items()]
    return beside.different(), kinds


@pytest.mark.parametrize("places", first(["entries, cut", "entries", "cut"]))
def test_plain_state_goes_into_entries_of_ranks(places: str) -> None:
    ranks = math.prod(PLACES[places][0])
    told = run(ranks, plain_state, places)
    assert [different for different, _ in told] == [[]] * ranks
    assert len({tuple(kinds) for _, kinds in told}) == 1


def without_gradients() -> list[str]:
    """A stack has no gradient on any rank for a step, whose matrices have other names on other ranks."""
    beside = Beside("entries, cut")
    for step in range(5):
        beside.step(step, without=0 if step in (2, 3) else None)
    return beside.different()


def test_a_stack_without_a_gradient_on_all_ranks() -> None:
    assert run(4, without_gradients) == [[]] * 4


@pytest.mark.parametrize("kind", OTHERS)
def test_a_stack_of_no_matrices_counts_its_steps(kind: str) -> None:
    """As one of some does, so that ranks with entries and ranks with none stay alike."""
    none, one = nn.Parameter(torch.ones(0, 4, 6)), nn.Parameter(torch.ones(1, 4, 6))
    optimizer = OTHERS[kind]([none, one])
    for _ in range(3):
        for param in (none, one):
            param.grad = torch.ones_like(param)
        optimizer.step()
    shapes = {name: (0, *value.shape[1:]) for name, value in optimizer.state[one].items() if hasattr(value, "shape")}
    assert {name: tuple(value.shape) for name, value in optimizer.state[none].items() if name in shapes} == shapes
    assert optimizer.state[none].get("step") == optimizer.state[one].get("step")


@pytest.mark.parametrize("kind", [MUON, *OTHERS.values()], ids=["Muon", *OTHERS])
def test_a_vector_in_a_later_group_is_refused(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 3, 3))])
    with pytest.raises(ValueError, match=r"not shape \[5\]"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
    with pytest.raises(ValueError, match="matrix_dims='x' is not an integer"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5, 5))], "matrix_dims": "x"})
    assert len(optimizer.param_groups) == 1


def test_vectors_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not shape \[3\]"):
        Muon([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="Learning rate"):
        Muon([torch.nn.Parameter(torch.ones(2, 3, 3))], lr=-1.0)


@pytest.mark.parametrize("form", [torch.channels_last, *also([torch.contiguous_format])])
def test_convolutions_are_one_matrix(form: torch.memory_format) -> None:
    do_alone(partial(convolutions, form))
    run(2, convolutions, form, after=partial(convolutions, form))


def convolutions(form: torch.memory_format) -> None:
    """That `matrices=` names: [outputs, all else], as torch's Muon steps the flattened weight, wherever that lies."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 16), nn.Linear(16, 4))
        return made.to(memory_format=form)

    plain, own = model(), model()
    replicate = None
    if dist.is_initialized() and form is torch.contiguous_format:  # FSDP2 takes no other
        fully_shard(own, mesh=mesh_of((dist.get_world_size(),), ("dp",)))
    elif dist.is_initialized():
        replicate = dist.group.WORLD
    optimizer = muon_adamw(own, 0.02, matrices="0.weight", others="2.weight", replicate=replicate)
    flat = nn.Parameter(plain[0].weight.detach().flatten(1).clone())
    muon = torch.optim.Muon([flat], 0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        for param in own.parameters():
            grad = torch.randn(param.shape, generator=random)
            if param.ndim == 4:
                flat.grad = grad.flatten(1)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = grad.to(memory_format=form) if param.ndim == 4 else grad
        optimizer.step()
        muon.step()
    assert own[0].weight.is_contiguous(memory_format=form)
    assert torch.equal(gathered(own[0].weight).flatten(1), flat.detach())


EACH = {"body": "matrix_dims = 2"}  # the word of a class that it steps the matrices of a stack one by one
# Gives it, and divides the gradient of a stack by the norm of all of it.
Mixing = toy("mixing", update="grad @ grad.mT @ grad / grad.norm()", **EACH)()


def test_a_class_that_does_not_keep_its_word_is_refused() -> None:
    (param,) = parameters([(2, 24, 16)])
    optimizer = wrap(Mixing([param]))
    param.grad = torch.ones_like(param)
    with pytest.raises(UnsupportedOptimizer, match="matrix_dims says that each matrix of a stack steps as if"):
        optimizer.step()


# Orthogonal-like steps whose size each matrix has for itself: a scalar per matrix, and numbers that all share.
Sized = toy("sized", **EACH)("""
    if not state:
        state["scale"] = grad.new_zeros(param.shape[:-2])
        state["decay"] = torch.ones((), dtype=torch.float64)
    state["decay"] *= 0.9
    for index in itertools.product(*map(range, param.shape[:-2])):
        own = grad[index].clone()  # aligned, or products round otherwise
        scale = torch.linalg.vector_norm(own) * state["decay"] + state["scale"][index]
        state["scale"][index].copy_(scale)
        param[index].sub_(((own @ own.mT @ own) / (1 + scale)).to(param.dtype), alpha=group["lr"])
""")


def test_state_of_each_matrix_and_of_all() -> None:
    """A scalar per matrix is [E] in a stack; a product with a wider number that all share is as wide as alone."""
    pair = Pair(Sized, ((3, 24, 16), (24, 16), (2, 2, 7, 5)))
    pair.steps(6)


class ClipAt(Muon):
    """Muon that clips each parameter, a stack by the norm of all of it: it does not inherit the word on stacks."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad * (100 / (param.grad.norm() + 1e-6)).clamp(max=1.0)
        return super().step(closure)


def test_a_subclass_does_not_inherit_the_word_on_stacks() -> None:
    pair = Pair(lambda params: ClipAt(params, lr=0.02), ((3, 8, 16),), sizes=(1.0, 100.0))
    pair.steps(4)


# Sums a view of each matrix, which rounds as the view lies in memory.
FirstColumn = toy("first-column", **EACH)("""
    for index in itertools.product(*map(range, param.shape[:-2])):
        param[index].add_(grad[index][:, :1].sum(0))
""")


def test_views_that_no_rule_knows_run_eagerly() -> None:
    pair = Pair(FirstColumn, ((3, 8, 16), (2, 2, 9, 5), (6, 4)))
    pair.steps(4)


def test_other_matrix_dims_between_steps_make_another_plan() -> None:
    pair = Pair(lambda params: Muon(params, lr=0.1), ((2, 24, 16),))
    for step in range(4):
        if step == 2:
            for optimizer in pair.both:
                optimizer.param_groups[0]["matrix_dims"] = 3
        pair.step()


def test_audits_of_entries() -> None:
    check(on_ranks(__name__, "one", [Case("stack_dim0", (2,))], strategy="owner", audit=3))
    check(on_ranks(__name__, "one", [Case("stack_dims", (2, 2))], strategy="owner", audit=3))


def test_a_stack_that_split_cuts_between_its_matrices_is_not_divided_further() -> None:
    run(2, cut_between_matrices)


def cut_between_matrices() -> None:
    (whole,), (own,) = parameters([(4, 24, 16)]), parameters([(4, 24, 16)])
    mesh = mesh_of((2,), ("line",))
    param = nn.Parameter(distribute_tensor(own.detach(), mesh, [Shard(1)], src_data_rank=None))
    plain = Muon([whole])
    optimizer = wrap(Muon([("w", param)]), split={"w": Split({"a": 1, "b": 3}, dim=0)})
    for step in range(3):
        grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
        whole.grad, param.grad = grad.clone(), distribute_tensor(grad, mesh, [Shard(1)], src_data_rank=None)
        plain.step()
        optimizer.step()
    assert torch.equal(gathered(param), whole.detach())


def test_convolutions_are_no_stacks() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 16), nn.Linear(16, 4))
    with pytest.raises(CanzonaError, match="would train this convolution as a stack"):
        optimizer_for(model, lambda named: Muon(named, lr=0.02), matrices="0.weight")


# -- wrapped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrapped_in_one_process(dtype: torch.dtype) -> None:
    shapes = (*ODD, *EVEN, (24, 16), (2, 2, 31, 17))
    pair = Pair(lambda params: Muon(params, lr=0.02), shapes, dtype=dtype)
    pair.steps(4)
    assert pair.report.fallbacks == {}


def planned(*shapes: tuple[int, ...]) -> list[str]:
    """The text of the plan of Muon."""
    pair = Pair(lambda params: Muon(params, lr=0.02), shapes)
    pair.steps(2)
    return show(pair.wrapped.canzona.session.driver.plan.owned).splitlines()


def test_a_graph_is_as_long_as_that_of_one_matrix() -> None:
    """However many matrices there are: what ranks plan and agree on does not grow with them."""
    assert len(planned((3, 24, 16))) == len(planned((300, 24, 16))) == len(planned((24, 16)))


def test_stacks_and_matrices_of_one_shape_share_a_template() -> None:
    lines = planned((3, 24, 16), (24, 16), (2, 2, 24, 16))
    assert sum(line.startswith("template ") for line in lines) == 1
    assert sum(line.startswith("placed ") for line in lines) == 3


LAYOUTS = [
    *(Case(f"stack_dim{dim}", (ranks,)) for ranks in (2, 4) for dim in range(3)),
    Case("ddp", (2,)),
    Case("stack_dims", (2, 2)),
]


@pytest.mark.parametrize(
    ("case", "dtype", "shapes"),
    crossed(LAYOUTS, DTYPES, ["odd", "even", *OTHERS]),
    ids=str,
)
def test_on_ranks(case: Case, dtype: torch.dtype, shapes: str) -> None:
    check(on_ranks(__name__, shapes, [case], dtype, strategy="owner"))


def test_ranks_that_share_some_matrices_divide_these() -> None:
    """Experts of two rows of ranks, each cut along a matrix dim by the ranks of its row."""
    outcomes = on_ranks(__name__, "one", [Case("stack_dims", (2, 2))], strategy="owner")
    check(outcomes)
    names = [[task["name"] for task in outcome.report["tasks"]] for outcome in outcomes]
    assert names[0] == names[1] == [f"group0.param0[{i}:{i + 1}]" for i in range(4)]
    assert names[2] == names[3] == [f"group0.param0[{i}:{i + 1}]" for i in range(4, 8)]


@pytest.mark.parametrize("recipe", ["one", "one of SOAP"])
def test_matrices_of_one_stack_have_several_owners(recipe: str) -> None:
    report = check(on_ranks(__name__, recipe, [Case("stack_dim1", (4,))], strategy="owner"))
    tasks = report["tasks"]
    assert [task["name"] for task in tasks] == [f"group0.param0[{i}:{i + 1}]" for i in range(8)]
    assert len({task["owner"] for task in tasks}) == 4
