"""Measure the host's CPU time of steady steps or of the first step: this checkout beside another one, in turn.

    git worktree add ../before v0.1.0
    python benchmarks/host_time.py --against ../before
    python benchmarks/host_time.py --against ../before --first-step --rounds 5

Each checkout has a process of its own, one thread, one rank. Both wrap torch's Muon over the 448 matrices of
Qwen3-32B's layers with every dim divided by 160, so that next to nothing is computed and the host's work is what is
left. The processes take turns, one round of steps each; only one runs at a time. The figures are medians of CPU
seconds over the rounds, and the ratio is the median of the rounds' ratios.

With `--first-step` each round starts new processes. The figure is the CPU time from `import canzona_compile` to the
end of the first step, and lines below it say which part took how much. Torch is imported and the plain optimizer is
built before that. `--model llama` takes a tiny Llama of transformers instead, as the tests of clients do, with Muon for
its hidden matrices and AdamW for all else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

OURS = Path(__file__).resolve().parents[1]
WARM_UP = 10  # steps, after the first, which captures and plans
STEPS = 20  # of a round


def main() -> int:
    """Measure both checkouts, and print a line for each and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=15, help="of each checkout (default: %(default)s)")
    parser.add_argument("--first-step", action="store_true", help="from the import of the package to its end")
    parser.add_argument("--model", choices=["layers", "llama"], default="layers", help="(default: %(default)s)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.model)
    checkouts = [OURS, *([given.against.resolve()] if given.against else [])]
    if given.first_step:
        unit, what = 1e3, "ms until the first step is done"
        parts: dict[str, list[float]] = defaultdict(list)
        rounds = [[first_step(checkout, given.model, parts) for checkout in checkouts] for _ in range(given.rounds)]
    else:
        unit, what = 1e6, "us per matrix and step"
        children = [started(checkout, given.model)[0] for checkout in checkouts]
        rounds = [[one_round(child) for child in children] for _ in range(given.rounds)]
        for child in children:
            end(child)
    for checkout, figures in zip(checkouts, zip(*rounds, strict=True), strict=True):
        print(f"{statistics.median(figures) * unit:8.1f} {what}  {checkout.name}")
    for part, seconds in (parts if given.first_step else {}).items():
        print(f"{statistics.median(seconds) * unit:8.1f} ms {part}")
    if given.against:
        print(f"{statistics.median(ours / other for ours, other in rounds):8.3f} times {given.against}")
    return 0


def started(checkout: Path, model: str) -> tuple[subprocess.Popen[str], dict[str, float]]:
    """Start and warm up the process of a checkout. Return it, and its CPU seconds of the first step by part."""
    if not (checkout / "canzona_compile").is_dir():
        sys.exit(f"{checkout} is no checkout: it has no folder canzona_compile")
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--serve", "--model", model],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    home = stream(child.stdout).readline().strip()
    if not home.startswith(str(checkout)):
        sys.exit(f"the process of {checkout} imported {home or 'nothing'}")
    return child, json.loads(stream(child.stdout).readline())


def first_step(checkout: Path, model: str, parts: dict[str, list[float]]) -> float:
    """CPU seconds from the import of the package to the end of the first step, in a new process.

    Args:
        checkout: whose package it is.
        model: whose parameters are stepped.
        parts: gets the seconds of every part, if the checkout is this one.
    """
    child, taken = started(checkout, model)
    end(child)
    for part, seconds in taken.items() if checkout == OURS else ():
        parts[part].append(seconds)
    return sum(taken.values())


def end(child: subprocess.Popen[str]) -> None:
    """Close the input of a process, which ends it, and wait for it."""
    stream(child.stdin).close()
    child.wait()


def one_round(child: subprocess.Popen[str]) -> float:
    """CPU seconds per matrix and step, of one round of a process."""
    print("round", file=stream(child.stdin), flush=True)
    return float(stream(child.stdout).readline())


def stream(file: IO[str] | None) -> IO[str]:
    """A pipe of a process that was started with one."""
    assert file is not None
    return file


def serve(name: str) -> int:
    """Be the process of a checkout: take a round of steps for each line of standard input, print its figure."""
    sys.path.pop(0)  # this folder; what is imported below has to be the checkout's
    import torch

    torch.set_num_threads(1)
    layer = ((64, 32), (32, 32), (32, 32), (32, 64), (160, 32), (160, 32), (32, 160))  # products of 16 are not stacked
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        params = list(model.parameters())
    else:
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in layer * 64]
        plain = torch.optim.Muon(params, lr=1e-3)
    for param in params:
        param.grad = torch.randn_like(param)
    taken, last = {"importing": 0.0}, time.process_time()

    def hear(words: str, done: int = 0, total: int = 0) -> None:
        """Count the time since the last words for the part that they begin: "capturing", "planning", ..."""
        nonlocal last
        now, part = time.process_time(), list(taken)[-1]
        taken[part] += now - last
        last = now
        word = words.split()[0]
        taken[word] = taken.pop(word, 0.0)  # the last one is under way

    import canzona_compile
    from canzona_compile.compat.telling import heard_by

    optimizer = canzona_compile.muon_adamw(model) if name == "llama" else canzona_compile.wrap(plain)
    with heard_by(hear):
        optimizer.step()
    hear("done")
    del taken["done"]
    for _ in range(WARM_UP):
        optimizer.step()
    print(Path(canzona_compile.__file__).parent, json.dumps(taken), sep="\n", flush=True)
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(STEPS):
            optimizer.step()
        print((time.process_time() - begin) / STEPS / len(params), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
