"""Steps of acceptance runs in which something is wrong, and what is wrong about them."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from acceptance.side_by_side import SideBySide, even
from acceptance.step import AcceptanceRank
from canzona_compile.tensors import local_part


def good(rank: AcceptanceRank) -> str:
    total = torch.ones(1)
    dist.all_reduce(total)
    return f"{int(total)} ranks"


def off_by_one_bit(rank: AcceptanceRank) -> str:
    """The last rank changes the last bit of one element of its fragment, once."""
    both = SideBySide(rank, "muon", "fsdp", even(rank)[:2])
    for number in range(3):
        if number == 1 and rank.rank == rank.world - 1:
            fragment = local_part(both.ours.params[1].detach())
            fragment.view(-1)[:1] = torch.nextafter(fragment.view(-1)[:1], torch.full((1,), torch.inf))
        both.step(in_place=False)
    return both.verdict()


def waits_for_ever(rank: AcceptanceRank) -> str:
    """One rank stays away from a collective that the others are in."""
    if rank.rank == rank.world - 1:
        time.sleep(3600)
    dist.barrier()
    return ""


def dies(rank: AcceptanceRank) -> str:
    if rank.rank == rank.world - 1:
        print("the last words", flush=True)
        os._exit(7)
    return "lives"


def variable(rank: AcceptanceRank, name: str) -> str:
    return os.environ.get(name, "not set")
