"""Two communicators of NCCL: what keeps their order is set in time, or a warning says that it is too late."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from canzona_compile.errors import MayHang
from canzona_compile.runtime import launch_order
from canzona_compile.runtime.launch_order import VARIABLE, keep_launch_order
from canzona_compile.runtime.process_groups import Groups

CUDA = torch.device("cuda")


@dataclass
class FakeGroup:
    """A process group, and its backend for CUDA."""

    ranks: tuple[int, ...]
    backend: str = "nccl"
    used: bool = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [CUDA]

    def _get_backend(self, device: torch.device) -> FakeGroup:
        return self

    def name(self) -> str:
        return self.backend

    def _is_initialized(self) -> bool:
        return self.used


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has set it; what a test sets goes again."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(launch_order.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(launch_order.dist, "get_process_group_ranks", lambda group: list(group.ranks))


def kept(*groups: FakeGroup, others: tuple[FakeGroup, ...] = (), certain: bool = True) -> str | None:
    """What the variable is afterwards."""
    with mock.patch.object(launch_order, "process_groups", return_value=[*groups, *others]):
        given: Any = groups
        keep_launch_order(given, CUDA, certain)
    return os.environ.get(VARIABLE)


SHARDS, REPLICAS = FakeGroup((0, 1)), FakeGroup((0, 2))


def test_two_communicators_have_it_set_before_the_first_collective(caplog: pytest.LogCaptureFixture) -> None:
    """That is said once, because it holds for all communicators of the job."""
    assert kept(SHARDS, REPLICAS) == kept(SHARDS, REPLICAS) == "1"
    (said,) = caplog.messages
    assert f"{VARIABLE}=1 is set" in said


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (SHARDS,),
        (SHARDS, FakeGroup((0, 1))),
        (SHARDS, FakeGroup((0,))),
        (FakeGroup((0, 1), "gloo"), FakeGroup((0, 2), "gloo")),
    ],
    ids=["none", "one", "the same ranks", "this rank alone", "gloo"],
)
def test_others_do_not_need_it(groups: tuple[FakeGroup, ...]) -> None:
    assert kept(*groups, others=(FakeGroup((0, 1, 2, 3), used=True),)) is None


def test_too_late_is_a_warning_where_it_is_needed() -> None:
    used = FakeGroup((0, 1, 2, 3), used=True)
    with pytest.warns(MayHang, match=f"Set {VARIABLE}=1 before the job starts"):
        assert kept(SHARDS, REPLICAS, others=(used,)) is None
    assert kept(SHARDS, REPLICAS, others=(used,), certain=False) is None


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert kept(SHARDS, REPLICAS, others=(FakeGroup((0, 1, 2, 3), used=True),)) == "1"
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.warns(MayHang):
        assert kept(SHARDS, REPLICAS) == "0"


def test_the_groups_of_a_run_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first exchange of HSDP needs nothing, the second one is that of another communicator."""
    found = {own.ranks: own for own in (SHARDS, REPLICAS)}
    monkeypatch.setattr(Groups, "of", lambda self, ranks: found[ranks])
    monkeypatch.setattr(launch_order, "process_groups", lambda: list(found.values()))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(2, device="cpu"))
    monkeypatch.setattr("torch.distributed.all_to_all_single", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    groups, seen = Groups(), []
    for ranks in found:
        groups.warm_up(ranks, CUDA, mock.Mock())
        seen.append(os.environ.get(VARIABLE))
    assert seen == [None, "1"]
