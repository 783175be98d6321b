"""A save that does not come to its end: the checkpoint before it loads, and whoever is left trains on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.harness.checkpoint_routes import load_shards, save_shards
from tests.harness.checkpointing import END, SAVED, Run, once
from tests.harness.layouts import Case
from tests.harness.marks import first
from tests.harness.ranks import Died, run

FIRST = SAVED - 3  # steps before the checkpoint that is good


class Fragile(dcp.FileSystemWriter):
    """Rank 1 comes to harm when some of it is written."""

    def __init__(self, path: Path, dies: bool) -> None:
        super().__init__(path)
        self.dies = dies

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        done = super().write_data(*args, **kwargs)
        if dist.get_rank() == 1:
            if self.dies:
                os._exit(3)
            raise OSError("disk full")
        return done


def save_twice(name: str, case: Case, folder: Path, dies: bool) -> tuple[str, list[str]]:
    """A good checkpoint and a bad one: the error, and what differs after further steps."""
    part = Run(name, case)
    part.steps(0, FIRST)
    save_shards(part, folder / "good")
    part.steps(FIRST, SAVED)
    model, state = get_state_dict(part.model, part.optimizer)
    said = ""
    try:
        dcp.save({"model": model, "optimizer": state}, storage_writer=Fragile(folder / "bad", dies))
    except (dcp.CheckpointException, RuntimeError) as error:
        said = str(error)
    if dies:
        return said, []
    wrong = part.differs(SAVED)
    part.steps(SAVED, END)
    return said, wrong + part.differs(END)


def load_good(name: str, case: Case, folder: Path) -> list[str]:
    part = Run(name, case, begun=False)
    load_shards(part, folder / "good")
    wrong = part.differs(FIRST)
    part.steps(FIRST, END)
    return wrong + part.differs(END)


@pytest.mark.parametrize("case", first([Case("fsdp", (2,)), Case("ddp", (2,))]), ids=str)
def test_a_rank_that_cannot_write(case: Case, tmp_path: Path) -> None:
    for said, wrong in run(2, save_twice, "soap", case, tmp_path, dies=False, after=once("soap")):
        assert "disk full" in said
        assert wrong == []
    assert run(2, load_good, "soap", case, tmp_path, after=once("soap")) == [[], []]


def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    case = Case("fsdp", (2,))
    after = once("shampoo")
    survivor, died = run(2, save_twice, "shampoo", case, tmp_path, dies=True, dying=[1], after=after)
    assert survivor[0]
    assert died == Died(3)
    written = [len(list((tmp_path / kind).glob("*.distcp"))) for kind in ("good", "bad")]
    assert written == [2, 2], "it died when the files of both were there"
    assert not (tmp_path / "bad" / ".metadata").exists()
    for loaders in (Case("plain", (1,)), Case("fsdp", (3,))):
        assert run(loaders.world, load_good, "shampoo", loaders, tmp_path, after=after) == [[]] * loaders.world


def raise_midway(name: str, case: Case, where: str) -> tuple[list[str], list[str]]:
    """`state_dict` breaks at the second matrix, or in a hook: the errors, and what differs afterwards."""
    part = Run(name, case)
    part.steps(0, SAVED)
    before = [id(state) for state in part.optimizer.state.values()]
    said = []
    with pytest.MonkeyPatch.context() as patch:
        if where == "hook":
            handle = part.optimizer.register_state_dict_post_hook(broken)
        else:
            patch.setattr(dist, "broadcast", breaking_at(8))
        for _ in range(2):
            try:
                part.optimizer.state_dict()
            except OSError as error:
                said.append(str(error))
    if where == "hook":
        handle.remove()
    found = [] if [id(state) for state in part.optimizer.state.values()] == before else ["the state is portable"]
    part.steps(SAVED, END)
    return said, found + part.differs(END)


def broken(*_: Any) -> None:
    raise OSError("broken")


def breaking_at(call: int) -> Any:
    whole, calls = dist.broadcast, [0]

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return broken() if calls[0] % call == 0 else whole(*args, **kwargs)

    return broadcast


@pytest.mark.parametrize("where", ["broadcast", "hook"])
def test_a_state_dict_that_breaks_leaves_the_optimizer_as_it_was(where: str) -> None:
    for said, wrong in run(2, raise_midway, "soap", Case("ddp", (2,)), where, after=once("soap")):
        assert said == ["broken", "broken"]
        assert wrong == []
