"""Every block of the README and the pages is run, or is part of a file that is; every page keeps what it promises."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

import acceptance.__main__ as acceptance
import canzona_compile
import canzona_compile.__main__ as command_line
from canzona_compile.errors import PAGE, CanzonaError, CanzonaWarning, InvalidGradient, page_of
from tests.docs.scripts import ROOT, SCRIPTS, path_of

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *DOCS.rglob("*.md")])
COMMANDS = ("make", "torchrun", "python", "canzona-compile", "pip")
OUTPUT = {"text", "json", "bibtex"}
MOST_WORDS = 900


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page.

    Attributes:
        page: its path below the root.
        language: as the fence says; "sh" for indented lines that begin with a command.
        text: without the fence.
    """

    page: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    fences = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for language, inside in fences.findall(text):
        yield Block(name, language, inside)
    rest = fences.sub("", text).replace("\\\n", " ")
    for line in re.findall(rf"^ {{4}}((?:\w+=\S+ )*(?:{'|'.join(COMMANDS)}) .*)$", rest, re.MULTILINE):
        yield Block(name, "sh", line)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


# -- Python ----------------------------------------------------------------------------------------


def wrong_snippet(text: str) -> str:
    """What is wrong with a block that is to be part of a script: empty if nothing is."""
    found = re.fullmatch(r'--8<-- "docs/scripts/(\w+)\.py(?::(\w+))?"\n', text)
    if found is None:
        return "it is no snippet of docs/scripts"
    name, section = found.groups()
    if name not in SCRIPTS:
        return f"no test runs {name}"
    return "" if section is None or sections_of(name).get(section) else f"{name} has no section {section}"


def sections_of(name: str) -> dict[str, str]:
    text = path_of(name).read_text(encoding="utf-8")
    return dict(re.findall(r"# --8<-- \[start:(\w+)\]\n(.*?) *# --8<-- \[end:\1\]", text, re.DOTALL))


def test_python_is_part_of_scripts() -> None:
    python = [block for block in BLOCKS if block.language == "python" and block.page.startswith("docs/")]
    assert len(python) > 20
    assert [f"{block.page}: {wrong}" for block in python if (wrong := wrong_snippet(block.text))] == []


def test_python_of_the_readme_is_part_of_scripts() -> None:
    """A README is shown as it is, so its blocks are copies."""
    scripts = [without_markers(path_of(name).read_text(encoding="utf-8")) for name in SCRIPTS]
    python = [block.text for block in BLOCKS if block.language == "python" and block.page == "README.md"]
    assert python
    assert [text for text in python if not any(text in script for script in scripts)] == []
    assert max(len(text.splitlines()) for text in python) <= 40  # the complete one


def without_markers(script: str) -> str:
    return "".join(line for line in script.splitlines(keepends=True) if "--8<--" not in line)


def test_no_block_is_of_another_language() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "sh", *OUTPUT}


# -- shell -----------------------------------------------------------------------------------------


def make(words: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def torchrun(words: list[str]) -> None:
    option, ranks, *rest = words
    assert (option, ranks.isdecimal()) == ("--nproc-per-node", True)
    if rest[0] == "-m":
        assert find_spec(rest[1]) is not None
    elif rest[0].startswith("examples/"):
        python(rest)
    elif rest not in (["train.py"], ["docs/diagrams.py", "docs/images"]):  # which tests run as well
        (script,) = rest
        assert path_of(Path(script).stem) == ROOT / script
        assert SCRIPTS[Path(script).stem] == int(ranks)


def python(words: list[str]) -> None:
    if words[0] == "-m":
        return {"canzona_compile": canzona, "acceptance": accepted}.get(words[1], lambda words: None)(words[2:])
    script, *options = words
    assert (ROOT / script).exists()
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / script).parent.glob("*.py"))
    if script.startswith("docs/scripts/"):
        assert Path(script).stem in SCRIPTS
    for option in options:
        named = (f'"{option}"', f'"{option.removeprefix("--")}"')  # or put together from a table
        assert not option.startswith("--") or any(name in source for name in named), f"{script} has no {option}"
    return None


def canzona(words: list[str]) -> None:
    """The command's own parser reads the line; nothing is run."""
    parsed: list[argparse.Namespace] = []
    commands = {
        name: replace(command, run=lambda given: parsed.append(given) or 0)  # type: ignore[func-returns-value]
        for name, command in command_line.COMMANDS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "COMMANDS", commands)
        assert command_line.main(words) == 0
    assert parsed


def accepted(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "run", lambda given: 0)
        assert acceptance.main(words) == 0


def pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[0] == "install"
    for word in words[1:]:
        found = re.fullmatch(r"(-e|\.|canzona-compile)?(?:\[([\w,]+)\])?", word)
        assert found is not None, word
        assert set((found[2] or "").split(",")) - {""} <= set(project["optional-dependencies"])


