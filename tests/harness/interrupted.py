"""A process that gets SIGINT again and again while its optimizer takes first steps.

    python -m tests.harness.interrupted soap

After each step that was interrupted nothing of ours is left in the process; at the end a step is that of plain.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import canzona_compile
from canzona_compile.compat.torch_private import count_function_modes, dispatch_modes
from examples.optimizers.soap import SOAP
from tests.harness.pairs import feed, parameters, params_of
from tests.harness.toys import DecoratedMuon

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": lambda params: torch.optim.Muon(params, lr=0.02),
    "soap": lambda params: SOAP(params, lr=0.02),
    "dispatched": lambda params: DecoratedMuon(params),
}
INTERRUPTED = 25  # steps
MEAN = 0.06  # seconds between signals
POWER = math.pow


def begun(kind: str) -> Optimizer:
    return KINDS[kind](parameters(((6, 4), (5, 8))))


def storm(going: threading.Event) -> None:
    moments = random.Random(0)
    while True:
        going.wait()
        time.sleep(moments.expovariate(1 / MEAN))
        if going.is_set():
            os.kill(os.getpid(), signal.SIGINT)


def left_over() -> list[str]:
    """What a step has left in the process."""
    found = {
        "dispatch modes": bool(dispatch_modes()),
        "function modes": bool(count_function_modes()),
        "another handler": signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
        "another power": math.pow is not POWER,
        "a profiler": sys.getprofile() is not None,
        "another randn": torch.randn(3).device.type != "cpu",
    }
    return [what for what, there in found.items() if there]


def main(kind: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    going = threading.Event()
    threading.Thread(target=storm, args=(going,), daemon=True).start()
    interrupted = 0
    while interrupted < INTERRUPTED:
        optimizer = canzona_compile.wrap(begun(kind))
        feed(optimizer, 0)
        try:
            try:
                going.set()
                optimizer.step()
            finally:
                going.clear()
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupted += 1
        try:
            time.sleep(0.01)  # for one that was sent before
        except KeyboardInterrupt:
            interrupted += 1
        assert not left_over(), left_over()
    plain, ours = begun(kind), canzona_compile.wrap(begun(kind))
    for step in range(3):
        for optimizer in (plain, ours):
            feed(optimizer, step)
            optimizer.step()
    assert all(map(torch.equal, params_of(plain), params_of(ours)))
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
