"""Blocks that compute several tiles of a segment: none is left out, none computed twice, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from canzona_compile.codegen import launch
from canzona_compile.codegen.launch import BLOCK, GroupedKernel
from canzona_compile.codegen.source import PointwiseProgram, copying
from canzona_compile.codegen.tables import LEAST_BLOCKS, MOST_TILES, tiles_per_block

SIZES = (1, 15, BLOCK - 1, BLOCK, BLOCK + 1, MOST_TILES * BLOCK, MOST_TILES * BLOCK + 16, 3 * MOST_TILES * BLOCK - 7)
PROCESSORS = {1: 10**6, MOST_TILES: 0}  # by the tiles of a block that they lead to


@pytest.mark.parametrize("tiles", PROCESSORS)
@pytest.mark.parametrize("form", ["flat", "columns", "turned"])
def test_every_element_is_written(tiles: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: PROCESSORS[tiles])
    program = PointwiseProgram("copy", copying(torch.float32, torch.float32), ((torch.float32,),))
    sources, targets, around = [], [], []
    for size in SIZES:
        whole = torch.full((-(-size // 31), 48), -1.0) if form != "flat" else torch.full((size + 32,), -1.0)
        source = torch.randn(whole.shape, generator=torch.Generator().manual_seed(size))
        if form == "flat":
            views = source[16 : size + 16], whole[16 : size + 16]
        elif form == "columns":
            views = source[:, 3:34], whole[:, 3:34]
        else:
            views = source[:, 3:34].T, whole[:, 3:34].T
        sources.append(views[0])
        targets.append(views[1])
        around.append(whole)
    kernel = GroupedKernel("copies", [program], [0])
    kernel(((sources, targets), ()))
    assert kernel.table is not None
    assert kernel.table.tiles == tiles
    assert kernel.table.blocks == sum(-(-t.numel() // (tiles * BLOCK)) for t in targets)
    for source, target, whole in zip(sources, targets, around, strict=True):
        assert torch.equal(source, target)
        target.fill_(-1.0)
        assert (whole == -1.0).all()


def test_there_are_blocks_enough_for_all_processors() -> None:
    for processors in (1, 7, 132):
        for tiles in (0, 1, 16, 17, 100, 4000, 10**5, 10**7):
            found = tiles_per_block(tiles, processors)
            assert found in (1, 2, 4, MOST_TILES)
            assert found == 1 or tiles // found >= LEAST_BLOCKS * processors
    # Muon's state of a matrix of 4096 x 4096 on an H200: 8192 tiles, and as many blocks of two as 31 for a processor.
    assert tiles_per_block(4096 * 4096 // BLOCK, 132) == 2
    assert tiles_per_block(64 * 4096 * 4096 // BLOCK, 132) == MOST_TILES
