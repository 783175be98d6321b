"""The metadata allows the versions of torch that were run, and installing it leaves the torch that is there alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import canzona_compile
from canzona_compile.__main__ import main
from tests.harness.sources import ROOT, copy_sources

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TRITONS = dict(re.findall(r"^TRITON_(\d+\.\d+) := (\S+)$", MAKEFILE, re.MULTILINE))  # by minor version of torch


def range_of(package: str) -> SpecifierSet:
    (found,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == package)
    return found.specifier


def admitted(versions: SpecifierSet) -> list[str]:
    """The minor versions of torch 2 of which a range takes the first release and any later one."""
    return [f"2.{n}" for n in range(100) if f"2.{n}.0" in versions and f"2.{n}.99" in versions]


def test_exactly_the_minor_versions_that_were_run_are_allowed() -> None:
    assert admitted(range_of("torch")) == list(TRITONS)
    assert not {"1.13.0", "3.0.0", "2.99.0"} & set(range_of("torch").filter(["1.13.0", "3.0.0", "2.99.0"]))


def test_the_triton_of_each_torch_is_allowed() -> None:
    assert list(range_of("triton").filter(TRITONS.values())) == list(TRITONS.values())


def would_install(folder: Path) -> Iterable[str]:
    """The names of what pip would install with the project, offline."""
    line = "-m pip install --dry-run --no-index --no-build-isolation --disable-pip-version-check --quiet --report -"
    done = subprocess.run([sys.executable, *line.split(), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [found["metadata"]["name"] for found in json.loads(done.stdout)["install"]]


def test_the_torch_that_is_installed_stays(tmp_path: Path) -> None:
    assert would_install(copy_sources(tmp_path / "sources")) == ["canzona-compile"]


def test_this_python_is_one_of_those_that_were_run() -> None:
    minor = "{}.{}".format(*sys.version_info)
    assert f"Programming Language :: Python :: {minor}" in PROJECT["classifiers"]


def test_the_oldest_and_the_newest_torch_run_for_every_change() -> None:
    path = ROOT / ".ci" / "run"
    if not path.exists():
        pytest.skip("an archive of the sources, without .ci")
    tried = re.findall(r"test-torch TORCH=(\d+\.\d+)\.\d+", path.read_text(encoding="utf-8"))
    oldest, *_, newest = TRITONS
    assert tried == [oldest, newest]


def test_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [canzona_compile.__version__]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\S+)\]", changes, re.MULTILINE)[0] == canzona_compile.__version__


def test_readers_are_told_the_same() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    said = re.findall(r"torch (2\.\d+) to (2\.\d+)", " ".join(" ".join(p.read_text("utf-8").split()) for p in pages))
    oldest, *_, newest = TRITONS
    assert set(said) == {(oldest, newest)}


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"canzona-compile {canzona_compile.__version__}\n"
