"""Whether the machine works without us, and what is measured on it once everything is right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from acceptance.machine import ROOT
from acceptance.step import (
    SANITIZER,
    AcceptanceRank,
    AcceptanceStep,
    OneProgram,
    OnRanks,
    StepNeed,
    WrongResult,
)

NOT_OURS = "The machine, its driver or its torch does not work; this package was not involved. Fix that first: "
UNMEASURED = (
    "Results are correct if the steps above passed; only measurements, and choices based on them, are missing. "
)
# Without plugins that the machine has for other work: one of them warns about others, and our settings forbid that.
ALONE = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1")
PYTEST = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
WORKERS = 12  # tests at a time on one GPU: each waits for its compiler most of the time
# Batches of matrices of Qwen3-1.7B, 0.6B and 8B: one by itself, and as many as one of 8 ranks owns.
QWEN3 = (
    *("1x2048x2048", "7x2048x2048", "1x2048x6144", "10x2048x6144", "7x1024x2048", "7x1024x1024", "10x1024x3072"),
    *("1x4096x4096", "9x4096x4096", "1x4096x12288", "13x4096x12288", "9x1024x4096"),
)
# Of `benchmarks/gpu.py`: the stacks that plans of its steps have, stacks for Newton-Schulz, and single products.
BENCHMARKED = (
    *("2x2048x6144", "1x2048x6144", "2x2048x2048", "2x1024x2048"),
    *("28x2048x6144", "56x2048x2048", "47x1024x2048", "9x1024x2048", "1x2048x2048"),
    *("10x4096x12288", "6x4096x12288", "2x4096x12288", "8x4096x4096", "4x4096x4096", "12x1024x4096"),
    *("1x4096x4096", "1x4096x12288", "1x5120x25600", "16x1024x4096", "64x1024x1024"),
    *("1x1024x1024", "1x1536x1536", "1x3072x3072", "1x6144x6144", "1x8192x8192"),
)
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
PROFILED = "launch or trace"  # tests that use the profiler, which a sanitizer takes the place of
SLOW = 3600.0


def device_works(rank: AcceptanceRank) -> str:
    """Multiply on the device, in each dtype, against 64 bits on the CPU."""
    said = []
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        random = torch.Generator().manual_seed(0)
        a, b = (torch.randn(96, 96, generator=random, device="cpu").to(dtype) for _ in range(2))
        found = (a.to(rank.device) @ b.to(rank.device)).cpu().double()
        expected = a.double() @ b.double()
        error = float((found - expected).norm() / expected.norm())
        said.append(f"{str(dtype).removeprefix('torch.')} {error:.0e}")
        if not error < bound:
            raise WrongResult(f"a product in {dtype} is off by {error:.1e}", at=f"rank {rank.rank}, {rank.device}")
    return f"products off by {', '.join(said)}"


def ranks_reach_one_another(rank: AcceptanceRank) -> str:
    """Exchange uneven parts between all ranks, also with some that are empty, and in a group of some of them."""
    counts = [(rank.rank + other) % 3 * 1000 for other in range(rank.world)]
    sent = torch.full((sum(counts),), float(rank.rank), device=rank.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, counts, counts)
    expected = torch.cat([torch.full((n,), float(other), device="cpu") for other, n in enumerate(counts)])
    if not torch.equal(received.cpu(), expected):
        raise WrongResult("an all-to-all delivered different values from those sent", at=f"rank {rank.rank}")
    half = list(range(rank.world // 2 + 1))
    group = dist.new_group(half)
    if rank.rank in half:
        value = torch.ones(8, device=rank.device)
        dist.all_reduce(value, group=group)
        if value.tolist() != [float(len(half))] * 8:
            raise WrongResult("an all-reduce among some ranks gave a wrong sum", at=f"rank {rank.rank}")
    return f"{rank.world} ranks, {dist.get_backend()}"


def rates(rank: AcceptanceRank, folder: str) -> str:
    """Measure this machine and its links; the first rank keeps the file."""
    from canzona_compile.tools.calibration.calibrate import calibrate  # late: only this step needs it

    hardware, shows = calibrate(device=rank.device.type, quick=True)
    path = Path(folder, f"hardware-{hardware.name}.json")
    if shows:
        path.write_text(hardware.to_json(), encoding="utf-8")
    return f"{path.name}: measured {', '.join(hardware.measured)}"


def machine_works() -> Iterator[AcceptanceStep]:
    """What has to work before anything else can."""
    yield AcceptanceStep(
        "machine/device",
        "the device multiplies",
        NOT_OURS + "`nvidia-smi`, and the versions of driver and torch.",
        OnRanks(device_works),
    )
    yield AcceptanceStep(
        "machine/ranks",
        "ranks reach one another, by uneven exchanges and in groups",
        NOT_OURS + "NCCL_DEBUG=INFO shows which link fails; NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 narrow it down.",
        OnRanks(ranks_reach_one_another),
        ("ranks",),
        120.0,
    )
    yield AcceptanceStep(
        "machine/two-communicators",
        "two communicators of NCCL at a time keep the order in which the host started them",
        NOT_OURS + f"If it hangs, {ORDER} is not 1, or NCCL is older than 2.26; HSDP would hang.",
        OnRanks(two_communicators, variables=((ORDER, "1"),)),
        ("cuda", "nccl", "ranks"),
        120.0,
    )


def two_communicators(rank: AcceptanceRank) -> str:
    """Exchange in two process groups of the same ranks at a time, from two streams, in one order of the host."""
    groups = [dist.new_group(list(range(rank.world))) for _ in range(2)]
    streams = [torch.cuda.Stream(rank.device) for _ in groups]
    sent = torch.full((rank.world << 16,), float(rank.rank), device=rank.device)
    received = [torch.empty_like(sent) for _ in groups]
    torch.cuda.synchronize(rank.device)
    for _ in range(100):
        works = []
        for group, stream, values in zip(groups, streams, received, strict=True):
            with torch.cuda.stream(stream):
                works.append(dist.all_to_all_single(values, sent, group=group, async_op=True))
        for work in works:
            work.wait()
    torch.cuda.synchronize(rank.device)
    expected = torch.arange(rank.world, device=rank.device).repeat_interleave(1 << 16).float()
    if not all(torch.equal(values, expected) for values in received):
        raise WrongResult(
            "an all-to-all in one of two groups delivered different values from those sent", at=f"rank {rank.rank}"
        )
    return f"{ORDER}={os.environ.get(ORDER, 'not set')}"


def gpu_tests(dry: bool, room: str = "") -> Iterator[AcceptanceStep]:
    """The repository's tests on a device, several at a time where pytest-xdist is installed.

    Args:
        dry: whether they run without a device, where each of them is skipped and says so.
    """
    files = [path for path in files_of_gpu_tests() if path.startswith(f"tests/{room}")]
    workers = 2 if dry else WORKERS
    beside = ("-p", "xdist.plugin", "-n", str(workers), "--dist", "worksteal") if find_spec("xdist") else ()
    record = ("-v", "--junitxml", "{output}/tests.xml")  # the log has a line per test at once, also if it is killed
    yield AcceptanceStep(
        f"tests/{room or 'gpu'}",
        "kernels, streams and recordings do on one GPU what their tests say",
        "Look at the failed test, and at what it asserts: the test may be out of date. `tests/kernels`: results may be "
        "wrong wherever the kernel is used. `tests/runtime`: the order of streams, recordings, or waits of the host.",
        OneProgram((*ALONE, "{python}", *PYTEST, "-rfE", "--tb=short", *beside, *record, *files)),
        (*on_cuda(dry), "triton", "pytest"),
        SLOW / 2,
    )


def checked_memory(dry: bool) -> Iterator[AcceptanceStep]:
    """The same tests while every access to memory is checked."""
    check = (SANITIZER, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9")
    yield AcceptanceStep(
        "tests/memcheck",
        "no kernel of these tests reads or writes outside of its tensors",
        "A kernel accesses memory outside of its tensors: exit code 9, and the log names kernel and address. Other "
        "exit codes are failed tests; under the sanitizer those that bound time or memory may fail by themselves.",
        OneProgram((*ALONE, *check, "{python}", *PYTEST, "-x", "-k", f"not ({PROFILED})", *files_of_gpu_tests())),
        ("cuda", "triton", "sanitizer", "pytest"),
        SLOW / 2,
    )


def tuned(dry: bool) -> Iterator[AcceptanceStep]:
    """The products of Qwen3's matrices, those of the smaller models first."""
    shows = "the kernels that beat the library here are found, correct, and saved for later runs"
    yield tuning(dry, "tune", shows, SLOW / 2, *QWEN3)


