"""New process groups, beside a default one that is bound to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from canzona_compile.runtime.process_groups import Groups
from tests.harness.pairs import one_rank


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
