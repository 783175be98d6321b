"""Checkpoints: saved on some ranks in one layout, loaded on others in another, wrapped or plain, all bits equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.harness.checkpoint_routes import LOAD, SAVE
from tests.harness.checkpointing import END, SAVED, Run, once
from tests.harness.layouts import Case
from tests.harness.marks import first, only
from tests.harness.ranks import run

Rank = tuple[Case, bool]  # the layout, and whether the optimizer is wrapped
Plan = Mapping[Rank, Sequence[str]]  # who saves, and the ways in which others load that

ONE = Case("plain", (1,))
SAVERS: Plan = {
    (ONE, False): ["shards", "by hand"],
    (ONE, True): ["flat shards"],
    (Case("fsdp", (2,)), True): ["shards", "full", "broadcast"],
    (Case("hsdp", (2, 2)), True): ["flat shards", "flat full", "by hand"],
}
LOADERS: list[Rank] = [
    (ONE, False),
    (ONE, True),
    (Case("tp_columns", (2,)), True),
    (Case("ddp", (2,)), True),
    (Case("fsdp", (3,)), True),
]
FAST = [("muon", LOADERS[0]), ("muon", LOADERS[3])]
FORMS = ("shards", "by hand")  # in other ways the optimizer is given the same as in these
# One rank of four owns nothing. Torch flattens only tensors, numbers and dicts.
FEW: Plan = {(Case("fsdp", (4,)), True): ["shards", "by hand"], (ONE, False): ["shards", "by hand"]}
Saved = Callable[..., Path]


def label(rank: Rank | str) -> str:
    return rank if isinstance(rank, str) else f"{rank[0]} {'wrapped' if rank[1] else 'plain'}"


def save(name: str, rank: Rank, folder: Path, ways: Sequence[str], dtype: torch.dtype) -> list[str]:
    """Run up to the checkpoint, save it, and go on: what is wrong."""
    part = Run(name, rank[0], dtype, rank[1])
    part.steps(0, SAVED)
    for way in sorted({LOAD[way][0] for way in ways}):
        SAVE[way](part, folder / way)
    found = part.differs(SAVED)
    part.steps(SAVED, END)
    return found + part.differs(END)


def load(name: str, rank: Rank, folder: Path, savers: Plan, dtype: torch.dtype) -> dict[str, list[str]]:
    """Load every checkpoint, and go on: what is wrong."""
    wrong = {}
    for saver, ways in savers.items():
        for way in ways:
            part = Run(name, rank[0], dtype, rank[1], begun=False)
            LOAD[way][1](part, folder / label(saver) / LOAD[way][0])
            found = part.differs(SAVED)
            if way in FORMS:
                part.steps(SAVED, END)
                found += part.differs(END)
            wrong[f"{label(saver)}, {way}"] = found
    return {what: found for what, found in wrong.items() if found}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of an optimizer's checkpoints, with a folder per saver; made once."""
    made: dict[str, Path] = {}

    def folder(name: str, savers: Plan, dtype: torch.dtype) -> Path:
        key = f"{name}-{dtype}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            for saver, ways in savers.items():
                own = made[key] / label(saver)
                own.mkdir()
                world = saver[0].world
                assert run(world, save, name, saver, own, ways, dtype, after=once(name, dtype)) == [[]] * world
        return made[key]

    return folder


def check(saved: Saved, name: str, loader: Rank, savers: Plan, dtype: torch.dtype = torch.float32) -> None:
    world = loader[0].world
    folder = saved(name, savers, dtype)
    assert run(world, load, name, loader, folder, savers, dtype, after=once(name, dtype)) == [{}] * world


@pytest.mark.parametrize(("name", "loader"), only(FAST, ["muon", "shampoo", "soap"], LOADERS), ids=label)
def test_every_way(saved: Saved, name: str, loader: Rank) -> None:
    check(saved, name, loader, SAVERS)


@pytest.mark.parametrize(
    ("name", "loader"),
    only(
        [
            ("adamw", (Case("fsdp", (3,)), True)),
        ],
        ["normuon", "columns", "adamw", "objects", "host", "nested", "lists", "words"],
        [(ONE, False), (Case("ddp", (2,)), True), (Case("fsdp", (3,)), True)],
    ),
    ids=label,
)
def test_other_kinds_of_state(saved: Saved, name: str, loader: Rank) -> None:
    """Columns, elementwise, interpreted (by ranks that own nothing, too), nested, in lists, and no tensors at all."""
    if (name, loader) == ("words", (ONE, False)):
        pytest.skip("torch itself makes generators of strings")
    # DTensors that are gathered are contiguous; some processors then round products with what were columns otherwise.
    strided = name == "columns"
    check(saved, name, loader, {saver: ["shards"] for saver in FEW} if strided else FEW)


@pytest.mark.full
@pytest.mark.parametrize("loader", first([(ONE, True), (Case("fsdp", (3,)), True)]), ids=label)
def test_wide_state_of_16_bit_parameters(saved: Saved, loader: Rank) -> None:
    """Torch's own load would round it."""
    ways = ["shards", "flat shards", "full", "broadcast", "by hand"]
    check(saved, "soap", loader, {(Case("fsdp", (2,)), True): ways}, torch.bfloat16)
