"""`plan` on the command line: what they write, where to, their exit codes, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import read_plan
from canzona_compile.ownership import NAMES

NASTY = "[red]x|y[/red]"  # markup to rich, two cells to Markdown
MODEL = NASTY.replace("/", ":")  # a file's name
SHAPES = {name: [48, 48] for name in ("layers.0.q", "layers.0.o", "layers.1.q", "layers.1.o", NASTY)}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes objects, or a text, as a file."""

    def file(found: Any, name: str = "shapes.json") -> str:
        path = tmp_path / name
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        return str(path)

    return file


@pytest.fixture
def good(write: Write) -> list[str]:
    """Arguments that make a plan."""
    options = "--mesh fsdp=2 --strategy owner --no-alternatives"
    return ["plan", "--params", write(SHAPES, f"{MODEL}.json"), *options.split()]


def out_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output; nothing is said beside it where there is no terminal."""
    out, err = capsys.readouterr()
    assert err == ""
    return out


# -- formats ---------------------------------------------------------------------------------------


def test_a_table(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(good) == 0
    out = out_of(capsys)
    for title in ("Load", "Timeline", "Strategies", "Cost", "Micro-groups", "Memory", "Rates", "Assumptions"):
        assert f"── {title} ──" in out
    assert f"Muon, {MODEL} on fsdp=2" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_json_is_a_plan_and_its_figures(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*good, "--format", "json"]) == 0
    found = json.loads(out_of(capsys))
    forecast = found.pop("forecast")
    assert (found["schema"], found["kind"], found["optimizer"]) == (1, "canzona plan", "Muon")
    assert [task["name"] for task in found["tasks"]] == list(SHAPES)
    assert json.loads(read_plan(found).to_json()) == found
    assert (forecast["model"], forecast["mesh"], forecast["matrices"]) == (MODEL, {"fsdp": 2}, 5)
    assert forecast["fingerprint"] == found["fingerprint"]
    assert forecast["options"]["strategy"] == "owner"
    assert forecast["hardware"]["name"] == "h100"
    assert [one["chosen"] for one in forecast["alternatives"]] == [True]


def test_a_page_a_trace_and_markdown(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for kind in ("html", "perfetto", "markdown"):
        assert main([*good, "--format", kind]) == 0
        texts.append(out_of(capsys))
    page, trace, markdown = texts
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    events = json.loads(trace)["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sum(event["ph"] == "X" and event["name"] == "compute 0" for event in events) == 2
    assert markdown.startswith(f"## Muon, {MODEL} on fsdp=2\n")
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = [row.replace("\\|", "").count("|") for row in rows]
    rules = [width for row, width in zip(rows, widths, strict=True) if row.startswith("|---")]
    assert set(widths) == set(rules), "each row has the columns of its table"


def test_a_file_instead_of_standard_output(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*good, "-o", str(tmp_path / "plan")]) == 0
    assert out_of(capsys) == ""
    assert "── Memory ──" in (tmp_path / "plan").read_text(encoding="utf-8")


def test_alternatives_are_compared_unless_told_not_to(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*good[:-1], "--format", "json"]) == 0
    names = [one["name"] for one in json.loads(out_of(capsys))["forecast"]["alternatives"]]
    assert names[0] == "lpt-swap"
    assert names.count("lpt-swap") == 1
    assert {*NAMES, "replicated"} <= set(names)


# -- what is refused -------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    """What is said on standard error."""
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("\nerror: ")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--model", "gpt-5"], ["there is no model 'gpt-5'", "at:   model", "hint: use one of qwen3-0.6b"]),
        (["--model", "qwen3-0.6b", "--split", "q"], ["there is no split 'q'", "at:   split", "hint: qkv, gate-up"]),
        (["--optimizer", "adam"], ["there is no optimizer 'adam'", "hint: one of muon+adamw, muon, normuon, soap"]),
        (["--optimizer", "no_such_module:X"], ["cannot be imported", "no_such_module:X"]),
        (["--optimizer", "torch.optim:Nothing"], ["cannot be imported", "has no attribute 'Nothing'"]),
        (["--optimizer", "torch.nn:Linear"], ["is not a subclass of torch.optim.Optimizer"]),
        (["--optimizer", "torch.optim:LBFGS"], ["LBFGS", "closure"]),
        (["--hardware", "nothing.json"], ["there is no file 'nothing.json'", "hint: use one of a100"]),
        (["--rank", "2"], ["rank 2 is not one of the 2 ranks of fsdp=2", "rank="]),
        (["--rank", "-1"], ["rank -1 is not one of the 2 ranks", "rank="]),
        (["--alpha", "1.5"], ["alpha=1.5 is not between 0 and 1", "hint: 1 balances most"]),
        (["--alpha", "0.5", "--planner", "lpt"], ["--alpha is for the planner alpha, not for lpt", "at:   plan"]),
        (["--capacity", "100"], ["less than the 4608 bytes", "at:   layers.0.q", "hint: pass at least 4608"]),
        (["--capacity", "0"], ["capacity=0 is not a positive integer", "capacity="]),
        (["--micro-groups", "0"], ["micro_groups=0 is not a positive integer", "micro_groups="]),
        (["--depth", "-1"], ["depth=-1 is not a positive integer", "depth="]),
    ],
    ids=lambda found: " ".join(found) if found[0].startswith("--") else "",
)
def test_options_that_cannot_be(
    line: list[str], words: list[str], good: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--model" in line:
        good[1:3] = []
    said = refused(capsys, [*good, *line])
    assert all(word in said for word in words), said


@pytest.mark.parametrize("option", ["--params", "--hf-config", "--hardware"])
def test_files_that_cannot_be(option: str, good: list[str], write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """What else may be wrong with files is in the tests of those that read them."""
    path = write("{", "file.json")
    if option != "--hardware":
        good[1:3] = []
    said = refused(capsys, [*good, option, path])
    assert all(words in said for words in ("error: the file is not JSON: ", f"\n  at:   {path}\n  hint: "))


def test_output_that_cannot_be_written(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("no/such/folder/plan.json", "", ".", f"{good[2]}/plan.json"):
        said = refused(capsys, [*good, "-o", path])
        assert "it cannot be written" in said
        assert f"at:   -o {path}\n  hint: pass a file" in said


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--mesh", "fsdp=2"],
        ["--model", "qwen3-0.6b"],
        ["--model", "qwen3-0.6b", "--params", "shapes.json", "--mesh", "fsdp=2"],
        ["--model", "qwen3-0.6b", "--mesh", "fsdp=2", "--planner", "best"],
        ["--model", "qwen3-0.6b", "--mesh", "fsdp=2", "--capacity", "1GiB"],
    ],
    ids=" ".join,
)
def test_usage_errors(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *line])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "canzona-compile plan: error: " in err


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (None, "it cannot be read: No such file"),
        ("{", "the file is not JSON"),
        ("[]", "the file is not a plan"),
        ({"kind": "shapes"}, "the file is not a plan"),
        ({"schema": 2}, "schema is 2, not 1"),
        ({"groups": ...}, "the field 'groups' is missing"),
        ({"tasks": [{}]}, "an entry is wrong: KeyError: 'name'"),
        ({"tasks": 5}, "an entry is wrong: TypeError"),
        ({"depth": "two"}, "an entry is wrong: ValueError"),
    ],
    ids=str,
)
def test_what_is_no_plan(changes: Any, says: str, good: list[str], write: Write, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    if changes is not None:
        assert main([*good, "--format", "json", "-o", path]) == 0
        if isinstance(changes, dict):
            plan = json.loads(Path(path).read_text()) | changes
            changes = {k: v for k, v in plan.items() if v is not ...}
        path = write(changes, "other.json")
    with pytest.raises(CanzonaError) as caught:
        read_plan(path)
    assert says in str(caught.value)
    assert caught.value.at == path
    assert caught.value.hint
