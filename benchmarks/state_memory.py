"""What `state=` takes: bytes of optimizer state per rank, measured and planned, and the time of a step.

    python benchmarks/state_memory.py
    python benchmarks/state_memory.py --only plans

*measured* trains the decoder of examples/train_lm.py by `muon_adamw` on two gloo ranks under FSDP2, for each storage,
and counts the bytes that the state of the rank with most takes; a plan of the same model says how many there should
be. *plans* shows those of large models. *times* takes steps with each storage in turn in one process, and prints the
median of the ratios to steps without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile
from canzona_compile.tools.processes import run_ranks
from canzona_compile.tools.verification.layouts import like
from lm_model import Decoder, ModelConfig

STORAGES = (None, "bfloat16", "int8", "cpu", "int8 cpu")
RANKS = 2
MODELS = (("qwen3-8b", "fsdp=8"), ("qwen3-32b", "fsdp=32,tp=8"), ("qwen3-30b-a3b", "fsdp=8"))
MIB = 2**20


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(tied=False))


def trained(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Take steps with random gradients."""
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = like(torch.randn(param.shape, generator=random), param)
        optimizer.step()


def measured(rank: int, state: str | None) -> int:
    """On each rank: the bytes of state after two steps, wherever they are."""
    model = decoder()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer: Any = canzona_compile.muon_adamw(model, lr=1e-3, state=state, numerics="fast")
    trained(model, optimizer, 2)
    found = 0
    for member in optimizer.optimizers:
        for held in member.state.values():
            for leaf in held.values():
                own = leaf.to_local() if hasattr(leaf, "to_local") else leaf
                found += own.nbytes if isinstance(own, Tensor) or hasattr(own, "nbytes") else 0
    return found


def planned(model: Any, mesh: str, state: str | None) -> tuple[int, int]:
    """Bytes of state on the device and in host memory, of the rank with most, by plan."""
    made = canzona_compile.plan(model, mesh=mesh, optimizer="muon+adamw", alternatives=False, state=state)
    memory, local = made.forecast.memory, made.forecast.local
    return memory.state + (local.state if local else 0), memory.state_host + (local.state_host if local else 0)


def show_measured() -> None:
    print(f"the decoder of the demo on {RANKS} ranks, fsdp: bytes of state per rank")
    print(f"{'state':>10} {'measured':>12} {'planned':>12}")
    for state in STORAGES:
        ranks = run_ranks(RANKS, measured, (state,), 300.0)
        device, host = planned(decoder(), f"fsdp={RANKS}", state)
        print(f"{state or 'as it is':>10} {max(ranks):>12,} {device + host:>12,}", flush=True)


def show_plans() -> None:
    print("MiB of state per rank by plan, muon+adamw: on the device, and in host memory")
    print(f"{'model':>14} {'mesh':>13} " + " ".join(f"{state or 'as it is':>16}" for state in STORAGES))
    for model, mesh in MODELS:
        sizes = [planned(model, mesh, state) for state in STORAGES]
        cells = (f"{device / MIB:,.0f}" + (f" + {host / MIB:,.0f}" if host else "") for device, host in sizes)
        print(f"{model:>14} {mesh:>13} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)


def show_times(rounds: int) -> None:
    print(f"a step in one process, ratio to one without state=, medians of {rounds} rounds in turn")
    made = [(state, decoder()) for state in STORAGES]
    steppers = [
        (state, model, canzona_compile.muon_adamw(model, lr=1e-3, state=state, numerics="fast"))
        for state, model in made
    ]
    for _, model, optimizer in steppers:
        trained(model, optimizer, 3)
    seconds: list[Sequence[float]] = []
    for _ in range(rounds):
        taken = []
        for _, _, optimizer in steppers:
            begin = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - begin)
        seconds.append(taken)
    plain = [taken[0] for taken in seconds]
    print(f"{'as it is':>10} {1000 * statistics.median(plain):8.1f} ms")
    for i, (state, _, _) in enumerate(steppers[1:], 1):
        print(f"{state or '':>10} {statistics.median(taken[i] / taken[0] for taken in seconds):8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("measured", "plans", "times"))
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "measured": show_measured,
        "plans": show_plans,
        "times": lambda: show_times(given.rounds),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            part()


if __name__ == "__main__":
    main()
