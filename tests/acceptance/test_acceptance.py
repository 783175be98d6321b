"""What is wrong, hangs or dies is reported as that, costs no other step, and is written at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from acceptance import supervisor
from acceptance.__main__ import accept, all_steps, main, ranks_here
from acceptance.journal import AcceptanceJournal, files_of, verdict
from acceptance.step import AcceptanceStep, AcceptedMachine, OneProgram, OnRanks, StepNeed, StepResult
from acceptance.steps_machine import files_of_gpu_tests
from acceptance.supervisor import RankEnd, interrupts_reach_programs, judged
from canzona_compile.tools import processes
from canzona_compile.tools.processes import backend_for
from tests.acceptance import planted_steps as planted

ROOT = Path(__file__).parents[2]
ONE = {1: AcceptedMachine("cpu", 1)}
STEPS = {step.name: step for step in all_steps(dry=False)}


def step(
    name: str, work: OnRanks | OneProgram, limit: float = 60.0, needs: tuple[StepNeed, ...] = ()
) -> AcceptanceStep:
    return AcceptanceStep(name, f"{name} works", f"what {name} means", work, needs, limit)


def python(code: str) -> OneProgram:
    return OneProgram(("{python}", "-c", code))


def results(folder: Path, ranks: int, steps: Sequence[AcceptanceStep]) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Take steps: the exit code, the results by name, and the page."""
    output = folder / "out"
    code = accept(steps, {ranks: AcceptedMachine("cpu", ranks)}, output)
    found = json.loads((files_of(output) / "all" / "acceptance.json").read_text())
    assert found["complete"]
    assert found["ok"] == (code == 0)
    page = (output / "acceptance.md").read_text()
    assert "This was a dry run on the CPU" in page
    assert "What is known now" not in page
    return code, {own["name"]: own for own in found["steps"]}, page


def test_what_is_wrong_hangs_or_dies_costs_no_other_step(tmp_path: Path, forked: None) -> None:
    steps = [
        step("first", OnRanks(planted.good)),
        step("wrong", OnRanks(planted.off_by_one_bit)),
        step("hang", OnRanks(planted.waits_for_ever), limit=12.0),
        step("death", OnRanks(planted.dies)),
        step("failing program", python("import sys; print('no such kernel'); sys.exit(3)")),
        step("endless program", python("import time; time.sleep(3600)"), limit=0.5),
        step("program", python("import os; print('ranks:', os.environ.get('WORLD_SIZE'))")),
        step("not here", OnRanks(planted.good), needs=("cuda",)),
        step("last", OnRanks(planted.good)),
    ]
    code, found, page = results(tmp_path, 2, steps)
    assert code == 1
    passed = ("first", "program", "last")
    assert {name: own["status"] for name, own in found.items()} == {
        **dict.fromkeys(found, "failed"),
        **dict.fromkeys(passed, "passed"),
        "not here": "skipped",
    }
    assert found["last"]["said"] == "2 ranks"
    assert re.search(r"rank 1 wrong: not equal .* from step 2 on: matrix 1 parameter", found["wrong"]["said"])
    assert "rank 0" not in found["wrong"]["said"]  # its fragments are right
    assert "rank 0 hung: did not end within 12 seconds" in found["hang"]["said"]
    stacks = dict(found["hang"]["details"])
    assert "waits_for_ever" in stacks["rank 0, hung"]
    assert "barrier" in stacks["rank 0, hung"]
    assert "planted_steps.py" in stacks["rank 1, hung"]
    assert "rank 1 died: its process ended, exit code 7" in found["death"]["said"]
    assert "the last words" in dict(found["death"]["details"])["rank 1, died"]
    assert "exit code 3: no such kernel" in found["failing program"]["said"]
    assert "did not end within 0.5 seconds" in found["endless program"]["said"]
    assert found["program"]["said"] == "ranks: None"
    assert "CUDA" in found["not here"]["said"]
    for name in ("wrong", "hang", "death", "failing program"):
        assert f"### {name}" in page
        assert f"what {name} means" in page
    assert "### last" not in page
    assert "**Do not train with this**: 3 passed, 5 failed, 1 skipped; wrong results in `wrong`." in page


