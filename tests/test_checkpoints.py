"""Checkpoints: saved on some ranks in one layout, loaded on others in another, wrapped or plain, all bits equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoint_routes import LOAD, SAVE
from tests.checkpointing import END, SAVED, Run
from tests.layouts import Case
from tests.ranks import run

ONE = Case("plain", (1,))
SAVERS = [(ONE, False), (ONE, True), (Case("fsdp", (2,)), True), (Case("hsdp", (2, 2)), True)]
LOADERS = [
    (ONE, False),
    (ONE, True),
    (Case("tp_columns", (2,)), True),
    (Case("ddp", (2,)), True),
    (Case("fsdp", (3,)), True),
]
ALL = list(LOAD)
NO_LISTS = [name for name in ALL if "flat" not in name]  # torch flattens tensors, numbers and dicts only
FORMS = ("shards", "by hand")  # the optimizer gets the same from the other ways
Saved = Callable[[str], Path]


def label(case: Case, wrapped: bool) -> str:
    return f"{case} {'wrapped' if wrapped else 'plain'}"


def save(name: str, case: Case, wrapped: bool, folder: Path, ways: Sequence[str], dtype: torch.dtype) -> list[str]:
    """Run up to the checkpoint, on ranks, and save it in some ways."""
    part = Run(name, case, dtype, wrapped)
    part.steps(0, SAVED)
    for way in {LOAD[way][0] for way in ways}:
        SAVE[way](part, folder / way)
    found = part.differs(SAVED)
    part.steps(SAVED, END)
    return found + part.differs(END)


def load(
    name: str, case: Case, wrapped: bool, folders: Sequence[Path], ways: Sequence[str], dtype: torch.dtype
) -> dict[str, list[str]]:
    """Load each checkpoint each way, and go on: what is wrong."""
    wrong = {}
    for folder in folders:
        for way in ways:
            part = Run(name, case, dtype, wrapped, begun=False)
            LOAD[way][1](part, folder / LOAD[way][0])
            found = part.differs(SAVED)
            if way in FORMS:
                part.steps(SAVED, END)
                found += part.differs(END)
            wrong[f"{folder.name}, {way}"] = found
    return {what: found for what, found in wrong.items() if found}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of an optimizer's checkpoints, one in it per saver; made once."""
    made: dict[str, Path] = {}

    def folder(name: str, ways: Sequence[str] = ALL, dtype: torch.dtype = torch.float32) -> Path:
        key = f"{name}-{dtype}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            for case, wrapped in SAVERS:
                own = made[key] / label(case, wrapped)
                own.mkdir()
                wrong = run(case.world, save, name, case, wrapped, own, ways, dtype)
                assert wrong == [[]] * case.world
        return made[key]

    return folder


def check(folder: Path, name: str, case: Case, wrapped: bool, ways: Sequence[str], dtype: torch.dtype) -> None:
    folders = sorted(folder.iterdir())
    assert len(folders) == len(SAVERS)
    assert run(case.world, load, name, case, wrapped, folders, ways, dtype) == [{}] * case.world


@pytest.mark.ranks
@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: label(*loader))
@pytest.mark.parametrize("name", ["muon", "shampoo", "soap", "normuon"])
def test_every_way(saved: Saved, name: str, loader: tuple[Case, bool]) -> None:
    check(saved(name), name, *loader, ALL, torch.float32)
