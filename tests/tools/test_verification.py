"""`verify`: equal is equal, a planted bug is found and named, and what cannot be compared says why."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad

import canzona_compile
from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError, InvalidGradient, UnsupportedOptimizer
from canzona_compile.tools.verification import LeafDifference
from canzona_compile.tools.verification.check import OPTIONS
from canzona_compile.tools.verification.layouts import shard
from canzona_compile.tools.verification.user_model import built, names_of, packed, state_leaves
from canzona_compile.tools.verification.workers import gradients
from tests.harness import ranks
from tests.harness.compiled_optimizers import Method
from tests.harness.own_objects import ByAddress
from tests.tools import user_builds
from tests.tools.user_builds import kept_by_parameter, muon, muon_with_loss, named_muon, net

ROOT = Path(__file__).parents[2]
BUILDS = "tests.tools.user_builds"

# -- equal -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_equal_on_fragments_of_uneven_size(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    found = canzona_compile.verify(muon, steps=3, options={"strategy": "owner"}, json=file)
    assert found.ok, found
    names = ("0.weight", "1.weight")
    assert found.compiled == names
    assert [(leaf.parameter, leaf.leaf) for leaf in found.leaves] == [
        (name, leaf) for name in names for leaf in ("parameter", "momentum_buffer")
    ]
    assert found.leaves[0] == LeafDifference("0.weight", "parameter", (33, 24), "float32")
    assert json.loads(file.read_text()) == json.loads(found.to_json())
    assert capfd.readouterr().out == ""


@pytest.mark.full
def test_equal_on_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    """In processes that start as those of users do."""
    line = ["--steps", "3", "--layout", "ddp", "--depth", "1", "--missing-grads", "zero", "--json"]
    line += ["--planner", "alpha", "--alpha", "0.5", "--hardware", "h100"]
    code = main(["verify", f"{BUILDS}:muon_with_loss", *line])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert (found["schema"], found["ok"], found["optimizer"]) == (1, True, "Muon")
    assert found["options"] == {
        **{"depth": 1, "missing_grads": "zero"},
        **{"planner": "alpha", "alpha": 0.5, "hardware": "h100"},
    }
    assert len(found["leaves"]) == 6, "zeros for what has no gradient make state"
    assert found["compiled"] == ["0.weight"]
    assert found["idle"] == ["1.weight", "2.weight"]
    assert "step 3 of 3: equal" in err
    assert "a loss that talks" in err


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_a_plan_that_is_followed(tmp_path: Path) -> None:
    """And one for another model, which is not."""
    model, optimizer = named_muon()
    made = canzona_compile.plan(model, mesh="fsdp=2", optimizer=optimizer, hardware="cpu", strategy="owner")
    file = tmp_path / "plan.json"
    file.write_text(made.to_json())
    found = canzona_compile.verify(named_muon, steps=3, options={"plan": str(file)})
    assert found.ok, found
    assert found.compiled == ("0.weight", "1.weight")
    other = canzona_compile.plan(net(24, 33), mesh="fsdp=2", optimizer=optimizer, hardware="cpu", strategy="owner")
    file.write_text(other.to_json())
    with pytest.raises(CanzonaError, match="the plan does not have this parameter") as caught:
        canzona_compile.verify(named_muon, steps=3, options={"plan": str(file)})
    assert caught.value.at == "1.weight"


def with_compiled_method() -> Any:
    model = net(24, 24, 24)
    return model, Method(model.parameters())


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:Method compiles methods")
def test_compiled_methods_run_as_written_on_both_sides() -> None:
    assert canzona_compile.verify(with_compiled_method, steps=2).ok


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_what_objects_of_their_own_keep_is_not_compared() -> None:
    """Their state is portable among ranks, but a plain optimizer keeps it elsewhere."""
    found = canzona_compile.verify(kept_by_parameter, steps=3, options={"one_per_matrix": ByAddress})
    assert found.ok, found
    names = ("0.weight", "1.weight")
    assert set(found.eager) == set(names)
    assert "one_per_matrix=" in found.eager["0.weight"]
    assert [(leaf.parameter, leaf.leaf) for leaf in found.leaves] == [(name, "parameter") for name in names]


# -- a planted bug ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_a_planted_bug_is_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{BUILDS}:sabotaged", "--steps", "3", "--json", "--quiet"]) == 1
    found = json.loads(capsys.readouterr().out)
    different = [leaf for leaf in found["leaves"] if not leaf["equal"]]
    assert [(leaf["parameter"], leaf["leaf"]) for leaf in different] == [("0.weight", "parameter")]
    assert not found["ok"]
    assert different[0]["first_step"] == 2, "the first step is eager"
    assert different[0]["ranks"] == [0, 1]
    assert different[0]["max_ulps"] > 1000
    assert different[0]["max_relative"] > 1e-4


@pytest.mark.usefixtures("forked")
def test_small_matrices_are_compared_with_owners_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks would compute them all; larger ones, for whose sake users verify, have owners."""
    assert main(["verify", f"{BUILDS}:sabotaged_owners", "--steps", "2", "--quiet"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 4 leaves differ" in printed
    assert "only where owners compute" in printed
    assert "where every rank computes 2 matrices, and with owners for all of them" in printed


# -- what cannot be compared -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        pytest.param(muon, {"steps": 1}, "steps=1 checks nothing", id="steps"),
        pytest.param(muon, {"ranks": 0}, "ranks=0", id="ranks"),
        pytest.param(muon, {"layout": "rows"}, "no layout 'rows'", id="layout"),
        pytest.param(muon, {"layout": "hsdp", "ranks": 3}, "3 is odd", id="odd"),
        pytest.param(muon, {"limit": 0}, "is not positive", id="limit"),
        pytest.param(muon, {"options": {"replicate": None}}, "no option 'replicate'", id="replicate"),
        pytest.param(muon, {"options": {"depth": 0}}, "depth=0", id="option"),
        pytest.param(muon, {"json": "."}, "it cannot be written: it is a folder", id="file"),
        pytest.param("train", {}, "'train' does not name a build", id="no colon"),
        pytest.param(lambda: None, {}, "cannot be sent to other processes", id="lambda"),
        pytest.param(5, {}, "build is a int", id="number"),
    ],
)
def test_arguments_are_checked_before_any_process_starts(build: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(CanzonaError, match=says):
        canzona_compile.verify(build, **options)


@pytest.mark.parametrize(
    ("build", "says", "at"),
    [
        ("no_such_module:build", "there is no module 'no_such_module'", None),
        (f"{BUILDS}:nothing", "has no 'nothing'", "user_builds.py"),
        (f"{BUILDS}:not_callable", "is a int, not a function", None),
        (f"{BUILDS}:raises", "build() raised KeyError: 'no such layer'", "user_builds.py"),
        (f"{BUILDS}:leaves", "build() raised SystemExit: 3", "in leaves"),
        (f"{BUILDS}:one_thing", "returned a Sequential", "one_thing"),
        (f"{BUILDS}:swapped", "must return a torch.nn.Module as the first element, not a Muon", "swapped"),
        (f"{BUILDS}:loss_is_a_number", "must return a function loss", "loss_is_a_number"),
        (f"{BUILDS}:wrapped", "returned a wrapped optimizer", None),
        (f"{BUILDS}:no_params", "no parameters", None),
        (f"{BUILDS}:elsewhere", "is on meta", "0.weight"),
        (f"{BUILDS}:closure", "LBFGS.step requires closure", None),
    ],
)
def test_what_build_returns_is_checked(build: str, says: str, at: str | None) -> None:
    with pytest.raises(CanzonaError) as caught:
        built(build, 0)
    assert says in caught.value.problem
    assert at is None or at in (caught.value.at or "")


def test_the_losses_gradients_are_checked() -> None:
    with pytest.raises(CanzonaError, match=r"loss\(model, 4\) returned a tensor \[\] without a gradient"):
        gradients(built(f"{BUILDS}:loss_without_gradient", 0), 0, 4)
    with pytest.raises(InvalidGradient, match=r"not dense\n  at:   0\.weight"):
        gradients(built(f"{BUILDS}:sparse", 0), 0, 4)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("build", "says"),
    [
        ("by_address", "ByAddress.step calls data_ptr() of its parameter"),
        ("another_every_time", "build() made different values in two processes\n  at:   0.weight"),
    ],
)
def test_usage_errors_on_ranks(build: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{BUILDS}:{build}", "--steps", "2"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err[err.index("error: ") :]


def test_usage_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["verify"], ["verify", "a:b", "--layout", "rows"], ["nothing"], []):
        with pytest.raises(SystemExit) as caught:
            main(line)
        assert caught.value.code == 2
    assert main(["verify", "a:b", "--depth", "0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: depth=0" in err


def test_every_option_of_wrap_is_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')} " in shown for name in OPTIONS if name != "one_per_matrix")
    assert "--replicate" not in shown


def test_the_console_script_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("canzona-compile", scripts["canzona-compile"], "console_scripts").load() is main


# -- sharding --------------------------------------------------------------------------------------


def shards(layout: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """On a rank: placements, fragments, and the state that an optimizer has from the start."""
    model = net(5, 3, bias=True)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    optimizer = Adagrad(list(model.named_parameters()), lr=0.3)
    replicate = shard(optimizer, layout)
    assert (replicate is dist.group.WORLD) == (layout == "ddp")
    group = optimizer.param_groups[0]
    assert (group["param_names"], group["lr"]) == (["scale", "0.weight", "0.bias"], 0.3)
    found = []
    for param in group["params"]:
        total = optimizer.state[param]["sum"]
        assert getattr(total, "placements", None) == getattr(param, "placements", None)
        own = param.to_local() if isinstance(param, DTensor) else param
        found.append((str(getattr(param, "placements", "plain")), tuple(own.shape)))
    return found


@pytest.mark.parametrize(
    ("layout", "rank", "expected"),
    [
        ("fsdp", 1, [("plain", ()), ("(Shard(dim=0),)", (1, 5)), ("(Shard(dim=0),)", (1,))]),
        ("fsdp_columns", 1, [("plain", ()), ("(Shard(dim=1),)", (3, 2)), ("(Shard(dim=0),)", (1,))]),
        ("ddp", 0, [("plain", ()), ("plain", (3, 5)), ("plain", (3,))]),
    ],
)
def test_layouts(layout: str, rank: int, expected: list[Any]) -> None:
    assert ranks.run(2, shards, layout)[rank] == expected


def test_the_layout_with_replicas() -> None:
    found = ranks.run(4, shards, "hsdp")
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[1][1] == ("(Replicate(), Shard(dim=0))", (1, 5))


# -- what is built ---------------------------------------------------------------------------------


def test_names_come_from_the_model_and_from_param_names() -> None:
    assert built(packed(muon), 0).names == ("0.weight", "1.weight")
    made = built(packed(muon_with_loss), 0)
    assert {leaf for _, leaf in made.leaves()} == {"parameter"}
    assert dict(state_leaves({"a": {"b": [1, (2, None)]}, 3: 4})) == {"a.b.0": 1, "a.b.1.0": 2, "a.b.1.1": None, "3": 4}


def test_gradients_are_equal_for_equal_seeds_and_written_by_nobody() -> None:
    first, second = (built(packed(muon), 5) for _ in range(2))
    for seed, same in ((5, True), (6, False)):
        ours, theirs = gradients(first, 5, 1), gradients(second, seed, 1)
        assert list(ours) == list(theirs) == ["0.weight", "1.weight"]
        assert all(torch.equal(ours[name], theirs[name]) == same for name in ours)
    copies = gradients(first, 5, 2)
    first.params[0].grad.zero_()  # type: ignore[union-attr]
    assert copies["0.weight"].abs().sum() > 0


def test_what_is_no_canzona_optimizer_is_refused_before_it_steps() -> None:
    with pytest.raises(UnsupportedOptimizer):
        built(packed(user_builds.closure), 0)
    assert isinstance(built(packed(muon), 0).optimizer, torch.optim.Muon)


def test_an_optimizer_without_names_gets_some() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))])
    assert names_of(torch.nn.Module(), optimizer) == ("group0.param0",)
