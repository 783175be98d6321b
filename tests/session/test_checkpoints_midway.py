"""Checkpoints in the midst of a training: going back to one, training on while it is written, each rank's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.harness.checkpoint_routes import LOAD, SAVE, load_shards
from tests.harness.checkpointing import END, EVERY, SAVED, Run, once
from tests.harness.layouts import Case
from tests.harness.marks import crossed, first
from tests.harness.ranks import run

CASES = [Case("fsdp", (2,)), Case("ddp", (2,))]


def go_back(name: str, case: Case, folder: Path) -> tuple[list[str], list[int]]:
    """To the checkpoint, from further on, each way; and what was captured before and after."""
    part = Run(name, case)
    part.steps(0, SAVED)
    for way, save in SAVE.items():
        save(part, folder / way)
    part.steps(SAVED, SAVED + EVERY)  # so that all code was met
    wrong, captures = [], [part.optimizer.canzona.report().captures]
    for way in ("flat shards", *LOAD):  # torch flattens what is in `optimizer.state` itself: as a first step left it
        LOAD[way][1](part, folder / LOAD[way][0])
        found = part.differs(SAVED)
        part.steps(SAVED, END)
        wrong += [f"{way}, {what}" for what in found + part.differs(END)]
        captures.append(part.optimizer.canzona.report().captures)
    return wrong, captures


@pytest.mark.parametrize(
    ("name", "case"), crossed(["muon", "soap", "host"], CASES, most=1), ids=str
)  # "host" is interpreted
def test_going_back_captures_nothing(name: str, case: Case, tmp_path: Path) -> None:
    for wrong, captures in run(2, go_back, name, case, tmp_path, after=once(name)):
        assert wrong == []
        assert captures == captures[:1] * len(captures)
        assert (captures[0] > 0) == (name != "host")


def save_meanwhile(name: str, case: Case, folder: Path) -> list[str]:
    """Train on while a thread writes, through a process group of its own."""
    part = Run(name, case)
    part.steps(0, SAVED)
    model, state = get_state_dict(part.model, part.optimizer)
    found = {"model": model, "optimizer": state}
    writing = dcp.async_save(found, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    part.steps(SAVED, END)
    writing.result()
    wrong = part.differs(END)
    other = Run(name, case, begun=False)
    load_shards(other, folder)
    wrong += other.differs(SAVED)
    other.steps(SAVED, END)
    return wrong + other.differs(END)


@pytest.mark.full
@pytest.mark.parametrize("case", first(CASES), ids=str)
def test_training_goes_on_while_a_checkpoint_is_written(case: Case, tmp_path: Path) -> None:
    assert run(2, save_meanwhile, "soap", case, tmp_path / "saved", after=once("soap")) == [[], []]
