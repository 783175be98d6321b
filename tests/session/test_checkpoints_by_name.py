"""State belongs to a name: a parameter with another place than when it was saved gets its own, or nothing is loaded."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import AdamW, Muon

from canzona_compile import CanzonaError, chain, wrap
from examples.optimizers.soap import SOAP
from tests.harness.checkpoint_routes import LOAD, SAVE
from tests.harness.marks import full, only
from tests.harness.pairs import same_bits
from tests.harness.traps.grammar import toy

pytestmark = pytest.mark.usefixtures("captures_shared")

MATRICES, VECTORS = ("first", "second", "third", "fourth"), ("bias", "scale")
REORDERED = ("third", "second", "first", "fourth", "scale", "bias")
Named = list[tuple[str, nn.Parameter]]


def value_of(name: str, shape: Sequence[int], step: int = -1) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode())))


class Training:
    """A model, and an optimizer that names its parameters. Gradients depend on names.

    Args:
        make: makes the optimizer of the parameters in the order of `names`.
        prefix: begins the names that the optimizer gets.
    """

    def __init__(
        self,
        make: Callable[[Named], Any],
        names: Sequence[str] = (*MATRICES, *VECTORS),
        prefix: str = "",
        shape: tuple[int, ...] = (4, 4),
        begun: bool = True,
    ) -> None:
        self.model = nn.Module()
        for name in sorted(names):
            like = shape if name in MATRICES else shape[:1]
            self.model.register_parameter(name, nn.Parameter(value_of(name, like) if begun else torch.zeros(like)))
        self.params = dict(self.model.named_parameters())
        self.optimizer: Any = make([(prefix + name, self.params[name]) for name in names])
        self.laid = SimpleNamespace(params=list(self.params.values()), like_param=lambda whole, _: whole)  # for routes

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            for name, param in self.params.items():
                param.grad = value_of(name, param.shape, step)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state_of(self, name: str) -> dict[str, Any]:
        return dict(self.optimizer.state[self.params[name]])

    def differs(self, other: Training, values: bool = True) -> list[str]:
        """The names whose state, or whose value, differs from that of another training."""
        found = [n for n, p in self.params.items() if values and not same_bits(p.detach(), other.params[n].detach())]
        for name in self.params:
            mine, yours = self.state_of(name), other.state_of(name)
            if mine.keys() != yours.keys() or not all(same_bits(value, yours[key]) for key, value in mine.items()):
                found.append(name)
        return found


def adamw(named: Named) -> Any:
    return wrap(AdamW(named, lr=0.1))


def chained(named: Named, matrices: Sequence[str] = MATRICES[:3]) -> Any:
    """Muon of some matrices, and AdamW of all else in two groups."""
    rest = [entry for entry in named if entry[0] not in matrices]
    own = [entry for entry in named if entry[0] in matrices]
    return chain(Muon(own, lr=0.1), AdamW([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.1}], lr=0.2))


MAKERS: dict[str, Callable[[Named], Any]] = {
    "adamw": adamw,
    "chain": chained,
    "wrapped chain": lambda named: wrap(chained(named)),
}
PLAIN = {"adamw": lambda named: AdamW(named, lr=0.1), "chain": chained, "wrapped chain": chained}
FAST = [
    ("adamw", "flat shards"),
    ("chain", "by hand"),
    *[("wrapped chain", way) for way in ("by hand", "shards", "full")],
]


@pytest.mark.parametrize(("make", "way"), only(FAST, MAKERS, LOAD))
def test_state_goes_by_names(make: str, way: str, tmp_path: Path) -> None:
    saved, whole = Training(MAKERS[make]), Training(PLAIN[make])
    saved.steps(0, 2)
    whole.steps(0, 4)
    SAVE[LOAD[way][0]](saved, tmp_path / "saved")  # type: ignore[arg-type]
    loaded = Training(MAKERS[make], REORDERED, begun=False)
    names = copy.deepcopy([group["param_names"] for group in loaded.optimizer.param_groups])
    LOAD[way][1](loaded, tmp_path / "saved")  # type: ignore[arg-type]
    assert loaded.differs(saved) == []
    assert [group["param_names"] for group in loaded.optimizer.param_groups] == names
    loaded.steps(2, 4)
    assert loaded.differs(whole) == []


def refused(saved: dict[str, Any], loaded: Training) -> str:
    """Why a training does not take a state dict; it is as it was before."""
    before = copy.deepcopy(loaded.optimizer.state_dict())
    with pytest.raises(CanzonaError) as error:
        loaded.optimizer.load_state_dict(saved)
    assert str(loaded.optimizer.state_dict()) == str(before)
    return str(error.value)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_state_of_another_optimizer_is_refused(wrapped: bool) -> None:
    """The choice of matrices has changed, numbers and shapes have not. From a file, torch misses keys of its own."""

    def made(matrices: Sequence[str]) -> Training:
        part = Training(lambda named: wrap(chained(named, matrices)) if wrapped else chained(named, matrices))
        part.steps(0, 1)
        return part

    saved, loaded = made(MATRICES[:3]), made(MATRICES[1:])
    said = "parameter group 0 was saved with other parameters: the state dict has first where the optimizer has fourth"
    assert said in refused(saved.optimizer.state_dict(), loaded)
    with pytest.raises(CanzonaError, match="was saved with other parameters"):
        set_optimizer_state_dict(loaded.model, loaded.optimizer, get_optimizer_state_dict(saved.model, saved.optimizer))


def test_a_missing_name_is_refused_and_without_names_places_count() -> None:
    saved, loaded = Training(adamw, MATRICES[:3]), Training(adamw, MATRICES[1:])
    saved.steps(0, 1)
    state = saved.optimizer.state_dict()
    assert "the state dict has first where the optimizer has fourth" in refused(state, loaded)
    assert "has first where the optimizer has none" in refused(state, Training(adamw, MATRICES[1:3]))
    assert "has none where the optimizer has fourth" in refused(state, Training(adamw, MATRICES))
    for group in state["param_groups"]:
        del group["param_names"]
    loaded.optimizer.load_state_dict(state)
    assert torch.equal(loaded.state_of("fourth")["exp_avg"], saved.state_of("third")["exp_avg"])
    assert loaded.optimizer.param_groups[0]["param_names"] == [*MATRICES[1:]]


@pytest.mark.parametrize(
    ("there", "here"), [("module.", ""), ("", "_orig_mod."), ("_fsdp_wrapped_module.", "model."), ("model.", "module.")]
)
def test_a_prefix_of_all_names_does_not_matter(there: str, here: str) -> None:
    saved, loaded = Training(adamw, MATRICES, there), Training(adamw, MATRICES[::-1], here)
    saved.steps(0, 1)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert loaded.differs(saved, values=False) == []
    assert loaded.optimizer.param_groups[0]["param_names"] == [here + name for name in MATRICES[::-1]]
    loaded.optimizer.load_state_dict(get_optimizer_state_dict(saved.model, saved.optimizer))  # keys of the model
    assert loaded.differs(saved, values=False) == []


def test_names_beside_other_names_of_the_model() -> None:
    """Torch brings parameters into the order of the optimizer, whatever names the optimizer got."""
    saved, loaded = (Training(adamw, names, begun=False) for names in (MATRICES, REORDERED[:4]))
    for part in (saved, loaded):
        (group,) = part.optimizer.param_groups
        group["param_names"] = [f"w.{name[::-1]}" for name in group["param_names"]]
    saved.steps(0, 1)
    set_optimizer_state_dict(loaded.model, loaded.optimizer, get_optimizer_state_dict(saved.model, saved.optimizer))
    assert loaded.differs(saved, values=False) == []
    assert loaded.optimizer.param_groups[0]["param_names"] == [f"w.{name[::-1]}" for name in REORDERED[:4]]


def in_groups(*sizes: int) -> Callable[[Named], Any]:
    """AdamW of groups of so many parameters; the learning rate of a group shows which parameters it has."""

    def make(named: Named) -> Any:
        groups = []
        for own in (named[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))):
            rate = sum(len(name) for name, _ in own) / 100
            groups.append({"params": own, "lr": rate} if own else {"params": [], "param_names": []})
        return wrap(AdamW(groups))

    return make


def test_groups_are_told_by_their_names_and_hyperparameters_go_with_them() -> None:
    saved = Training(in_groups(1, 0, 3), MATRICES)
    saved.steps(0, 1)
    state = saved.optimizer.state_dict()
    loaded = Training(in_groups(3, 0, 1), MATRICES[::-1])
    rates = [group["lr"] for group in loaded.optimizer.param_groups]
    assert rates[0] != rates[2]
    for group in loaded.optimizer.param_groups:
        group["lr"] = 0.5
    loaded.optimizer.load_state_dict(copy.deepcopy(state))
    assert loaded.differs(saved, values=False) == []
    assert [group["lr"] for group in loaded.optimizer.param_groups] == rates
    said = refused(state, Training(in_groups(1, 0, 3), MATRICES[::-1]))
    assert "parameter group 0 was saved with other parameters" in said
    assert "first" in said
    assert "fourth" in said


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_the_order_of_optimizers_in_a_chain_does_not_matter(wrapped: bool) -> None:
    def turned(named: Named) -> Any:
        made = chain(*chained(named).optimizers[::-1])
        return wrap(made) if wrapped else made

    saved, loaded = Training(chained), Training(turned)
    saved.steps(0, 1)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert loaded.differs(saved, values=False) == []


@pytest.mark.parametrize("unnamed", ["saved", "loaded"])
def test_places_count_where_one_side_has_no_names(unnamed: str) -> None:
    def bare(named: Named) -> Any:
        return wrap(AdamW([param for _, param in named], lr=0.1))

    saved = Training(bare if unnamed == "saved" else adamw, MATRICES)
    saved.steps(0, 1)
    loaded = Training(bare if unnamed == "loaded" else adamw, MATRICES[::-1])
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    for here, there in zip(MATRICES[::-1], MATRICES, strict=True):
        assert torch.equal(loaded.state_of(here)["exp_avg"], saved.state_of(there)["exp_avg"])
    plain = AdamW([nn.Parameter(torch.zeros(4, 4)) for _ in MATRICES])
    plain.load_state_dict(saved.optimizer.state_dict())
    given = ([group.get("param_names") for group in own.param_groups] for own in (loaded.optimizer, plain))
    assert next(given) == (next(given) if unnamed == "loaded" else [[*MATRICES[::-1]]])
    loaded = Training(bare, MATRICES[::-1])  # by keys of the model, beside which the saved names are in another order
    set_optimizer_state_dict(loaded.model, loaded.optimizer, get_optimizer_state_dict(saved.model, saved.optimizer))
    assert loaded.differs(saved, values=False) == []
    assert "param_names" not in loaded.optimizer.param_groups[0]


def test_hooks_of_users_may_rename() -> None:
    saved, loaded = Training(adamw, MATRICES, "old."), Training(adamw, MATRICES[::-1], "new_")
    saved.steps(0, 1)

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        names = [name.replace("old.", "new_") for name in group["param_names"]]
        return {**state, "param_groups": [{**group, "param_names": names}]}

    loaded.optimizer.register_load_state_dict_pre_hook(rename)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert loaded.differs(saved, values=False) == []


# -- shapes ----------------------------------------------------------------------------------------


# Momentum of a matrix with more than four rows has the shape of its first four.
LowRank = toy("low-rank")("""
    momentum = state.setdefault("momentum", torch.zeros_like(grad[:4]))
    momentum.add_(grad[:4])
    param[:4].sub_(momentum, alpha=group["lr"])