def tuning(dry: bool, name: str, shows: str, limit: float, *arguments: str) -> AcceptanceStep:
    """A step that tunes kernels for some matrices."""
    command = ("{python}", "-m", "canzona_compile", "tune", "--output", f"{{output}}/{name}", "--minutes", "{minutes}")
    failing = "A wrong candidate is refused, which is not a failure. " + UNMEASURED
    work = OneProgram((*command, *arguments), ("--dry",))
    return AcceptanceStep(f"measured/{name}", shows, failing, work, (*on_cuda(dry), "triton"), limit)


def benchmarks(dry: bool) -> Iterator[AcceptanceStep]:
    """Kernels and steps beside those of others, once the kernels that are best here are known; then rates."""
    shows = "the kernels that beat the library for the benchmark's matrices are found, and the benchmark uses them"
    yield tuning(dry, "tune-benchmark", shows, 180.0, "--rounds", "5", *BENCHMARKED)
    yield AcceptanceStep(
        "measured/benchmark",
        "how long a step takes compared with torch.compile on this GPU",
        "The log ends with the error; results are first compared with float64. " + UNMEASURED,
        OneProgram(
            ("{python}", "benchmarks/gpu.py", "--output", "{output}", "--minutes", "{minutes}"),
            ("--dry",),
        ),
        on_cuda(dry),
        SLOW / 2,
    )
    yield AcceptanceStep(
        "measured/rates",
        "the rates of this machine and its links, for `wrap(hardware=)` and `plan --hardware`",
        UNMEASURED + "Plans then use assumed rates for this kind of device.",
        OnRanks(rates, ("{output}",)),
        ("cuda", "nccl", "ranks"),
        SLOW / 4,
    )


def on_cuda(dry: bool) -> tuple[StepNeed, ...]:
    """What a program needs that runs on the CPU only in a dry run."""
    return () if dry else ("cuda",)


def files_of_gpu_tests() -> list[str]:
    """The test files with tests for a device: others may need packages that a GPU machine lacks."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(p.relative_to(ROOT)) for p in paths if "mark.gpu" in p.read_text(encoding="utf-8")]
