"""`python -m canzona_compile tune`."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from canzona_compile.compat.telling import shown, tell
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import read_plan
from canzona_compile.kernels import tuning_cache
from canzona_compile.kernels.dispatch import KernelChoice, Operation, candidates
from canzona_compile.kernels.tensor_args import forget_decisions, machine
from canzona_compile.kernels.tune import Timer, Trial, Verdict, tune
from canzona_compile.kernels.tuning_cache import GpuKind
from canzona_compile.tools.calibration.clock import SHORTEST, Clock, Work

log = logging.getLogger(__name__)

SHAPES = ("1x4096x4096", "1x4096x12288", "1x5120x25600", "16x1024x4096", "64x1024x1024", "1x2048x8192")
VERDICTS = "tune.jsonl"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `tune` to its parser."""
    add = parser.add_argument
    add("shapes", nargs="*", metavar="BxMxN", help=f"batches of matrices (default: {' '.join(SHAPES)})")
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="the batches of a plan instead: the JSON of `plan`, or of a run's plan",
    )
    add("--dtype", choices=DTYPES, help="dtype of the products (default: both; Gram iterations use float16)")
    add("--rounds", type=int, default=15, help="how often each candidate is measured (%(default)s)")
    add("--dry-run", action="store_true", help="measure and print, but do not save results for later runs")
    add(
        "--dry",
        action="store_true",
        help="try the command on the CPU with tiny shapes and only the library; says nothing about a GPU",
    )
    add("--minutes", type=float, metavar="M", help="start no new product after M minutes")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write each result to this folder at once, and a copy of what is saved",
    )


def run(given: Namespace) -> int:
    """Measure all products of a Newton-Schulz step on the given matrices, print which kernel won, and keep that."""
    if given.plan is not None and given.shapes:
        raise CanzonaError("tune takes shapes or --plan, not both")
    shapes = [parsed(text) for text in given.shapes or SHAPES] if given.plan is None else planned(given.plan)
    if given.rounds < 1:
        raise CanzonaError(f"--rounds must be at least 1, not {given.rounds}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CanzonaError(
            "ranks that tune at the same time would disturb each other's timings", hint="run it without torchrun"
        )
    began = time.monotonic()
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / VERDICTS).write_text("", encoding="utf-8")
    device = torch.device("cpu") if given.dry else torch.device("cuda", _current_device())
    here = None if given.dry else _tuned_machine(device)
    shapes = [_tiny(shape) for shape in shapes] if given.dry else shapes
    dtypes = list(DTYPES.values()) if given.dtype is None else [DTYPES[given.dtype]]
    work, won = list(itertools.product(problems(shapes), dtypes)), list[bool]()
    for i, ((op, shape), dtype) in enumerate(work):
        if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
            break
        tried = () if here is None else candidates(op, here.arch)
        with shown("tune", quiet=given.quiet):  # not around `print`, which would break the line
            tell(f"{op} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}", i, len(work))
            verdict = tune(op, shape, dtype, device, tried, clock_for(device), rounds=given.rounds)
        print(describe(verdict), flush=True)
        _keep(verdict, None if given.dry_run else here, given.output)
        won.append(verdict.choice.kernel != "library")
    over = "" if len(won) == len(work) else "; there was no time for the others"
    print(
        f"{sum(won)} of {len(won)} products have a kernel that beats the library, of {len(work)} that were asked{over}"
    )
    forget_decisions()
    return 0


def _current_device() -> int:
    if not torch.cuda.is_available():
        raise CanzonaError("there is no CUDA device to tune for; without one, all products use the library")
    return int(torch.cuda.current_device())


def _tuned_machine(device: torch.device) -> GpuKind:
    """The kind of a device for which there are kernels."""
    here = machine(device)
    if here is None:
        raise CanzonaError("Triton is not installed, or this is not an NVIDIA GPU; all products use the library")
    if not candidates("sym_gemm", here.arch):
        raise CanzonaError(f"there are no kernels for sm_{here.arch}; all products use the library")
    return here


