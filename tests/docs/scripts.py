"""The scripts of the pages: on how many ranks each of them runs, and a run of one."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.docs.beside_plain import BesidePlain
from tests.harness.ranks import run

ROOT = Path(__file__).parents[2]
ALONE = {"any_optimizer", "a_pass", "my_model"}  # run by `python`, or imported
SCRIPTS = {  # with the number of ranks on which the pages run them
    "fsdp2": 2,
    "any_pair": 2,
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


def run_script(path: str, arguments: list[str], port: int) -> tuple[str, int, list[str]]:
    """Run a script on this rank as torchrun would, beside plain optimizers.

    The rank's process group ends, so that the script can make its own: call this in fresh processes.

    Returns:
        What it printed, how many parameters were compared, and which of them differed.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or the first rank hangs up while another one still connects
    dist.destroy_process_group()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    printed, beside = io.StringIO(), BesidePlain()
    with (
        mock.patch.dict(os.environ, {k: str(v) for k, v in variables.items()}, MASTER_ADDR="localhost"),
        mock.patch.object(sys, "argv", [path, *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            beside.close()
    return printed.getvalue(), beside.compared, beside.differing


def ran(path: Path, ranks: int, *arguments: str) -> list[tuple[str, int, list[str]]]:
    """Run a script on ranks; what `run_script` returns on each."""
    return run(ranks, run_script, str(path), list(arguments), free_port(), fresh=True)
