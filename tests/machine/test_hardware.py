"""Kinds of machines: the files that come with the package, what a file must say, and rates between its points."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import FOLDER, RATES, Curve, Hardware, hardware_from, named_hardware

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def plain(name: str = "h100") -> dict[str, Any]:
    """The content of a file that comes with the package."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def refused(path: Path) -> CanzonaError:
    """The error that a file meets: one line says what is wrong, another where, a third what to do."""
    with pytest.raises(CanzonaError) as caught:
        named_hardware(str(path))
    error = caught.value
    assert "\n" not in error.problem
    assert error.at == str(path)
    assert error.hint
    return error


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_files_of_the_package(name: str) -> None:
    hardware = named_hardware(name)
    assert hardware.name == name
    assert hardware.measured == ()
    assert hardware.assumed == RATES
    assert dict(hardware.sources).keys() == set(RATES)
    assert hardware.overlap == (hardware.device == "cuda")
    assert hardware.network.bandwidth <= hardware.node.bandwidth
    assert hardware.host > 0
    assert all(rate <= hardware.bandwidth for _, rate in hardware.transposed.points)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    hardware = named_hardware(name)
    path = tmp_path / "mine.json"
    path.write_text(hardware.to_json(), encoding="utf-8")
    again = named_hardware(str(path))
    assert again == hardware
    assert again.digest == hardware.digest
    assert path.read_text(encoding="utf-8") == (FOLDER / f"{name}.json").read_text(encoding="utf-8")


def test_digests_tell_rates_apart() -> None:
    h100 = named_hardware("h100")
    assert h100.digest != replace(h100, launch=5e-6).digest
    assert h100.digest == hardware_from(plain(), "here").digest


