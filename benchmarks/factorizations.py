"""Times decompositions one by one and in stacks, and what makes them of matrix products, on the device that is there.

    python benchmarks/factorizations.py --output found.json
    python benchmarks/factorizations.py --device cpu --sizes 64 256 --batches 1 4

Prints JSON: the seconds and the error (against float64) of each way by size and batch, the ratio by which each is
faster than the loop, and under `factorizations` the rates as a file of `--hardware` takes them, FLOPs as the planner
counts them. A way that took longer than `--longest` seconds is not tried at larger sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canzona_compile.kernels import cholesky_qr, inverse_root
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import ALONE, FACTORIZATIONS
from canzona_compile.tools.processor import this_processor

FLOOR = 1e-3
Way = Callable[[Tensor], Any]


def eigen_root(matrix: Tensor) -> Tensor:
    """The root as optimizers write it."""
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
    root: Tensor = eigenvectors * eigenvalues.clamp(min=FLOOR).pow(-0.25).unsqueeze(-2) @ eigenvectors.mT
    return root


def looped(work: Way) -> Way:
    return lambda stack: [work(matrix) for matrix in stack.unbind(0)]


@dataclass(frozen=True, slots=True)
class Task:
    """One result and the ways to it, the first of which is the one that the others are compared with.

    Attributes:
        rates: ways by the name that `--hardware` has for their rate, and what of `FACTORIZATIONS` they count as.
        error: of a result on a stack, against float64.
    """

    ways: Mapping[str, Way]
    rates: Mapping[str, str]
    error: Callable[[Tensor, Any], float]


def apart(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))).max())


def rebuilt(stack: Tensor, found: Any) -> float:
    """How far l and V are from A = V l V^T."""
    eigenvalues, eigenvectors = (gathered(found, i).double() for i in range(2))
    return apart(eigenvectors * eigenvalues.unsqueeze(-2) @ eigenvectors.mT, stack.double())


def orthogonal(stack: Tensor, found: Any) -> float:
    """The larger of how far Q^T Q is from I, and Q R from A."""
    q, r = (gathered(found, i).double() for i in range(2))
    eye = torch.eye(stack.shape[-1], dtype=torch.float64, device=stack.device).expand(q.shape)
    return max(apart(q.mT @ q, eye), apart(q @ r, stack.double()))


def root_error(stack: Tensor, found: Any) -> float:
    whole = torch.stack(found) if isinstance(found, list) else found
    return apart(whole, inverse_root.reference(stack, 4, 0.0, FLOOR))


def gathered(found: Any, i: int) -> Tensor:
    """Result i of a stack, from one call or from a loop."""
    whole: Tensor = torch.stack([one[i] for one in found]) if isinstance(found, list) else found[i]
    return whole


EIGH, QR = torch.linalg.eigh, torch.linalg.qr
TASKS = {
    "eigh": Task({"looped": looped(EIGH), "batched": EIGH}, {"looped": "eigh", "batched": "eigh_batched"}, rebuilt),
    "qr": Task(
        {"looped": looped(QR), "batched": QR, "cholesky_qr": cholesky_qr.cholesky_qr},
        {"looped": "qr", "batched": "qr_batched", "cholesky_qr": "cholesky_qr"},
        orthogonal,
    ),
    "root": Task(
        {
            "looped eigh": looped(eigen_root),
            "batched eigh": eigen_root,
            "inverse_root": lambda stack: inverse_root.inverse_root(stack, 4, 0.0, FLOOR),
        },
        {"inverse_root": "inverse_root"},
        root_error,
    ),
}


def statistics_like(size: int, batch: int, device: torch.device) -> Tensor:
    """Symmetric matrices with eigenvalues from 1 to 1e-6, evenly in the logarithm: what preconditioners look like."""
    make = torch.Generator().manual_seed(size)
    vectors = QR(torch.randn(batch, size, size, dtype=torch.float64, generator=make).to(device)).Q
    eigenvalues = torch.logspace(0, -6, size, dtype=torch.float64, device=device)
    low: Tensor = (vectors * eigenvalues @ vectors.mT).float()
    return low


def measured(device: torch.device, sizes: Sequence[int], batches: Sequence[int], longest: float, clock: Clock) -> Any:
    """Rows of all tasks and ways, and the rates that they amount to."""
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[float, float]] = {}
    slow: set[tuple[str, str, int]] = set()
    for size in sorted(sizes):
        for batch in sorted(batches):
            stack = statistics_like(size, batch, device)
            for name, task in TASKS.items():
                seconds: dict[str, float] = {}
                for way, work in task.ways.items():
                    if (name, way, batch) in slow:
                        continue
                    seconds[way] = clock.seconds(lambda w=work, s=stack: w(s))  # type: ignore[misc]
                    if seconds[way] > longest:
                        slow.add((name, way, batch))
                    row = {"task": name, "way": way, "size": size, "batch": batch, "seconds": seconds[way]}
                    base = seconds.get(next(iter(task.ways)))
                    faster = None if base is None else base / seconds[way]
                    rows.append({**row, "faster": faster, "error": task.error(stack, work(stack))})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    rate = task.rates.get(way)
                    if rate is not None and batch == (min(batches) if rate in ALONE else max(batches)):
                        flops = FACTORIZATIONS[rate.removesuffix("_batched")][1](size)
                        curves.setdefault(rate, {})[float(size)] = batch * flops / seconds[way]
    return {"rows": rows, "factorizations": {name: sorted(curve.items()) for name, curve in curves.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="64 to 2048; on CPU 64 to 256")
    parser.add_argument("--batches", type=int, nargs="+", help="1, 8 and 32; on CPU 1 and 4")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--longest", type=float, default=1.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    device, on_gpu = torch.device(given.device), given.device.startswith("cuda")
    sizes = given.sizes or ((64, 128, 256, 512, 1024, 2048) if on_gpu else (64, 128, 256))
    batches = given.batches or ((1, 8, 32) if on_gpu else (1, 4))
    clock = Clock(device, given.repetitions)
    found = {
        "device": torch.cuda.get_device_name(device) if on_gpu else this_processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "how": clock.how,
        **measured(device, sizes, batches, given.longest, clock),
    }
    text = json.dumps(found, indent=1) + "\n"
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
