"""Megatron-core's GPTs, trained by our optimizers inside Megatron's own: `make test-megatron` installs it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from canzona_compile.errors import CanzonaError
from tests.harness.marks import first
from tests.harness.ranks import run

WHY = "the packages megatron-core and emerging-optimizers are not installed"
pytest.importorskip("megatron.core.optimizer", reason=WHY, exc_type=ImportError)
pytest.importorskip("emerging_optimizers", reason=WHY, exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):  # of Megatron, about what is not installed
    models: Any = importlib.import_module("tests.harness.megatron_models")
    megatron: Any = importlib.import_module("canzona_compile.integrations.megatron")
Case = models.Case

TRAINED = {  # CI has the first
    "muon, tp x dp": (4, Case(tp=2, clip=0.5)),
    "muon, pipeline": (2, Case(pp=2)),
    "muon, zero-1 x tp, our owners": (4, Case(tp=2, bf16=True, layer_wise=True, scattered=True, clip=0.5)),
    "muon of megatron-lm, zero-1": (2, Case(bf16=True, layer_wise=True, optimizer="muon", megatron_lm=True)),
    "soap of emerging-optimizers, tp": (2, Case(tp=2, optimizer="soap")),
    "experts": (4, Case(tp=2, ep=2, experts=4, sequence=True)),
    "experts, cut": (4, Case(tp=2, ep=2, experts=4, expert_tp=2, sequence=True)),
    "muon, interleaved pipeline x tp": (4, Case(tp=2, pp=2, vp=2)),
    "muon, copies": (2, Case()),
    "muon, tp": (2, Case(tp=2)),
    "muon, gated attention": (2, Case(tp=2, gate=True)),
    "muon, tp, bf16, clipped": (2, Case(tp=2, bf16=True, clip=0.5)),
    "muon, zero-1": (2, Case(bf16=True, layer_wise=True)),
    "soap, tp, sequence, tied": (2, Case(tp=2, optimizer="canzona_soap", sequence=True, tied=True)),
    "soap, zero-1 x tp": (4, Case(tp=2, bf16=True, layer_wise=True, optimizer="soap")),
    "soap of megatron-lm": (2, Case(tp=2, optimizer="soap", megatron_lm=True)),
}


@pytest.mark.parametrize("name", first(TRAINED, 7))
def test_weights_are_those_of_plain_optimizers_on_whole_matrices(name: str) -> None:
    world, case = TRAINED[name]
    found = run(world, models.trained, case)
    assert all(different == [] for _, different in found)
    assert all(compared for compared, _ in found)


RESUMED = {
    "muon, tp": (2, Case(tp=2)),
    "soap, tp": (2, Case(tp=2, optimizer="canzona_soap")),
    "soap, zero-1": (2, Case(bf16=True, layer_wise=True, optimizer="soap")),
    "muon, interleaved pipeline": (2, Case(pp=2, vp=2)),
    "a leaf named like a part, tp": (2, Case(tp=2, optimizer="a_leaf_v")),
}


@pytest.mark.parametrize("name", first(RESUMED, 2))
def test_a_checkpoint_goes_on_with_equal_bits(name: str, tmp_path: Path) -> None:
    world, case = RESUMED[name]
    assert all(run(world, models.resumed, case, tmp_path / "saved"))


def test_the_state_of_soap_loads_on_another_number_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Also what was loaded and saved before any step."""
    folders = tmp_path / "saved", tmp_path / "again"
    saved = run(2, models.saved, Case(tp=2, optimizer="canzona_soap"), *folders)[0]
    for folder in folders:
        loaded = run(2, models.loaded, Case(tp=1, optimizer="canzona_soap"), folder)[0]
        assert saved.keys() == loaded.keys()
        assert [name for name in saved if not all(map(equal, saved[name], loaded[name]))] == []


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


MISTAKES = {
    "unknown": (Case(optimizer="muonn"), r"optimizer='muonn' .*is not known\n.*one of .*canzona_muon"),
    "elementwise": (Case(optimizer="adam"), "optimizer='adam' .*steps no matrices"),
    "muon of megatron": (Case(optimizer="muon"), "TensorParallelMuon of Megatron puts matrices together by itself"),
    "zero-1 in float32": (Case(layer_wise=True), r"in float32 there are none\n.*bf16=True"),
    "muon of megatron-lm, its own scale": (
        Case(optimizer="muon", megatron_lm=True, scale=1.0),
        "muon_extra_scale_factor is 1.0, .* as with 0.2\n.*--muon-coefficient-type simple",
    ),
    "a field of muon": (
        Case(given=(("muon_scale_mode", "shape_scaling"),)),
        "muon_scale_mode is 'shape_scaling', and canzona_muon steps as with 'spectral'",
    ),
    "precision of muon": (
        Case(precision="highest"),
        "muon_fp32_matmul_prec is 'highest', and canzona_muon steps as with 'medium'",
    ),
    "a field of soap": (
        Case(optimizer="canzona_soap", given=(("soap_shampoo_beta", 0.9), ("soap_precondition_frequency", 5))),
        r"does not read soap_shampoo_beta, soap_precondition_frequency\n.*optimizer=\"soap\"",
    ),
    "zero-1 of elements": (Case(zero1=True), r"a part of the gradients.*\n.*use_layer_wise_distributed_optimizer=True"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_stepped_is_refused(name: str) -> None:
    case, text = MISTAKES[name]
    assert [told for told in run(2, models.refused, case) if not re.search(text, told, re.DOTALL)] == []


def test_what_nobody_wrapped_steps_no_fragments() -> None:
    for told in run(2, models.unwrapped, Case(tp=2)):
        assert re.search(r"nobody wrapped it.*\n.*get_megatron_optimizer of canzona_compile", told, re.DOTALL)
    assert run(2, models.unwrapped, Case()) == ["nothing"] * 2


def test_other_weights_and_other_groups_are_refused() -> None:
    for other_model, other_groups, no_groups in run(2, models.wrong_calls):
        assert "is in none of the model chunks" in other_model
        assert "made for 2 tensor-parallel ranks, but the group has 1" in other_groups
        assert "the process groups lack dp_cp" in no_groups


def test_a_name_means_one_class() -> None:
    megatron.register("a_leaf_v", models.LeafV)
    with pytest.raises(CanzonaError, match=r"means SOAP already\n.*register\('soap'\)(.|\n)*another name"):
        megatron.register("soap", models.LeafV)


def test_the_example_goes_on_from_its_checkpoint_with_the_losses_of_one_process(tmp_path: Path) -> None:
    def losses(ranks: int, *options: str) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        script = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"
        done = subprocess.run([*command, str(script), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("step")]

    first = losses(2, "--tp", "2", "--steps", "2", "--save", str(tmp_path))
    rest = losses(2, "--tp", "2", "--steps", "4", "--save", str(tmp_path))
    assert first + rest == losses(1, "--steps", "4")
