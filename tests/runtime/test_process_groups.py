"""New process groups: beside a default one that is bound to a device, and beside groups that only some ranks have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from canzona_compile.runtime.process_groups import Groups, timeout_of
from tests.harness.pairs import one_rank
from tests.harness.ranks import run


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_is_not_split_from_a_bound_one(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A split needs all ranks of the default group, and only the members make ours."""
    seen: list[Any] = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        default: Any = dist.group.WORLD
        seen.append((default.bound_device_id, options["use_local_synchronization"]))
        if fails:
            raise RuntimeError("no")
        return default

    with one_rank():
        default: Any = dist.group.WORLD
        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        default.bound_device_id = device = torch.device("cuda", 0)
        try:
            if fails:
                with pytest.raises(RuntimeError, match="no"):
                    Groups().of((0,))
            else:
                assert (Groups().of((0,))) is default
            assert default.bound_device_id == device
        finally:
            default.bound_device_id = None
    assert seen == [(None, True)]


def sums_of_groups() -> list[float]:
    """What ranks sum in groups of ours and of the user's, made in turn; some ranks have more of them than others."""
    found: list[float] = []

    def add(group: Any) -> None:
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value, group=group)
        found.append(value.item())

    rank = dist.get_rank()
    theirs = dist.new_group([0, 2])  # a tied embedding of the first and the last stage of a pipeline, for one
    if rank in (0, 2):
        add(theirs)
    for _ in range(2 if rank < 2 else 0):
        add(Groups().of((0, 1)))
    add(dist.new_group([0, 1, 2]))
    if rank:
        add(Groups().of((1, 2)))
    return found


def test_ranks_meet_that_have_unequally_many_groups() -> None:
    """Torch names groups that only their members make by how many groups a process has."""
    found = run(3, sums_of_groups)
    assert found == [[2, 1, 1, 3], [1, 1, 3, 3], [2, 3, 3]]


def timeouts() -> list[float]:
    """Those of a group that we make before and after we know one of the user's."""
    groups, cpu = Groups(), torch.device("cpu")
    theirs = dist.new_group([0, 1, 2], timeout=timedelta(seconds=77))
    if dist.get_rank() == 2:
        return []
    found = [timeout_of(groups.of((0, 1)), cpu)]
    groups = Groups()
    groups.learn([theirs])
    return [*found, timeout_of(groups.of((0, 1)), cpu), timeout_of(dist.group.WORLD, cpu)]


def test_groups_of_ours_have_the_timeout_of_theirs() -> None:
    for own, learnt, default in run(3, timeouts)[:2]:
        assert (own, learnt) == (default, 77)
