"""The scripts of the pages: on how many ranks each of them runs, and a run of one."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from tests.docs.beside_plain import BesidePlain, Trained
from tests.harness.ranks import run

ROOT = Path(__file__).parents[2]
ALONE = {"any_optimizer", "a_pass", "my_model"}  # run by `python`, or imported
SCRIPTS = {  # with the number of ranks on which the pages run them
    "fsdp2": 2,
    "any_pair": 2,
    "clip_others": 2,
    "eight_bit": 2,
    "tensor_parallel": 4,
    "plain_fragments": 2,
    "ddp": 2,
    "zero1": 2,
    "experts": 2,
    "pipeline": 2,
    "accelerate_loop": 2,
    "fabric_loop": 2,
    "lightning_trainer": 2,
    "trainer": 2,
    "torchtitan_optimizers": 2,
    "fused_weights": 2,
    "checkpoints": 2,
    "planning": 2,
    "graphs": 2,
    "any_optimizer": 1,
    "a_pass": 1,
    "my_model": 1,
}


def path_of(name: str) -> Path:
    return ROOT / "docs" / "scripts" / f"{name}.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


class Ran(NamedTuple):
    """What a script did on a rank: what it printed, and what became of the parameters that were compared."""

    said: str
    compared: int
    differing: list[str]
    trained: dict[str, Trained]


def run_script(path: str, arguments: list[str], port: int) -> Ran:
    """Run a script on this rank as torchrun would, beside plain optimizers.

    The rank's process group ends, so that the script can make its own: call this in fresh processes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or the first rank hangs up while another one still connects
    dist.destroy_process_group()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    printed, beside = io.StringIO(), BesidePlain()
    with (
        mock.patch.dict(os.environ, {k: str(v) for k, v in variables.items()}, MASTER_ADDR="localhost"),
        mock.patch.object(sys, "argv", [path, *arguments]),
        fsdp2_on_cpus(),
        contextlib.redirect_stdout(printed),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            beside.close()
    return Ran(printed.getvalue(), beside.compared, beside.differing, beside.trained)


@contextlib.contextmanager
def fsdp2_on_cpus() -> Iterator[None]:
    """Inside this context, Accelerate takes FSDP2 on CPUs, too, where it would take DDP."""
    if find_spec("accelerate") is None:
        yield
        return
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if options.get("fsdp_plugin") is not None:
            PartialState().distributed_type = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = options["fsdp_plugin"]

    with mock.patch.object(AcceleratorState, "__init__", init):
        yield


def ran(path: Path, ranks: int, *arguments: str) -> list[Ran]:
    """Run a script on ranks; what `run_script` returns on each."""
    return run(ranks, run_script, str(path), list(arguments), free_port(), fresh=True)
