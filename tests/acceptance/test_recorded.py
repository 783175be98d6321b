"""What provokes recorded steps records them, on the stand-in for GPUs, where no GPU is."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from acceptance import steps_audit
from acceptance.step import AcceptanceRank
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.verification import layouts
from canzona_compile.tools.verification.findings import Tally
from tests.fake_cuda.on_device import on_stand_in, settled
from tests.fake_cuda.trainings import mesh_of_thread

CASES = [
    ("moving_gradients", "fsdp"),
    ("measured_after_recording", "fsdp"),
    ("loaded_in_mid_run", "fsdp"),
    ("another_plan", "fsdp"),
    ("two_optimizers", "fsdp"),
    ("gradient_missing_on_one_rank", "fsdp"),
]


def on_ranks(name: str, layout: str) -> list[str]:
    """Take a case on the stand-in, in the order in which work is written; what each rank says."""
    with on_stand_in(None, 2) as run:
        function = getattr(steps_audit, name)
        return run(lambda rank: function(AcceptanceRank(rank, 2, torch.device("cpu")), layout))


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, with meshes of their own; who compares parameters waits for the device."""

    def mesh_of(device: str, shape: tuple[int, ...]) -> DeviceMesh:
        return mesh_of_thread(shape, tuple("abc"[: len(shape)]))

    monkeypatch.setattr(layouts, "mesh_of", mesh_of)
    monkeypatch.setattr(Tally, "add", settled(Tally.add))


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_cases_of_recordings_record(name: str, layout: str, on_devices: None) -> None:
    for said in on_ranks(name, layout):
        assert "recorded" in said
        assert "equal" in said


def test_a_case_of_recordings_fails_without_one(monkeypatch: pytest.MonkeyPatch, on_devices: None) -> None:
    monkeypatch.setattr(steps_audit, "RECORDED", 1)
    with pytest.raises(CanzonaError, match="no step was recorded; equal"):
        on_ranks("loaded_in_mid_run", "fsdp")