""")
SHAPED: dict[str, Callable[[Named], Any]] = {
    "chain": chained,
    "wrapped chain": lambda named: wrap(chained(named)),
    "soap": lambda named: wrap(SOAP(named, every=2)),
    "without names": lambda named: wrap(Muon([param for _, param in named], lr=0.1)),
}


@pytest.mark.parametrize("make", [full(name) if name == "soap" else name for name in SHAPED])
def test_state_of_another_shape_is_refused(make: str) -> None:
    """Plain optimizers fail in their next step."""
    names = MATRICES if make in ("soap", "without names") else (*MATRICES, *VECTORS)
    saved, loaded = (Training(SHAPED[make], names, shape=shape) for shape in ((4, 6), (6, 4)))
    saved.steps(0, 1)
    state = saved.optimizer.state_dict()
    said = refused(state, loaded)
    assert "[4, 6]" in said
    assert "the parameter is [6, 4]" in said
    assert ("group0.param0" if make == "without names" else "first") in said
    for key in list(state["state"]):
        del state["state"][key]
    loaded.optimizer.load_state_dict(state)
    loaded.steps(0, 1)


def test_state_that_may_have_another_shape_than_its_parameter_is_loaded() -> None:
    saved, loaded = (
        Training(lambda named: wrap(LowRank([p for _, p in named])), MATRICES, shape=(6, 5)) for _ in range(2)
    )
    saved.steps(0, 1)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert loaded.differs(saved, values=False) == []


def test_a_prefix_that_only_some_names_have_is_no_prefix() -> None:
    saved, ours = (
        torch.optim.SGD([(name, torch.nn.Parameter(torch.ones(2, 2))) for name in names], lr=0.1, momentum=0.9)
        for names in (["a.w", "w"], ["w", "x.w"])
    )
    for optimizer in (saved, ours):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones(2, 2)
    saved.step()
    with pytest.raises(CanzonaError, match="saved with other parameters"):
        wrap(ours).load_state_dict(saved.state_dict())
