"""How often ranks ask the store, which is one server for all ranks of a job: counted with fakes of 8 to 1,024 ranks."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from canzona_compile.data_parallel.gathering import WaitingRanks
from canzona_compile.errors import CanzonaError, RankMismatch
from canzona_compile.runtime import channel, error_board, meeting
from canzona_compile.runtime.channel import Channel
from canzona_compile.runtime.error_board import Attendance
from canzona_compile.runtime.meeting import Meeting, Purpose

COUNTS = (8, 64, 1024)
PURPOSE = Purpose("state_dict()", "because it does", "call it everywhere")


class Counted:
    """A store of torch, or a part of one, that counts requests."""

    def __init__(self, prefix: str = "", store: Any = None) -> None:
        self.store = dist.HashStore() if store is None else dist.PrefixStore(prefix, store.store)
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the channels of some of the ranks on one store."""

    def make(count: int, *those: int) -> list[Any]:
        store, found = Counted(), []
        monkeypatch.setattr(channel, "PrefixStore", Counted)
        monkeypatch.setattr(channel, "default_store", lambda: store)
        monkeypatch.setattr(channel, "own_name", lambda *_: "")
        monkeypatch.setattr(channel, "host_group", lambda *_: None)
        for rank in those:
            monkeypatch.setattr(channel, "dist", SimpleNamespace(get_rank=lambda own=rank: own))
            found.append(Channel(tuple(range(count)), timedelta(seconds=1)))
        return found

    return make


def test_a_rank_that_waits_asks_as_often_among_any_number_of_ranks(ranks: Any) -> None:
    asked = Counter()
    for count in COUNTS:
        own, other = ranks(count, 0, count - 1)
        here, there = WaitingRanks(own, "model 0"), WaitingRanks(other, "model 0")
        there.tell(3)
        before = own.store.requests
        own.listen()
        assert here.asked() == 0
        asked[own.store.requests - before] += 1
        own.announced = 1
        assert here.asked() == 3
        there.tell(0)
        assert here.asked() == 0
    assert asked == {3: len(COUNTS)}


def test_news_are_read_once_and_heard_when_they_matter(ranks: Any) -> None:
    own, other = ranks(1024, 0, 7)
    other.note(CanzonaError("scaled on rank 7"))
    own.listen()  # this rank has announced no more than the other one
    own.announced, before = 1, own.store.requests
    with pytest.raises(RankMismatch, match="scaled on rank 7"):
        own.listen()
    assert own.store.requests == before + 1


def test_the_roll_call_names_who_does_not_answer(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_board, "ROLL_CALL", timedelta())
    own, other = ranks(1024, 0, 1)
    own.absent()
    other.listen()
    for rank in range(2, 1021):
        Attendance(own.store, "here", own.ranks, rank).come()
    assert other.store.requests < 8
    own.store.requests = 0
    assert own.absent() == [1021, 1022, 1023]
    assert own.store.requests < 25


def meetings(count: int) -> tuple[Counted, list[Meeting]]:
    store: Any = Counted()
    boards: list[Any] = [
        SimpleNamespace(ranks=tuple(range(count)), rank=rank, listen=lambda: None) for rank in range(count)
    ]
    return store, [Meeting(store, board) for board in boards]


@pytest.mark.parametrize("different", [False, True])
def test_ranks_that_meet_ask_in_proportion_to_their_number(different: bool) -> None:
    for count in COUNTS:
        store, own = meetings(count)
        for _ in range(2):
            for one in own:
                one.arrive(f"call {different and one.rank == 5}")
            for one in own:
                if different:
                    with pytest.raises(RankMismatch, match=r"rank 4: call False; rank 5: call True"):
                        one.wait("", PURPOSE)
                else:
                    one.wait("", PURPOSE)
        assert store.requests < 2 * 11 * count
        assert store.num_keys() == 0


def test_ranks_that_miss_one_name_it_and_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in COUNTS:
        store, own = meetings(count)
        for one in own[:-1]:
            one.arrive("call")
        monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=-1))
        for one in own[:-1]:
            with pytest.raises(CanzonaError, match=f"rank {count - 1} did not make this call"):
                one.wait("call", PURPOSE)
        assert store.requests < 7 * count + 30


@pytest.mark.parametrize(("count", "sizes"), [(8, [8]), (31, [31]), (37, [37]), (64, [8, 8]), (96, [8, 12])])
def test_many_ranks_reduce_by_rows_and_columns(count: int, sizes: list[int]) -> None:
    every = tuple(range(3, 3 + count))
    members = {rank: channel.stages(every, rank) for rank in every}
    digests = {rank: rank * rank % 101 for rank in every}
    for stage in range(len(sizes)):
        sets = {own[stage] for own in members.values()}
        assert sorted(rank for own in sets for rank in own) == list(every)
        assert {len(own) for own in sets} == {sizes[stage]}
        digests = {rank: max(digests[r] for r in members[rank][stage]) for rank in every}
    assert set(digests.values()) == {max(rank * rank % 101 for rank in every)}