def _keep(verdict: Verdict, here: GpuKind | None, output: Path | None) -> None:
    """Keep a verdict for later runs on a kind of GPU, and write it to a folder; each only if there is one."""
    trials = [_figures(trial) for trial in verdict.trials]
    path = None if here is None else tuning_cache.store(here, verdict.problem, verdict.choice, {"trials": trials})
    if path is not None:
        log.info("kept in %s", path)
    if output is not None:
        p = verdict.problem
        found = {"op": p.op, "batch": p.batch, "m": p.m, "k": p.k, "dtype": str(p.dtype).removeprefix("torch.")}
        with (output / VERDICTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**found, "choice": named(verdict.choice), "trials": trials}) + "\n")
        if path is not None:
            shutil.copy2(path, output)


def clock_for(device: torch.device) -> Timer:
    """The clock of the tuner."""
    clock = Clock(device, repetitions=1)

    def timer(call: Work) -> Callable[[], float]:
        replay, calls, why = clock.recorded(call)
        if why and device.type == "cuda":
            log.warning("a product cannot be recorded as a CUDA graph; its time includes its launches: %s", why)
        repeats = math.ceil(SHORTEST / max(clock.sample(replay, 1), 1e-9))
        return lambda: clock.sample(replay, repeats) / calls * 1e3

    return timer


def _tiny(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    batch, rows, columns = shape
    return min(batch, 2), max(16, rows // 64), max(16, columns // 64)


def problems(shapes: list[tuple[int, int, int]]) -> list[tuple[Operation, tuple[int, int, int]]]:
    """The products of a Newton-Schulz step, each once: X X^T, its square, and the product with X."""
    found: dict[tuple[Operation, tuple[int, int, int]], None] = {}
    for batch, rows, columns in shapes:
        m, n = min(rows, columns), max(rows, columns)
        found["sym_gemm", (batch, m, n)] = None
        found["sym_gemm", (batch, m, m)] = None
        found["gemm_axpby", (batch, m, n)] = None
    return list(found)


def planned(path: Path) -> list[tuple[int, int, int]]:
    """The batches that owners compute by a plan, each once, the most work first.

    A plan has no parameter groups: matrices of one shape count as one batch. Convolutions are left out.
    """
    plan = read_plan(path)
    tasks = {task.name: task for task in plan.tasks if len(task.shape) in (2, 3)}
    batches = Counter[tuple[Any, ...]]()
    for index, group in enumerate(plan.groups):
        for task in (tasks[name] for name in group if name in tasks):
            batches[index, task.replica, task.owner, task.shape[-2:]] += math.prod(task.shape[:-2])
    found = {(count, *shape) for (*_, shape), count in batches.items()}
    if not found:
        raise CanzonaError("the plan has no matrices", at=str(path))
    return sorted(found, key=lambda shape: (-math.prod(shape) * min(shape[1:]), shape))


def describe(verdict: Verdict) -> str:
    """A line for the problem and the winner, and one for everything that was tried."""
    p = verdict.problem
    lines = [f"{p.op} {p.batch}x{p.m}x{p.k} {str(p.dtype).removeprefix('torch.')}: {named(verdict.choice)}"]
    for trial in verdict.trials:
        told = trial.refused or f"{trial.milliseconds:.4f} ms, {trial.speedup:.2f}x, error {trial.error:.1e}"
        lines.append(f"    {named(trial.choice):24} {told}")
    return "\n".join(lines)


def named(choice: KernelChoice) -> str:
    """Kernel and tile in a few characters: tma 128x256x64, 8 warps, 3 stages is `tma 128x256x64 w8 s3`."""
    t = choice.tile
    return choice.kernel if t is None else f"{choice.kernel} {t.m}x{t.n}x{t.k} w{t.warps} s{t.stages}"


def _figures(trial: Trial) -> dict[str, object]:
    """For the file; JSON has no infinity."""
    if trial.refused:
        return {"kernel": named(trial.choice), "refused": trial.refused}
    return {
        "kernel": named(trial.choice),
        "speedup": trial.speedup,
        "milliseconds": trial.milliseconds,
        "error": trial.error,
    }


def parsed(text: str) -> tuple[int, int, int]:
    """Read a batch of matrices, such as 16x1024x4096."""
    sizes = text.lower().split("x")
    if len(sizes) == 2:
        sizes = ["1", *sizes]
    if len(sizes) != 3 or not all(s.isdecimal() and int(s) for s in sizes):
        raise CanzonaError("write a shape as BATCHxROWSxCOLUMNS or ROWSxCOLUMNS", at=text)
    batch, rows, columns = map(int, sizes)
    return batch, rows, columns
