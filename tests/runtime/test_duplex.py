"""All-to-alls over gloo that go both ways at once move what those of torch move."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist

from canzona_compile.compat.duplex import SECOND, Both, all_to_all
from canzona_compile.runtime.process_groups import LARGE, widen
from tests.harness.ranks import run

CPU = torch.device("cpu")


def exchanged(world: int, seed: int) -> bool:
    """Whether ranks receive the same, of sizes some of which are nothing."""
    group = dist.group.WORLD
    assert group is not None
    rank, random = dist.get_rank(), Random(seed)
    sizes = [[random.choice([0, 1, 7, 1000]) for _ in range(world)] for _ in range(world)]
    sent = torch.arange(float(sum(sizes[rank]))) + 10_000 * rank
    come = [row[rank] for row in sizes]
    found = [torch.full((sum(come),), -1.0) for _ in range(2)]
    dist.all_to_all_single(found[0], sent, come, sizes[rank], group=group)
    widen(group, CPU, LARGE)
    assert group in SECOND
    work = all_to_all(found[1], sent, come, sizes[rank], group)
    assert isinstance(work, Both)
    work.wait()
    assert work.is_completed()
    return torch.equal(*found)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_receive_the_same(world: int) -> None:
    assert all(own for seed in range(4) for own in run(world, exchanged, world, seed, fresh=True))


def twice() -> list[bool]:
    """What of these calls makes a second group: little, much, and much again."""
    group = dist.group.WORLD
    assert group is not None
    made = []
    for size in (LARGE - 1, LARGE, LARGE):
        before = SECOND.get(group)
        widen(group, CPU, size)
        made.append(SECOND.get(group) is not before)
    return made


def test_a_group_that_moves_much_gets_a_second_one_once() -> None:
    assert run(2, twice, fresh=True) == [[False, True, False]] * 2