def test_unknown_names() -> None:
    with pytest.raises(CanzonaError, match="no hardware 'b200'") as caught:
        named_hardware("b200")
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in NAMES)
    with pytest.raises(CanzonaError, match=r"no file '/nowhere/mine\.json'"):
        named_hardware("/nowhere/mine.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not JSON"), ("[1, 2]", "not a JSON object"), ("", "not JSON"), ("[" * 100_000, "nested too deeply")],
    ids=["half", "a list", "empty", "deep"],
)
def test_files_that_are_no_object(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    assert words in refused(path).problem


def test_escape_codes_in_names_are_spelled(tmp_path: Path) -> None:
    """Names reach terminals."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(plain() | {"name": "mine\x1b[31m\u202e", "sources": {"host\x07": "a\x1b]0;b"}}), "utf-8")
    found = named_hardware(str(path))
    assert found.name == r"mine\x1b[31m\u202e"
    assert dict(found.sources) == {r"host\x07": r"a\x1b]0;b"}


Spoiled = Callable[[dict[str, Any]], object]
BAD: dict[str, tuple[Spoiled, str]] = {
    "no schema": (lambda d: d.pop("schema"), "schema"),
    "another schema": (lambda d: d.update(schema=2), "schema is 2"),
    "a field is missing": (lambda d: d.pop("bandwidth"), "'bandwidth' is missing"),
    "a field too many": (lambda d: d.update(bandwidht=1.0), "the field 'bandwidht' is unknown"),
    "no number": (lambda d: d.update(bandwidth="fast"), "bandwidth is 'fast'"),
    "a flag for a number": (lambda d: d.update(memory=True), "memory is True"),
    "zero": (lambda d: d.update(processors=0), "processors is 0"),
    "half a processor": (lambda d: d.update(processors=2.5), "processors is 2.5"),
    "negative": (lambda d: d.update(launch=-1e-6), "launch is -1e-06"),
    "negative bookkeeping": (lambda d: d.update(host=-1), "host is -1"),
    "infinite": (lambda d: d.update(memory=math.inf), "memory is inf"),
    "not a number": (lambda d: d.update(bandwidth=math.nan), "bandwidth is nan"),
    "larger than any rate": (lambda d: d.update(memory=1e308), "memory is 1e+308"),
    "smaller than any rate": (lambda d: d["node"].update(bandwidth=1e-308), "node.bandwidth is 1e-308"),
    "larger than any float": (lambda d: d.update(launch=10**400), "launch is 10000"),
    "a size beyond any": (lambda d: d.update(transposed=[[1e300, 1]]), "transposed is 1e+300"),
    "no text": (lambda d: d.update(device=3), "device is 3"),
    "no flag": (lambda d: d.update(overlap="yes"), "overlap is 'yes'"),
    "no curves": (lambda d: d.update(products=[[1, 2]]), "products is not an object"),
    "no products": (lambda d: d.update(products={}), "products is not an object"),
    "no curve": (lambda d: d["products"].update(float32=3e12), "products.float32 is not a list of pairs"),
    "no pairs": (lambda d: d["products"].update(float32=[[1, 2, 3]]), "products.float32 is not a list of pairs"),
    "an empty curve": (lambda d: d.update(transposed=[]), "transposed is not a list of pairs"),
    "sizes descend": (lambda d: d["products"].update(float32=[[2, 1], [1, 1]]), "sizes of products.float32"),
    "a rate of zero": (lambda d: d["products"].update(float32=[[2, 0]]), "products.float32 is 0"),
    "no other": (lambda d: d["factorizations"].pop("other"), "factorizations has no rate 'other'"),
    "no calls": (lambda d: d.update(product_calls=4e-6), "product_calls is not an object"),
    "a negative call": (lambda d: d.update(product_calls={"float32": -1}), "product_calls.float32 is -1"),
    "no link": (lambda d: d.update(node=1e9), "node is not an object"),
    "half a link": (lambda d: d["network"].pop("latency"), "network.latency is missing"),
    "a strange link": (lambda d: d["node"].update(speed=1), "no field node.speed"),
    "a dead link": (lambda d: d["node"].update(bandwidth=0), "node.bandwidth is 0"),
    "strange sources": (lambda d: d.update(sources=["a book"]), "sources is not an object"),
    "strange measurements": (lambda d: d.update(measured=["name"]), "measured names 'name'"),
    "no list of measurements": (lambda d: d.update(measured=5), "measured is not a list"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    spoil, words = BAD[case]
    content = plain()
    spoil(content)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert words in refused(path).problem


# -- rates ---------------------------------------------------------------------------------------


def test_curves_are_linear_in_the_logarithm_of_the_size() -> None:
    curve = Curve(((16.0, 1e9), (64.0, 3e9), (256.0, 4e9)))
    assert [curve.at(size) for size in (16, 64, 256)] == [1e9, 3e9, 4e9]
    assert curve.at(32) == pytest.approx(2e9)
    assert curve.at(128) == pytest.approx(3.5e9)
    assert (curve.at(1), curve.at(1e6)) == (1e9, 4e9)  # beyond its ends a curve is flat
    assert Curve(((64.0, 3e9),)).at(7) == 3e9


def rates() -> Hardware:
    """Rates that are easy to tell apart."""
    slow, fast = Curve(((64.0, 1e9),)), Curve(((64.0, 4e9),))
    return replace(
        named_hardware("h100"),
        ranks_per_node=4,
        products=(("bfloat16", fast), ("float32", slow)),
        factorizations=(("eigh", slow), ("other", fast)),
        product_calls=(("bfloat16", 9e-6),),
        launch=1e-6,
        measured=("launch", "products"),
    )


def test_rates_that_are_not_listed() -> None:
    hardware = rates()
    assert hardware.product_rate("bfloat16", 64) == 4e9
    assert hardware.product_rate("float64", 64) == 1e9  # as slow as the slowest
    assert hardware.factorization_rate("eigh", 64) == 1e9
    assert hardware.factorization_rate("svd", 64) == 4e9
    assert hardware.product_call("bfloat16") == 9e-6
    assert hardware.product_call("float32") == 1e-6  # as any launch


def test_assumed_rates_are_those_that_were_not_measured() -> None:
    hardware = rates()
    assert {*hardware.assumed, *hardware.measured} == set(RATES)
    assert not {*hardware.assumed} & {*hardware.measured}


def test_a_link_is_that_of_the_node_only_if_all_ranks_are_on_one() -> None:
    hardware = rates()
    assert hardware.link((0, 1, 3)) == hardware.node
    assert hardware.link((4, 7)) == hardware.node
    assert hardware.link((5,)) == hardware.node
    assert hardware.link((3, 4)) == hardware.network
    assert hardware.link((0, 1, 2, 8)) == hardware.network
