"""`accept` in parts on one GPU: which ranks take which step, how little time is spent, and what is written when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from canzona_compile.__main__ import main
from canzona_compile.machine.hardware import Machine
from canzona_compile.tools import processes
from canzona_compile.tools.acceptance.command import (
    PARTS,
    accept,
    all_steps,
    alone,
    interrupted_by_signals,
    ranks_here,
    taken,
)
from canzona_compile.tools.acceptance.machine import AcceptedMachine
from canzona_compile.tools.acceptance.side_by_side import same_operators
from canzona_compile.tools.acceptance.step import AcceptanceStep, OneProgram, OnRanks
from canzona_compile.tools.acceptance.steps_machine import files_of_gpu_tests
from canzona_compile.tools.acceptance.supervisor import interrupts_reach_programs
from canzona_compile.tools.processes import backend_for
from tests.lowering.emitted_steps import emitted
from tests.tools import planted_steps as planted

ROOT = Path(__file__).parents[2]


def one_gpu(ranks: int) -> AcceptedMachine:
    return AcceptedMachine("cuda", ranks, ROOT, "nccl" if ranks == 1 else "gloo")


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
    assert [(place.backend, place.device_index) for place in places] == [("gloo", 0), ("gloo", 0)]


def test_one_gpu_takes_every_layout_and_says_what_it_cannot() -> None:
    machines = {n: one_gpu(n) for n in (1, 2, 4)}
    steps = all_steps(dry=False, part="correctness")
    found = taken(steps, machines)
    by_name: dict[str, list[int]] = {}
    for step, ranks in found:
        by_name.setdefault(step.name, []).append(ranks)
    assert by_name["layouts/muon/whole/float32"] == [1]
    assert by_name["layouts/muon/fsdp/float32"] == [2, 4]
    assert by_name["layouts/muon/hsdp/float32"] == [4]
    assert by_name["zero1/muon/gather-step"] == [2, 4]
    assert found[-1][0].name == "audit/peer-that-stays-away/fsdp"
    skipped = {step.name for step, ranks in found if machines[ranks].missing(step)}
    assert skipped == {"machine/two-communicators"}
    assert "NCCL" in machines[4].missing(next(s for s in steps if s.name in skipped))
    numbers = [ranks for _, ranks in found]
    assert numbers == sorted(numbers)


def test_ranks_first_take_what_fewer_could_not() -> None:
    steps = [step for step in all_steps(dry=False, part="correctness") if step.name.startswith("layouts/muon/")]
    names = [step.name for step, ranks in taken(steps, {n: one_gpu(n) for n in (2, 4)}) if ranks == 4]
    assert names.index("layouts/muon/hsdp/float32") < names.index("layouts/muon/fsdp/float32")


def step(name: str, work: OnRanks | OneProgram, limit: float = 60.0) -> AcceptanceStep:
    return AcceptanceStep(name, f"{name} works", f"what {name} means", work, (), limit)


def found_in(folder: Path) -> dict[str, dict[str, str]]:
    return {own["name"]: own for own in json.loads((folder / "acceptance.json").read_text())["steps"]}


@pytest.fixture
def in_background() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_background")
def test_time_that_is_over_ends_no_record_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that takes too long says what it knows; what finds no time is skipped; everything is in the archive."""
    monkeypatch.setattr("canzona_compile.tools.acceptance.supervisor.SHORTEST", 1.0)
    monkeypatch.setattr("canzona_compile.tools.acceptance.supervisor.PACKING", 0.0)
    says = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('so far 3 of 9')"
    steps = [step("long", OneProgram(("{python}", "-c", says))), step("late", OnRanks(planted.good))]
    machine = AcceptedMachine("cpu", 1, ROOT)
    folder = tmp_path / "results"
    assert accept(steps, machine, alone("cpu", 1), folder, (1,), time.monotonic() + 3) == 0
    found = found_in(folder)
    assert found["long"]["status"] == found["late"]["status"] == "skipped"
    assert "no time" in found["long"]["said"]
    assert "so far 3 of 9" in (folder / "long.log").read_text()
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert {"results/acceptance.json", "results/acceptance.md", "results/long.log"} <= set(archive.getnames())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupt_leaves_an_archive(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "canzona_compile", "accept", "correctness", "--dry", "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with interrupts_reach_programs():  # these tests may run in the background
        started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with started as process:
        page = tmp_path / "correctness" / "acceptance.json"
        while process.poll() is None and not (page.exists() and json.loads(page.read_text())["steps"]):
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=120)[1].decode()
    assert process.returncode != 0, said
    with tarfile.open(tmp_path / "correctness.tar.gz") as archive:
        assert "correctness/acceptance.json" in archive.getnames()


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt, match="SIGHUP"), interrupted_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interrupted_by_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_list_names_needs_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "--list", "--dry", "--ranks", "1,2"]) == 0
    said = capsys.readouterr().out
    for own in all_steps(dry=True):
        assert f"\n{own.name}: {own.shows}\n    needs " in said
    assert "layouts/muon/fsdp/float32" in said
    assert "here: ranks 2" in said
    assert "here: skipped, needs ranks in fours" in said
    assert "NCCL" in said


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_steps_that_say_what_they_show(part: str) -> None:
    for dry in (False, True):
        assert all(own.shows and own.failing for own in all_steps(dry, part))
        assert all_steps(dry, part)


def test_a_record_of_each_test_is_written_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, signal, pytest\n"
        "def test_good(record_property): record_property('apart', 0.5)\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_not(): pass\n"
        "def test_dies(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    plugin = ("-p", "canzona_compile.tools.acceptance.recorded_tests", "--record", str(tmp_path / "tests.jsonl"))
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), *plugin]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(tmp_path / "test_some.py")], env=environment, capture_output=True, check=False)
    records = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
    assert [own["outcome"] for own in records] == ["passed", "failed", "skipped"]
    assert records[0]["apart"] == 0.5
    assert "assert 1 == 2" in records[1]["said"]
    assert "not here" in records[2]["said"]


def test_bits_are_asked_for_where_operators_are_the_same() -> None:
    """On CUDA Muon's symmetric products are operators of this package, and matrices of equal shape are stacked."""
    assert not same_operators(emitted("muon", (1, 2)))
    assert same_operators(emitted("muon", (1, 2), matrices=2, machine=Machine("cpu", "gloo", 1)))


WITHOUT = """if True:
    import importlib.abc, sys

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("rich", "scipy", "hypothesis", "plotly", "jinja2"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    from importlib import util
    find, util.find_spec = util.find_spec, lambda name: None if name in ("rich", "scipy") else find(name)
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
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            collect,
            "-p",
            "no:hypothesispytest",
            "--collect-only",
            "-q",
            "-m",
            "gpu",
            *files_of_gpu_tests(),
        ],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for path in files_of_gpu_tests():
        assert path in done.stdout
