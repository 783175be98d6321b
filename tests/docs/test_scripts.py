"""Every script of the pages runs, on real ranks, and trains with the bits of the plain optimizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from canzona_compile.__main__ import main
from tests.docs.scripts import ALONE, ROOT, SCRIPTS, path_of, ran
from tests.harness.marks import first
from tests.harness.verdicts import EXAMPLES

NEEDED = {
    "accelerate_loop": "accelerate",
    "fabric_loop": "lightning_fabric",
    "lightning_trainer": "lightning",
    "trainer": "transformers",
    "sft_trainer": "trl",
    "torchtitan_optimizers": "torchtitan",
    "eight_bit": "torchao",
    "deepspeed_engine": "deepspeed",
    "own_muon": "muon",
    "lora": "peft",
    "schedule_free": "schedulefree",
    "float8": "torchao",
}
PICTURED = {
    "report.svg": ("rank\xa03", "384x256"),
    "journey.svg": ("rank 3", "0.weight: rows 0 to 96"),
    "choice.svg": ("hidden\xa0matrix", "embedding"),
    "explain.svg": ("compiled", "local"),
    "plan_64.svg": ("predicted", "What\xa0to\xa0do\xa0next"),
    "one_matrix.svg": ("rank 3", "rows 288 to 384", "3 compute", "to the owner, 144.0 KiB"),
}
STEPS = 5  # at least, of every script that trains
# They compare by themselves, or train nothing.
SHOWING = ("checkpoints", "changed_choice", "planning", "graphs", "skip_steps", "stored_state")
WAYS = ["accelerate_loop", "accelerate_loop --fsdp2", "trainer", "trainer --fsdp2", "fabric_loop"]
WAYS += ["sft_trainer", "sft_trainer --fsdp2", "lightning_trainer", "lightning_trainer --ddp", "torchtitan_optimizers"]
ELSEWHERE = {*ALONE, *SHOWING, *(way.split()[0] for way in WAYS), "eight_bit", "deepspeed_engine"}
TRAINING = [name for name in SCRIPTS if name not in ELSEWHERE]
WHOLE = {"trainer", "sft_trainer", "lightning_trainer --ddp", "accelerate_loop"}  # of the ways: DDP
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
LLAMA = [f"model.layers.0.{name}.weight" for name in [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]]
NORMS = ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"]
CHOICES = {  # what Muon trains in the models of these scripts, and what AdamW: in a Llama, in the others
    True: (LLAMA, [f"{name}.weight" for name in ["model.embed_tokens", *NORMS, "lm_head"]]),
    False: (
        [f"hidden.{i}.0.weight" for i in range(3)],
        ["embedding.weight", *[f"hidden.{i}.0.bias" for i in range(3)], "head.weight", "head.bias"],
    ),
}


def test_all_scripts_are_here_and_short() -> None:
    assert {path.stem for path in (ROOT / "docs" / "scripts").glob("*.py")} == set(SCRIPTS)
    lines = {name: path_of(name).read_text(encoding="utf-8").splitlines() for name in SCRIPTS}
    assert [name for name, text in lines.items() if len([line for line in text if "--8<--" not in line]) > 80] == []


@pytest.mark.parametrize("name", first(TRAINING))
def test_a_training(name: str) -> None:
    if find_spec(NEEDED.get(name, "torch")) is None:
        pytest.skip(f"{NEEDED[name]} is not installed")
    found = ran(path_of(name), SCRIPTS[name])
    assert [one.differing for one in found] == [[]] * SCRIPTS[name]
    assert [mistake for one in found for mistake in EXAMPLES.mistakes(name, one.reached)] == []
    assert all(one.compared >= STEPS for one in found)
    losses = re.findall(r"loss\D*([\d.]+)", "".join(one.said for one in found))
    assert len(losses) >= STEPS


@pytest.mark.parametrize("way", first(WAYS))
def test_a_framework(way: str, tmp_path: Path) -> None:
    """Each parameter has the optimizer that suits it, and the bits of a plain chain, also in a run that is resumed."""
    name, *options = way.split()
    if find_spec(NEEDED[name]) is None:
        pytest.skip(f"{NEEDED[name]} is not installed")
    through = ran(path_of(name), 2, *options, "--output", str(tmp_path / "ours"))
    resumed = ran(path_of(name), 2, *options, "--output", str(tmp_path / "ours"), "--resume", how="alone")
    runs = [through, resumed]
    if way in WHOLE:  # the plain Muon computes sharded matrices with other bits
        runs.append(ran(path_of(name), 2, *options, "--output", str(tmp_path / "plain"), how="plain"))
    trained = through[0].trained
    assert [one.differing for one in through] == [[], []]
    assert [mistake for one in through for mistake in EXAMPLES.mistakes(way, one.reached)] == []
    assert all(one.compared >= STEPS * len(trained) for one in through)
    assert [one.trained for found in runs for one in found] == [trained] * 2 * len(runs)
    assert {(how.changed, how.sharded) for how in trained.values()} == {(True, way not in WHOLE)}
    prefix = "model." if name == "lightning_trainer" else ""
    muon, adamw = CHOICES[name in ("trainer", "sft_trainer")]
    assert {param: how.by for param, how in trained.items()} == {
        **{f"{prefix}{param}": "Muon" for param in muon},
        **{f"{prefix}{param}": "AdamW" for param in adamw},
    }
    losses = re.findall(r"loss\D*([\d.]+)", "".join(one.said for one in through))
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("checkpoints", ("equal bits",)),  # it compares by itself: with a training that nothing broke
        ("changed_choice", ("begin anew: ['1.weight']", "step 19: loss")),
        ("planning", ("on fsdp=2",)),
        ("skip_steps", (", left out, 0 not finite so far", "step 16: loss inf, stepped, 1 not finite so far")),
        ("stored_state", ("momentum_buffer: int8, ", "exp_avg: bfloat16, ", "equal to the bit")),
        ("graphs", ("prepare", "start_all_to_all", "muon_48x48_f32_compute_stacked", "fuse-collectives")),
    ],
)
def test_a_script_shows(name: str, words: tuple[str, ...]) -> None:
    said = ran(path_of(name), SCRIPTS[name])[0].said
    assert [word for word in words if word not in said] == []


@pytest.mark.full
def test_what_becomes_of_six_optimizers() -> None:
    lines = ran(path_of("any_optimizer"), 1)[0].said.splitlines()
    kinds = dict(line.split(". ")[0].split(": ") for line in lines)
    refused = dict.fromkeys(("Keeping", "Coupled", "LBFGS"), "refused")
    assert kinds == {"Spectral": "compiled", "Recorded": "compiled", "Branching": "eager", **refused}
    page = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    assert [line for line in lines if line.split(". ")[0] not in page] == []
    assert "captured by dispatch" in lines[1]


@pytest.mark.full
def test_a_pass_changes_owners() -> None:
    said = ran(path_of("a_pass"), 1)[0].said
    changed = [line for line in said.splitlines() if line.startswith(("-  ", "+  "))]
    assert [re.findall(r"owner=(\(\d, \d\))", line)[0] for line in changed] == ["(0, 0)", "(0, 1)"] * 2


def test_rates_by_shape_follow_a_schedule() -> None:
    said = ran(path_of("rates"), 1)[0].said
    assert "hidden matrix; lr=0.001" in said
    assert "rates [0.01, 0.00707, 6e-05]" in said  # the second is by sqrt(64 / 128), and all are warmed up


def test_a_layout_is_planned() -> None:
    """The owner has half of the matrix: the other half comes to it in two bytes per element, and goes back."""
    said = ran(path_of("a_layout"), 1)[0].said
    assert re.search(r"1x3: 0-2 +1 +3 KiB +3 KiB ", said)


@pytest.mark.full
@pytest.mark.parametrize("name", ["an_optimizer", "my_model"])
def test_a_build_is_checked(name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["verify", f"docs.scripts.{name}:build", "--ranks", "2", "--layout", "fsdp", "--steps", "2"]) == 0
    assert "4 leaves, every bit equal" in " ".join(capfd.readouterr().out.split())


@pytest.mark.full
def test_a_distributed_build_is_checked(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["verify", "docs.scripts.their_optimizer:build", "--as-is", "--steps", "2"]) == 1
    assert "equal to rounding" in " ".join(capfd.readouterr().out.split())


@pytest.mark.full
def test_pictures_are_of_a_run(tmp_path: Path) -> None:
    ran(ROOT / "docs" / "diagrams.py", 4, str(tmp_path))
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(PICTURED)
    for name in drawn:
        words = " ".join("".join(node.itertext()) for node in ElementTree.parse(tmp_path / name).iter())
        kept = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        for word in PICTURED[name]:
            assert word in words
        assert "http" not in kept.replace("http://www.w3.org", "").replace("https://www.textualize.io", "")


@pytest.mark.full
def test_the_script_of_the_readme_by_torchrun(tmp_path: Path) -> None:
    """As somebody with the README alone runs it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "train.py").write_text(max(blocks, key=len), encoding="utf-8")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert "canzona  Muon+AdamW on 2 ranks" in done.stdout
    assert "parameters that each rank updates by itself" in done.stdout
