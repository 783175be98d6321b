"""What could hang or corrupt steps that are recorded as CUDA graphs, each case provoked beside the plain optimizer."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator

import torch

from acceptance.side_by_side import SideBySide, even
from acceptance.step import AcceptanceRank, AcceptanceStep, OnRanks, WrongResult, needs_of
from canzona_compile.errors import CanzonaError
from canzona_compile.tools.verification.layouts import LAYOUTS

RECORDED = 5  # steps after which a program whose gradients stay in place has been recorded
FILLED = 0.5  # of the free memory that is overwritten
BLOCK = 64 * 2**20
HANG = (
    "If it hangs, either some ranks replay a recording while others run call by call, so their collectives start in a "
    "different order, or only some ranks make a process group. Run with `cuda_graphs=False`, and look at the stacks of "
    "the ranks, to find out which. "
)
CORRUPTION = (
    "If numbers are wrong, a recording uses memory that was freed, or a stream does not wait for another. With "
    "`cuda_graphs=False` only the second remains. "
)


def paired(rank: AcceptanceRank, layout: str, optimizer: str = "muon", seed: int = 0) -> SideBySide:
    """An optimizer in several micro-groups, so that some are in flight while others compute."""
    return SideBySide(rank, optimizer, layout, even(rank), seed=seed, micro_groups=3)


def moving_gradients(rank: AcceptanceRank, layout: str) -> str:
    """Step with gradients that move on even ranks only, so that ranks would record at different times."""
    both = paired(rank, layout)
    for number in range(12):
        both.step(in_place=rank.rank % 2 == 1 or number in (4, 5, 6, 7, 8))
    return both.verdict(recorded=True)


def loaded_in_mid_run(rank: AcceptanceRank, layout: str) -> str:
    """Load state twice, each time after a recording, and go on: its recordings are dropped and made again."""
    both = paired(rank, layout)
    for _ in range(2):
        both.step(RECORDED)
        for made in (both.plain, both.ours):
            made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    both.step(RECORDED)
    return both.verdict(recorded=True)


def another_plan(rank: AcceptanceRank, layout: str) -> str:
    """Drop the plan with its recordings by a parameter more, twice, and record anew."""
    both = paired(rank, layout)
    for rows in (16, 48):
        both.step(RECORDED)
        both.add_matrix((rows, 32) if rank.tiny else (8 * rows, 128))
    both.step(RECORDED)
    return both.verdict(recorded=True)


def gradient_missing_on_one_rank(rank: AcceptanceRank, layout: str) -> str:
    """Leave out a gradient on the last rank: all ranks refuse the step, change nothing, and can go on."""
    both = paired(rank, layout)
    both.step(RECORDED)
    for _ in range(2):
        try:
            both.step(without=0 if rank.rank == rank.world - 1 else -1)
        except CanzonaError:
            pass
        else:
            raise WrongResult("a step succeeded although one rank had no gradient", at=f"rank {rank.rank}")
        both.step(RECORDED)
    return f"refused on every rank; {both.verdict(recorded=True)}"


def measured_after_recording(rank: AcceptanceRank, layout: str) -> str:
    """Measure two steps, which run call by call, after a recording was replayed, and replay it again."""
    both = paired(rank, layout)
    both.step(RECORDED)
    both.ours.optimizer.canzona.measure(2)  # type: ignore[attr-defined]
    both.step(RECORDED)
    return both.verdict(recorded=True)


def two_optimizers(rank: AcceptanceRank, layout: str) -> str:
    """Step two recorded optimizers by turns, and one of them twice now and then."""
    first, second = paired(rank, layout), paired(rank, layout, seed=1)
    for number in range(10):
        first.step()
        second.step()
        if number % 3 == 2:
            second.step(in_place=number < 6)
    return f"first {first.verdict(recorded=True)}; second {second.verdict(recorded=True)}"


def peer_that_stays_away(rank: AcceptanceRank, layout: str) -> str:
    """Leave the last rank out of a step: the others have to end, not to wait for ever."""
    both = paired(rank, layout)
    both.step(RECORDED)
    if rank.rank == rank.world - 1:
        return "one rank did not call step()"
    begin = time.monotonic()
    try:
        both.step()
        if rank.device.type == "cuda":
            torch.cuda.synchronize(rank.device)
    except Exception as error:
        return f"the others raised {type(error).__name__} after {time.monotonic() - begin:.0f} s"
    raise WrongResult("a step succeeded without one of the ranks", at=f"rank {rank.rank}")


def forgotten_recording(rank: AcceptanceRank, optimizer: str) -> str:
    """Record two programs, forget one, overwrite free memory, and replay the other."""
    kept, forgotten = paired(rank, "whole", optimizer), paired(rank, "whole", optimizer, seed=1)
    kept.step(RECORDED)
    forgotten.step(RECORDED)
    del forgotten
    gc.collect()
    for _ in range(2):
        torch.cuda.synchronize(rank.device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(rank.device)
        held = [torch.full((BLOCK // 4,), torch.nan, device=rank.device) for _ in range(int(FILLED * free) // BLOCK)]
        torch.cuda.synchronize(rank.device)
        del held
        kept.step(RECORDED)
    return kept.verdict(recorded=optimizer == "muon")  # the host waits for SOAP's decompositions


def on(layout: str) -> Iterator[AcceptanceStep]:
    """The cases on one layout, those that were found to hang by reading first."""
    cases = (
        (
            "moving-gradients",
            moving_gradients,
            "gradients may move, at different times on different ranks, as `zero_grad()` makes them",
            HANG + CORRUPTION,
        ),
        (
            "measured-after-recording",
            measured_after_recording,
            "steps can be measured at any time, and recordings go on afterwards",
            "A replay used what measured steps left behind: do not call `measure()` in a training. " + CORRUPTION,
        ),
        (
            "loaded-in-mid-run",
            loaded_in_mid_run,
            "`load_state_dict` during a run drops recordings, and new ones can be made",
            "If it raises while a graph is captured, the pool of the dropped recordings was not given back. "
            + CORRUPTION,
        ),
        (
            "another-plan",
            another_plan,
            "a new plan drops recordings, and new ones can be made",
            "If it raises while a graph is captured, the pool of the dropped recordings was not given back. "
            + CORRUPTION,
        ),
        (
            "two-optimizers",
            two_optimizers,
            "two recorded optimizers share a device and its streams",
            "If one of the two is wrong, they share buffers or a workspace. " + CORRUPTION + HANG,
        ),
    )
    for name, function, shows, failing in cases:
        shown, work = f"{shows}, {LAYOUTS[layout].words}", OnRanks(function, (layout,))
        yield AcceptanceStep(f"audit/{name}/{layout}", shown, failing, work, needs_of(layout), 300.0)


def audit() -> Iterator[AcceptanceStep]:
    """All cases, in the order of what they say."""
    yield from on("fsdp")
    yield AcceptanceStep(
        "audit/gradient-missing-on-one-rank/fsdp",
        "a step that one rank cannot take is refused by all, and training can go on",
        "If it hangs, a rank entered a collective that another rank refused. If it succeeded, ranks no longer agree.",
        OnRanks(gradient_missing_on_one_rank, ("fsdp",)),
        ("ranks",),
    )
    for layout in ("hsdp", "stages", "both_dims"):
        yield AcceptanceStep(
            f"audit/moving-gradients/{layout.replace('_', '-')}",
            f"several process groups in flight at once keep their order, {LAYOUTS[layout].words}",
            HANG + "On these layouts two communicators are at work: NCCL_LAUNCH_ORDER_IMPLICIT=1 tells whether that is "
            "why; a hang before the first step is that of groups which only some ranks make. " + CORRUPTION,
            OnRanks(moving_gradients, (layout,)),
            needs_of(layout),
            300.0,
        )
    yield AcceptanceStep(
        "audit/moving-gradients/expandable-segments",
        "gradients may move, at different times on different ranks, with the allocator's expandable segments as well",
        HANG
        + "If only this one fails, a recording kept an address that the allocator has mapped to new memory. "
        + CORRUPTION,
        OnRanks(moving_gradients, ("fsdp",), (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)),
        ("cuda", "ranks"),
        300.0,
    )
    yield from on("whole")
    for optimizer in ("muon", "soap"):
        yield AcceptanceStep(
            f"audit/forgotten-recording/{optimizer}",
            "a recording still has its memory after another one was forgotten",
            "A recording reads memory that went with another one, such as a workspace of cuBLAS. " + CORRUPTION,
            OnRanks(forgotten_recording, (optimizer,)),
            ("cuda",),
            300.0,
        )
    yield AcceptanceStep(
        "audit/peer-that-stays-away/fsdp",
        "ranks that lose a peer end; they do not wait for ever",
        "A job that loses a rank would hold its machines until somebody looks. Collectives are not recorded, so that "
        "NCCL's watchdog sees them: its timeout is that of the process group.",
        OnRanks(peer_that_stays_away, ("fsdp",), ends_ranks=True),
        ("ranks",),
        400.0,
    )
