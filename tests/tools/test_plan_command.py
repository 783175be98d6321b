"""`plan` on the command line: what they write, where to, their exit codes, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import read_plan
from canzona_compile.machine.hardware import named_hardware
from canzona_compile.tools.planning.plan import ALTERNATIVES

ROOT = Path(__file__).parents[2]
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


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "canzona_compile", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}  # no terminal, and an encoding that lacks most letters
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", env=environment)


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


@pytest.mark.full
def test_another_process_makes_the_same_plan(good: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = shell(*good, "--format", "json")
    assert (done.returncode, done.stderr, main([*good, "--format", "json"])) == (0, "", 0)
    assert json.loads(done.stdout) == json.loads(out_of(capsys))


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
    assert {*ALTERNATIVES, "replicated"} <= set(names)


# -- what is refused -------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    """What is said on standard error."""
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("\nerror: ")
    assert "Traceback" not in err
    return err


@pytest.mark.full
def test_a_process_that_is_refused_says_why(good: list[str]) -> None:
    done = shell(*good, "--mesh", "fsdp=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("\nerror: fsdp is 0, not a positive integer\n  at:   mesh\n  hint: as in dp=32,")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--model", "gpt-5"], ["there is no model 'gpt-5'", "at:   model", "hint: use one of qwen3-0.6b"]),
        (["--model", "qwen3-0.6b", "--split", "q"], ["there is no split 'q'", "at:   split", "hint: qkv, gate-up"]),
        (["--model", "qwen3-0.6b", "--mesh", "tp=3"], ["tp=3 does not divide", "at:   mesh", "hint: tp can be"]),
        (["--mesh", "sp=2"], ["there is no mesh dim 'sp'", "at:   mesh", "hint: dims are dp"]),
        (["--optimizer", "adam"], ["there is no optimizer 'adam'", "hint: one of muon+adamw, muon, normuon, soap"]),
        (["--optimizer", "no_such_module:X"], ["cannot be imported", "no_such_module:X"]),
        (["--optimizer", "torch.optim:Nothing"], ["cannot be imported", "has no attribute 'Nothing'"]),
        (["--optimizer", "torch.nn:Linear"], ["is not a subclass of torch.optim.Optimizer"]),
        (["--optimizer", "torch.optim:LBFGS"], ["LBFGS", "closure"]),
        (["--hardware", "tpu"], ["there is no hardware 'tpu'", "hint: use one of a100"]),
        (["--hardware", "nothing.json"], ["there is no file 'nothing.json'", "hint: use one of a100"]),
        (["--rank", "2"], ["rank 2 is not one of the 2 ranks of fsdp=2", "rank="]),
        (["--rank", "-1"], ["rank -1 is not one of the 2 ranks", "rank="]),
        (["--alpha", "1.5"], ["alpha=1.5 is not between 0 and 1", "hint: 1 balances most"]),
        (["--alpha", "-0.1"], ["alpha=-0.1 is not between 0 and 1", "hint: 1 balances most"]),
        (["--alpha", "nan"], ["alpha=nan is not between 0 and 1", "hint: 1 balances most"]),
        (["--alpha", "0.5", "--planner", "lpt"], ["--alpha is for the planner alpha, not for lpt", "at:   plan"]),
        (
            ["--capacity", "100"],
            ["capacity=100 is less than the 4608 bytes", "at:   layers.0.q", "hint: pass at least 4608"],
        ),
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


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--params", None, ["it cannot be read: No such file", "hint: pass a file"]),
        ("--params", "{", ["the file is not JSON", "hint: write a JSON"]),
        ("--params", "{}", ["there are no matrices to plan", "hint: as in"]),
        ("--params", '{"w": [8, 0]}', [": w", "its shape is [8, 0]", "hint: [rows, columns]"]),
        (
            "--params",
            '{"w": {"shape": [8, 8], "tp": 2}}',
            [": w", "tp is 2, which is not a dim of [8, 8]", "hint: set tp to the dim"],
        ),
        ("--hf-config", None, ["it cannot be read: No such file", "hint: pass a file"]),
        ("--hf-config", "{}", ["the field 'num_attention_heads' is missing", "hint: is it the config of a decoder?"]),
        ("--hf-config", '{"num_attention_heads": "8"}', ["is '8', not a positive integer", "hint: copy it"]),
        ("--hardware", "{", ["the file is not JSON"]),
        ("--hardware", "[]", ["the file is not a JSON object", "hint: ", "calibrate"]),
        ("--hardware", "{}", ["schema is None, not 1", "hint: ", "calibrate"]),
    ],
)
def test_files_that_cannot_be(
    option: str, text: str | None, words: list[str], good: list[str], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(text, "file.json") if text is not None else "no/such/file.json"
    if option != "--hardware":
        good[1:3] = []
    said = refused(capsys, [*good, option, path])
    assert all(word in said for word in [f"at:   {path}", *words]), said


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("name", None, "the field 'name' is missing"),
        ("speed", 1, "the field 'speed' is unknown"),
        ("name", 5, "name is 5, not a string"),
        ("overlap", 1, "overlap is 1, neither true nor false"),
        ("ranks_per_node", 0, "ranks_per_node is 0, not a positive number"),
        ("bandwidth", "fast", "bandwidth is 'fast', not a positive number"),
        ("bandwidth", float("inf"), "bandwidth is inf, not a positive number"),
        ("launch", -1, "launch is -1, not a number of at least 0"),
        ("products", {}, "products is not an object with a rate per name"),
        ("products", {"bfloat16": [[1]]}, "products.bfloat16 is not a list of pairs"),
        ("products", {"bfloat16": [[2, 1], [1, 1]]}, "the sizes of products.bfloat16 do not ascend"),
        ("factorizations", {"qr": [[1, 1]]}, "factorizations has no rate 'other'"),
        ("node", {"bandwidth": 1}, "the field node.latency is missing"),
        ("network", {"bandwidth": 0, "latency": 0}, "network.bandwidth is 0, not a positive number"),
        ("measured", ["speed"], "measured names 'speed'"),
    ],
)
def test_hardware_that_cannot_be(
    name: str, value: object, says: str, good: list[str], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = named_hardware("h100").to_dict() | {name: value}
    if value is None:
        del fields[name]
    path = write(fields, "hardware.json")
    said = refused(capsys, [*good, "--hardware", path])
    assert says in said
    assert f"at:   {path}" in said


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
        *(
            ["--model", "qwen3-0.6b", "--mesh", "fsdp=2", *option.split()]
            for option in (
                "--planner best",
                "--strategy none",
                "--strategy gram",
                "--strategy batch-split",
                "--updates zero3",
                "--format pdf",
                "--capacity 1GiB",
            )
        ),
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
