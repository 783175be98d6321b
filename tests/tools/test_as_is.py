"""`verify` of optimizers that are distributed already: planted mistakes and real optimizers have the right verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.verification.compare import norm_apart
from canzona_compile.tools.verification.user_model import built
from canzona_compile.tools.verification.verdict import Gap, judged
from tests.harness.marks import full
from tests.tools import foreign_builds

BUILDS = "tests.tools.foreign_builds"
EQUAL, ROUNDING, OTHER = "equal bits", "equal to rounding", "another algorithm"
ROWS = {"0.weight", "1.weight"}


def verified(name: str, **options: Any) -> Any:
    return canzona_compile.verify(f"{BUILDS}:{name}", as_is=True, **{"steps": 3, **options})


# -- planted ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "parameters", "step"),
    [("wrong_scale", {"1.weight"}, 3), full("skips_uneven", {"0.weight"}, 1), full("by_blocks", ROWS, 1)],
)
def test_another_algorithm(name: str, parameters: set[str], step: int) -> None:
    """Also if it is nearer than rounding may lead, as a scale that is wrong by 5% is in bfloat16."""
    found = verified(name)
    assert (found.verdict, found.ok, found.as_is.undecided) == (OTHER, False, "")
    assert {(gap.parameter in parameters, gap.step) for gap in found.as_is.gaps} == {(True, step)}
    assert {leaf.parameter for leaf in found.differing} == parameters
    once, double = found.as_is.gaps
    assert (once.precision, double.precision, double.beyond) == ("bfloat16", "float64", True)
    assert double.apart == pytest.approx(once.apart, abs=0.1)
    assert double.rounding < 1e-12
    assert once.beyond == (name != "wrong_scale")


@pytest.mark.usefixtures("forked")
def test_equal_bits_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{BUILDS}:equal", "--as-is", "--steps", "2", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["verdict"], found["as_is"]["gaps"]) == (True, EQUAL, [])
    assert {leaf["parameter"] for leaf in found["leaves"]} == ROWS
    assert found["as_is"]["collectives"] == {"all_gather_into_tensor": 2.0}
    assert found["as_is"]["bytes_sent"] == 4 * (17 * 24 + 8 * 33), "the first rank's fragments, in float32"


@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["other_sums", "compiled_sums"])
def test_sums_in_another_order_are_rounding(name: str, tmp_path: Path) -> None:
    found = verified(name, json=tmp_path / "found.json")
    assert (found.verdict, found.ok, found.as_is.coarser, found.as_is.undecided) == (ROUNDING, False, False, "")
    once, double = found.as_is.gaps
    assert once.apart > 1e-2
    assert double.apart < 1e-12
    assert "equal to rounding" in " ".join(str(found).split())
    assert json.loads((tmp_path / "found.json").read_text())["as_is"]["gaps"][1]["precision"] == "float64"


@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("one_raises", "rank 1: step 2 of the distributed optimizer raised ValueError: no such shard"),
        ("one_dies", "rank 1: rank 1 exited with code 3"),
        ("another_name", "does not have this parameter\n  at:   0.weight"),
        ("another_shape", "the parameter is float32 [17, 24] in build(mesh) but float32 [33, 24] in build(None)"),
        ("another_start", "the parameter starts with other values than in build(None)\n  at:   0.weight"),
        ("muon_on_uneven_dtensors", "in-place operations that require placement changes are not supported"),
    ],
)
def test_what_a_rank_raises_is_a_verdict(name: str, says: str) -> None:
    found = verified(name)
    assert (found.verdict, found.ok, found.leaves) == ("error", False, ())
    assert says in found.as_is.error
    assert "see:" not in found.as_is.error  # that page is about calls that raise
    assert " ".join(says.split()) in " ".join(str(found).split())


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_a_rank_that_hangs() -> None:
    found = verified("one_hangs", limit=15.0)
    assert (found.verdict, found.ok) == ("hang", False)
    assert "rank 1 (step 2 of 3)" in found.as_is.error


# -- real ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "verdict", "options"),
    [
        ("wrapped", EQUAL, {}),
        ("zero_redundancy", EQUAL, {"layout": "ddp"}),
        ("hybrid", EQUAL, {"layout": "hsdp", "ranks": 4}),
        ("muon_on_dtensors", ROUNDING, {}),
    ],
)
def test_real_ones(name: str, verdict: str, options: dict[str, Any]) -> None:
    found = verified(name, **options)
    assert found.verdict == verdict, found
    assert (found.as_is.undecided, found.as_is.unclear) == ("", ())
    assert found.as_is.bytes_sent > 0


# -- what cannot be compared -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"options": {"depth": 2}}, "as_is wraps nothing, so option 'depth' has no effect"),
        ({"layout": "rows"}, "no layout 'rows'"),
        ({"layout": "hsdp", "ranks": 3}, "3 is odd"),
    ],
)
def test_arguments(options: dict[str, Any], says: str) -> None:
    with pytest.raises(CanzonaError, match=says):
        canzona_compile.verify(foreign_builds.equal, as_is=True, **options)


def test_what_build_takes() -> None:
    with pytest.raises(CanzonaError, match=r"build takes no mesh: too many .*\n.*\n  hint: .* build\(mesh\)"):
        built("tests.tools.user_builds:muon", 0, None)
    with pytest.raises(CanzonaError, match=r"build needs arguments: missing .* 'mesh'\n.*\n  hint: .* --as-is"):
        built(f"{BUILDS}:wrapped", 0)
    with pytest.raises(CanzonaError, match="must return a torch"):
        built(f"{BUILDS}:no_optimizer", 0, None)
    assert isinstance(built(f"{BUILDS}:equal", 0, None).optimizer, Optimizer)


@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("plain_raises", "build() raised KeyError: 'no such layer'"),
        ("plain_step_raises", "step 1 of the plain optimizer raised TypeError"),
    ],
)
def test_a_plain_optimizer_that_fails(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{BUILDS}:{name}", "--as-is", "--steps", "2", "--quiet"]) == 2
    assert says in capsys.readouterr().err


# -- the verdict -----------------------------------------------------------------------------------


def gap(apart: float, rounding: float, moved: float = 1.0, step: int = 1, parameter: str = "w") -> Gap:
    return Gap.of(parameter, step, "float32", apart, rounding, moved)


def test_a_gap_is_relative_to_the_way() -> None:
    assert gap(0.1, 0.2, moved=2.0) == Gap("w", 1, "float32", 0.05, 0.1, beyond=False)
    assert not gap(8.0, 1.0).beyond
    assert gap(8.1, 1.0).beyond
    assert not gap(1e-10, 0.0).beyond, "a floor"
    assert gap(1e-10, 0.0, moved=0.0) == Gap("w", 1, "float32", math.inf, 0.0, beyond=True)
    assert gap(0.0, 0.0, moved=0.0).apart == 0.0


def test_floats_of_64_bits_decide() -> None:
    near, far, exact = gap(0.05, 0.02), gap(0.05, 1e-9), gap(1e-15, 1e-15)
    assert (judged([near], []).verdict, judged([near], []).unclear) == (ROUNDING, ("w",))
    assert judged([near], [far]).verdict == OTHER
    found = judged([far], [exact])
    assert (found.verdict, found.coarser, found.gaps) == (ROUNDING, True, (far, exact))
    assert judged([far], []).verdict == OTHER


def test_the_first_step_and_the_worst_parameter_are_named() -> None:
    steps = [gap(0.1, 0.0, step=2), gap(0.3, 0.0, step=2, parameter="v"), gap(9.0, 0.0, step=3)]
    assert judged(steps, []).gaps == (steps[1],)


def test_norms_of_differences() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert norm_apart(nan, nan.clone()) == 0.0
    assert norm_apart(nan, torch.zeros(2)) == math.inf
    assert norm_apart(torch.tensor([3 + 4j]), torch.zeros(1, dtype=torch.complex64)) == 5.0
    assert norm_apart(torch.zeros(2), torch.zeros(3)) == math.inf
