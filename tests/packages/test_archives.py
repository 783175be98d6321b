"""The wheel and the archive of sources: what is in them, and that they work where the repository is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

import canzona_compile
from tests.harness.sources import ROOT, copy_sources

BUILD = "from setuptools import build_meta; build_meta.build_{kind}({folder!r})"
TRAINING = """
import torch
import canzona_compile

assert canzona_compile.__file__.startswith({folder!r}), canzona_compile.__file__
weights = [torch.nn.Parameter(torch.randn(16, 8)) for _ in range(2)]
plain = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
optimizers = canzona_compile.wrap(torch.optim.Muon(weights, lr=0.1)), torch.optim.Muon(plain, lr=0.1)
for _ in range(2):
    for own, other in zip(weights, plain):
        own.grad = torch.randn(16, 8)
        other.grad = own.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
assert all(torch.equal(own, other) for own, other in zip(weights, plain))
"""
BUILT_BY_USERS = """
import torch

def build():
    model = torch.nn.Linear(12, 8, bias=False)
    return model, torch.optim.Muon(model.parameters(), lr=0.1)
"""


@dataclass(frozen=True, slots=True)
class Built:
    """The archives, and the copy of the sources that they were built from."""

    sources: Path
    wheel: Path
    archive: Path


def build(sources: Path, kind: str, folder: Path) -> Path:
    """Build an archive as pip does, offline and with the setuptools that is installed."""
    code = BUILD.format(kind=kind, folder=str(folder))
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    sources = copy_sources(folder / "sources")
    archive = build(copy_sources(folder / "again"), "sdist", folder / "sdist")  # of its own: the wheel leaves a folder
    return Built(sources, build(sources, "wheel", folder / "wheel"), archive)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def names_below(folder: Path) -> set[str]:
    """Files, as seen through links."""
    found = (Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names)
    return {path.relative_to(folder).as_posix() for path in found}


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def elsewhere(*line: str, path: Path, cwd: Path) -> str:
    """Run a program outside of the repository, with another folder of packages; standard output."""
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- what is in them -------------------------------------------------------------------------------


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    package = {f"canzona_compile/{n}" for n in names_below(built.sources / "canzona_compile")}
    code = {name for name in names_in(built.wheel) if ".dist-info/" not in name}
    assert code == {name for name in package if "__pycache__" not in name}
    assert {"canzona_compile/passes/place.py", "canzona_compile/optimizers/__init__.py"} <= code


def test_the_wheel_says_what_it_is(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as opened:
        (info,) = {PurePosixPath(name).parent for name in opened.namelist() if name.endswith(".dist-info/METADATA")}
        metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
        scripts = opened.read(f"{info}/entry_points.txt").decode()
    assert metadata["Version"] == canzona_compile.__version__
    assert {"page", "test"} <= set(metadata.get_all("Provides-Extra"))
    assert "canzona-compile = canzona_compile.__main__:main" in scripts
    links = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert [links["Paper"]] == re.findall(r"^ +url: (\S+)$", citation, re.MULTILINE)


def test_the_archive_of_sources_has_what_the_repository_has(built: Built, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no repository to compare with")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    root = unpacked(built.archive, tmp_path)
    there = {name for name in tracked.split("\0") if name and (ROOT / name).exists()}
    missing = {name for name in there if not os.path.lexists(root / name)}
    assert missing == {".ci/run", ".gitignore"}
    assert (root / "canzona_compile" / "passes").readlink() == Path("../passes")


# -- elsewhere -------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_wheel_from_the_archive_of_sources_is_the_same(built: Built, tmp_path: Path) -> None:
    wheel = build(unpacked(built.archive, tmp_path / "sources"), "wheel", tmp_path / "wheel")
    assert names_in(wheel) == names_in(built.wheel)


@pytest.mark.full
def test_an_installed_wheel_works_without_the_repository(built: Built, tmp_path: Path) -> None:
    packages, cwd = tmp_path / "packages", tmp_path / "cwd"
    cwd.mkdir()
    pip = f"-m pip install --quiet --no-deps --no-index --disable-pip-version-check --target {packages} {built.wheel}"
    subprocess.run([sys.executable, *pip.split()], check=True)
    elsewhere(sys.executable, "-c", TRAINING.format(folder=str(packages)), path=packages, cwd=cwd)

    command = str(packages / "bin" / "canzona-compile")
    version = elsewhere(command, "--version", path=packages, cwd=cwd)
    assert version == f"canzona-compile {canzona_compile.__version__}\n"
    (cwd / "shapes.json").write_text('{"layers.0.q": [64, 64], "layers.1.q": [64, 64]}')
    plan = (command, "plan", "--params", "shapes.json", "--mesh", "fsdp=2", "--no-alternatives")
    for optimizer, kind, beginning in (
        ("muon", "table", "╭─ canzona plan"),
        ("normuon", "json", "{"),
        ("muon", "html", "<!doctype html>"),
    ):
        options = ("--optimizer", optimizer, "--format", kind)
        assert elsewhere(*plan, *options, path=packages, cwd=cwd).startswith(beginning)
    (cwd / "train.py").write_text(BUILT_BY_USERS)
    assert "equal" in elsewhere(command, "verify", "train:build", "--ranks", "2", path=packages, cwd=cwd)