def test_one_process(tmp_path: Path, forked: None) -> None:
    """The first steps of a real run; processes are others where the environment is another."""
    name = "CANZONA_ACCEPTANCE"
    steps = [
        STEPS["machine/device"],
        STEPS["machine/ranks"],
        STEPS["layouts/muon/whole/float32"],
        STEPS["audit/measured-after-recording/whole"],
        step("without", OnRanks(planted.variable, (name,))),
        step("with", OnRanks(planted.variable, (name,), variables=((name, "is set"),))),
    ]
    code, found, page = results(tmp_path, 1, steps)
    assert code == 0
    assert [own["status"] for own in found.values()] == ["passed", "skipped", *["passed"] * 4]
    assert "several ranks" in found["machine/ranks"]["said"]
    for name in ("layouts/muon/whole/float32", "audit/measured-after-recording/whole"):
        assert found[name]["said"].startswith("equal to the bit")
    assert [found["without"]["said"], found["with"]["said"]] == ["not set", "is set"]
    assert "**Nothing failed**: 5 passed, 0 failed, 1 skipped." in page
    assert torch.__version__ in page


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "chosen"), [(2, ["*"]), (4, ["*hsdp*", "*tp-ddp*", "*both-dims*", "*stages*"])])
def test_every_step_on_launched_ranks(ranks: int, chosen: list[str], tmp_path: Path) -> None:
    """By torchrun, every step that a CPU can take; on four ranks only those that need so many."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    only = [argument for pattern in chosen for argument in ("--only", pattern)]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "acceptance", "--dry", *only, "--output", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leaked" not in done.stderr
    found = json.loads((files_of(tmp_path) / "all" / "acceptance.json").read_text())["steps"]
    machine, steps = AcceptedMachine("cpu", ranks), {step.name: step for step in all_steps(dry=True)}
    assert len(found) == len(steps) or chosen != ["*"]
    for own in found:
        assert (own["status"] == "skipped") == bool(machine.missing(steps[own["name"]])), own
        assert own["status"] == "skipped" or "up to rounding" not in own["said"]


def test_a_result_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that a step has begun: a machine that dies in it says which one it was. Two files hold everything."""
    monkeypatch.setattr("acceptance.journal.SELDOM", 0.0)
    (files_of(tmp_path / "out") / "before").mkdir(parents=True)
    (files_of(tmp_path / "out") / "before" / "acceptance.md").write_text("what an earlier part found")
    journal = AcceptanceJournal(tmp_path / "out", "part", {"torch": "1.2.3"})
    began = StepResult("one", "it works", "it does not", 2, "running")
    journal.add(began)
    with tarfile.open(tmp_path / "out" / "acceptance.tar.gz") as archive:
        assert {"out-files/before/acceptance.md", "out-files/part/acceptance.md"} <= set(archive.getnames())
        written = archive.extractfile("out-files/part/acceptance.json")
        assert written is not None
        found = json.loads(written.read())
    assert not found["ok"]
    assert not found["complete"]
    assert found["steps"][0]["status"] == "running"
    assert re.search("`one` was the last step to begin.*an earlier part", journal.page.read_text(), re.DOTALL)
    journal.add(StepResult("one", "it works", "it does not", 2, "passed", "all | bits"))
    assert [own.status for own in journal.results] == ["passed"]
    assert "all \\| bits" in journal.page.read_text()
    journal.finish()
    assert json.loads((files_of(tmp_path / "out") / "part" / "acceptance.json").read_text())["ok"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["acceptance.md", "acceptance.tar.gz"]


def test_a_step_is_judged_by_what_failed_first() -> None:
    """Ranks may die only where they should; who hangs waits for who failed; errors are no wrong numbers."""
    ends = [RankEnd(0, "died", "exit code -6"), RankEnd(1, "passed", "stayed away")]
    may, must_not = step("one", OnRanks(planted.good, ends_ranks=True)), step("one", OnRanks(planted.good))
    assert judged(may, ends, 2).status == "passed"
    assert judged(must_not, ends, 2).status == "failed"
    assert judged(may, [RankEnd(0, "hung", "did not end"), ends[1]], 2).status == "failed"
    found = judged(must_not, [RankEnd(0, "hung", "did not end"), RankEnd(1, "failed", "no memory")], 2)
    assert found.said.splitlines()[0] == "rank 1 failed: no memory"
    assert verdict([found], complete=True).startswith("**Something failed**: 0 passed, 1 failed, 0 skipped. No result")


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [(1, "several ranks"), (2, "in fours"), (2, "from four on"), (5, "an even number"), (6, "power of two")],
)
def test_what_cannot_be_tried_says_why(ranks: int, missing: str) -> None:
    machine = AcceptedMachine("cpu", ranks)
    reasons = {name: machine.missing(own) for name, own in STEPS.items()}
    assert any(missing in reason for reason in reasons.values())
    for name, own in STEPS.items():
        assert ("CUDA" in reasons[name]) == ("cuda" in own.needs)
        assert own.shows
        assert own.failing