SHELL: dict[str, Callable[[list[str]], None]] = {
    "make": make,
    "torchrun": torchrun,
    "python": python,
    "python3": python,
    "canzona-compile": canzona,
    "pip": pip,
}


def check_line(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z]+=\w*", words[0]):
        words = words[1:]
    if words:
        SHELL[words[0]](words[1:])


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.language == "sh"}))
def test_commands_are_there(page: str) -> None:
    """Commands of ours are read by their parsers, make's are tried dry, scripts run in `test_scripts`."""
    for block in BLOCKS:
        if (block.page, block.language) == (page, "sh"):
            for line in dedent(block.text).splitlines():
                check_line(line)


WRONG = ("make nothing", "python -m canzona_compile plan --nothing", "python benchmarks/step_latency.py --nothing")
WRONG += ("torchrun --nproc-per-node 3 docs/scripts/zero1.py", "pip install canzona-compile[nothing]", "curl -O x")


def test_wrong_blocks_and_commands_are_found() -> None:
    for snippet in ("nothing.py", "zero1.py:nothing"):
        assert wrong_snippet(f'--8<-- "docs/scripts/{snippet}"\n')
    for line in WRONG:
        with pytest.raises((AssertionError, KeyError, SystemExit)):
            check_line(line)


# -- output ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """What is printed as on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.full
def test_the_plan_that_is_shown_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal as wide as the page, apart from what the page leaves out."""
    line, shown, *_ = (block for block in BLOCKS if block.page == "docs/planning.md")
    name, *words = line.text.split()
    assert name == "canzona-compile"
    for variable, value in {"COLUMNS": "90", "TERM": "xterm"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.stdout", Terminal())
    assert command_line.main(words) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", sys.stdout.getvalue())  # type: ignore[attr-defined]
    printed = iter([line.rstrip() for line in text.splitlines()])
    assert [line for line in shown.text.splitlines() if line.rstrip() not in printed] == []  # in this order


# -- errors and warnings ---------------------------------------------------------------------------


def classes(base: type) -> set[type]:
    """A class and all below it, of every module of the package."""
    for module in pkgutil.walk_packages(canzona_compile.__path__, "canzona_compile."):
        needed = next((package for name, package in OF_OTHERS.items() if f"integrations.{name}" in module.name), "sys")
        there = importlib.util.find_spec(needed) is not None
        if there and not module.name.endswith("__main__") and ".optimizers" not in module.name:
            importlib.import_module(module.name)
    found, left = set(), [base]
    while left:
        kind = left.pop()
        found.add(kind)
        left += kind.__subclasses__()
    return {kind for kind in found if kind.__module__.startswith("canzona_compile")}


OF_OTHERS = {"megatron": "megatron", "automodel": "nemo_automodel"}  # what modules of integrations/ need


@pytest.mark.parametrize("base", [CanzonaError, CanzonaWarning])
def test_every_error_and_warning_has_a_section(base: type) -> None:
    headings = set(re.findall(r"^### (\w+)$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE))
    assert {kind.__name__ for kind in classes(base)} <= headings
    assert len(classes(base)) > 2
    assert {page_of(kind).split("#")[1] for kind in classes(base)} <= {heading.lower() for heading in headings}


def test_a_message_ends_with_its_page_once() -> None:
    inner = InvalidGradient("it is sparse", at="w", hint="keep it elsewhere")
    outer = CanzonaError(f"rank 1 cannot run this step:\n{inner}", hint=f"see {inner}")
    assert str(inner).endswith(f"\n  see:  {PAGE}#invalidgradient")
    assert str(outer).endswith(f"\n  see:  {PAGE}#canzonaerror")
    assert str(outer).count("  see:  ") == 1
    assert str(CanzonaWarning("careful")) == f"careful\n  see:  {PAGE}#canzonawarning"


def test_warnings_are_of_our_classes() -> None:
    """A plain text would have no section."""
    for path in (ROOT / "canzona_compile").rglob("*.py"):
        for first in re.findall(r"warnings\.warn\(\s*(\w+)", path.read_text(encoding="utf-8")):
            assert first in {kind.__name__ for kind in classes(CanzonaWarning)}, path


# -- pages -----------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+?)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w/]+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_every_script_can_be_downloaded() -> None:
    listed = re.findall(r"\(scripts/(\w+)\.py\)\{ download \}", (DOCS / "scripts.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(SCRIPTS)


@pytest.mark.full
def test_the_site_builds_without_network(tmp_path: Path) -> None:
    """Strictly: a broken link, a missing snippet or a docstring that does not render is an error."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    loaded = [
        found
        for page in tmp_path.rglob("*.html")
        for found in re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?://[^"]*)"', page.read_text()
        )
    ]
    assert loaded == []
    assert "unsupportedoptimizer" in (tmp_path / "troubleshooting.html").read_text()