def test_what_is_no_failed_step_has_another_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 says that a step failed. Here none began."""
    if not torch.cuda.is_available():
        assert main(["--output", str(tmp_path)]) == 2
        assert re.search("CUDA.*--dry", capsys.readouterr().err, re.DOTALL)
        assert list(tmp_path.iterdir()) == []
    assert main(["--dry", "--only", "nothing*"]) == 2
    assert "--list" in capsys.readouterr().err
    (tmp_path / "taken").write_text("")
    assert main(["--dry", "--output", str(tmp_path / "taken")]) == 2
    assert "FileExistsError" in capsys.readouterr().err


# -- parts -----------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, as torch counts them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_ranks_that_share_a_gpu_talk_through_gloo(gpus: None) -> None:
    assert [backend_for("cuda", ranks) for ranks in (1, 2, 4)] == ["nccl", "gloo", "gloo"]
    assert backend_for("cpu", 1) == "gloo"
    assert ranks_here(None, "cuda") == (1, 2, 4)
    assert ranks_here((2,), "cuda") == (2,)
    places, _store = processes.places_here(2, "cuda", 1.0)
    assert [place.device_index for place in places] == [0, 0]


def found_in(output: Path) -> dict[str, dict[str, str]]:
    found = json.loads((files_of(output) / "some" / "acceptance.json").read_text())
    return {own["name"]: own for own in found["steps"]}


@pytest.fixture
def in_background() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes steps up to the last second."""
    monkeypatch.setattr(supervisor, "SHORTEST", 1.0)
    monkeypatch.setattr(supervisor, "PACKING", 0.0)


@pytest.mark.usefixtures("in_background", "no_reserve")
def test_time_that_is_over_ends_no_record_and_fails_nothing(tmp_path: Path) -> None:
    """A program that takes too long says what it knows; what finds no time is skipped; everything is in the archive."""
    says = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('so far 3 of 9')"
    steps = [step("long", python(says)), step("late", OnRanks(planted.good))]
    folder = tmp_path / "results"
    assert accept(steps, ONE, folder, "some", time.monotonic() + 8) == 0
    found = found_in(folder)
    assert found["long"]["status"] == found["late"]["status"] == "skipped"
    assert "no time" in found["long"]["said"]
    assert "so far 3 of 9" in (files_of(folder) / "some" / "long.log").read_text()
    with tarfile.open(folder / "acceptance.tar.gz") as archive:
        assert "results-files/some/long.log" in archive.getnames()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupt_leaves_an_archive(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "acceptance", "correctness", "--dry", "--output", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with interrupts_reach_programs():  # these tests may run in the background
        started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with started as process:
        page = tmp_path / "out-files" / "correctness" / "acceptance.json"
        while process.poll() is None and not (page.exists() and json.loads(page.read_text())["steps"]):
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=120)[1].decode()
    assert process.returncode != 0, said
    with tarfile.open(tmp_path / "out" / "acceptance.tar.gz") as archive:
        assert "out-files/correctness/acceptance.json" in archive.getnames()


WITHOUT = """if True:
    import importlib.abc, sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("rich", "hypothesis", "plotly", "jinja2"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    from importlib import util
    find, util.find_spec = util.find_spec, lambda name: None if name == "rich" else find(name)
    from canzona_compile.__main__ import main
    sys.exit(main(sys.argv[1:]))
    """


def test_commands_run_where_rich_is_not_installed(tmp_path: Path) -> None:
    tuned = ("tune", "--dry", "--rounds", "1", "--output", str(tmp_path), "1x2048x2048")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *tuned],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert {own["op"] for own in records} == {"sym_gemm", "gemm_axpby"}
    assert {own["choice"] for own in records} == {"library"}


def test_gpu_tests_import_nothing_that_a_bare_machine_lacks() -> None:
    collect = WITHOUT.replace("from canzona_compile.__main__ import main", "from pytest import main")
    options = ("-p", "no:hypothesispytest", "--collect-only", "-q", "-m", "gpu")
    done = subprocess.run(
        [sys.executable, "-c", collect, *options, *files_of_gpu_tests()],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for path in files_of_gpu_tests():
        assert path in done.stdout
