"""The scripts of the pages: on how many ranks each of them runs, and a run of one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from canzona_compile.api.chain import Chain
from canzona_compile.compat.optimizer_class import plain_class
from tests.harness.beside import BesidePlain
from tests.harness.ranks import run
from tests.harness.verdicts import reached

ROOT = Path(__file__).parents[2]
How = Literal["beside", "alone", "plain"]
# Run by `python`.
ALONE = {"any_optimizer", "a_pass", "a_layout", "an_optimizer", "my_model", "rates", "their_optimizer"}
TWO = "fsdp2 any_pair clip_others eight_bit plain_fragments ddp zero1 a_transport experts pipeline fused_weights"
TWO += " accelerate_loop fabric_loop lightning_trainer trainer sft_trainer torchtitan_optimizers deepspeed_engine"
TWO += " checkpoints planning graphs skip_steps stored_state own_muon lora averages schedule_free float8 unfreeze"
TWO += " changed_choice"
SCRIPTS = {**dict.fromkeys(TWO.split(), 2), "tensor_parallel": 4, **dict.fromkeys(sorted(ALONE), 1)}  # on so many ranks


def path_of(name: str) -> Path:
    return ROOT / "docs" / "scripts" / f"{name}.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# What scripts leave. If a script's DDP is the last to hold a gloo process group, torch joins a thread of that group
# with the GIL held, and that thread may wait for the GIL to free a collective: the rank would hang.
KEPT: list[dict[str, Any]] = []


class Trained(NamedTuple):
    """A parameter after the last step.

    Attributes:
        by: the class of its optimizer.
        changed: whether it is another one than after the first step.
        sharded: whether it is a DTensor.
        bits: its value, in short.
    """

    by: str
    changed: bool
    sharded: bool
    bits: str


class WatchedChains:
    """Follows the steps of chains, wrapped or not, by a hook of torch for all optimizers.

    The hook comes after steps: after one before them, wrapped chains look at their gradients once more.

    Attributes:
        trained: what became of each parameter that has a name in its group, by name.
    """

    def __init__(self) -> None:
        self.trained: dict[str, Trained] = {}
        self._first: dict[str, str] = {}
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def __enter__(self) -> WatchedChains:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _after_step(self, chain: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(chain, Chain):
            return
        for optimizer in chain.optimizers:
            for group in optimizer.param_groups:
                named = zip(group["param_names"], group["params"], strict=True) if "param_names" in group else ()
                for name, param in named:
                    found = digest(param)
                    changed = self._first.setdefault(name, found) != found
                    self.trained[name] = Trained(plain_class(optimizer).__name__, changed, is_sharded(param), found)


def is_sharded(param: Tensor) -> bool:
    return isinstance(param, DTensor)


def digest(param: Any) -> str:
    """The bits of a parameter, in short. A collective if it is sharded."""
    value = param.detach().full_tensor() if is_sharded(param) else param.detach()
    return hashlib.sha256(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Ran(NamedTuple):
    """What a script did on a rank.

    Attributes:
        said: what it printed.
        compared: how many parameters were compared with those of plain optimizers, if they ran beside it.
        differing: which of them differed.
        trained: what became of the parameters of chains.
        ways: how parameters ran, by class of the optimizer, if plain ones ran beside it.
    """

    said: str
    compared: int
    differing: list[str]
    trained: dict[str, Trained]
    ways: dict[str, set[str]]

    @property
    def reached(self) -> str:
        """The line of tests/golden/verdicts/ that it gives."""
        ways = {f"{kind} {way}" for kind, own in self.ways.items() for way in own}
        return reached("different" if self.differing else "equal", ways)


def run_script(path: str, arguments: list[str], port: int, how: How) -> Ran:
    """Run a script on this rank as torchrun would.

    The rank's process group ends, so that the script can make its own: call this in fresh processes.

    Args:
        path: of the script.
        arguments: its arguments.
        port: for its process group.
        how: "beside" plain optimizers; "alone", with no hook before steps; or "plain", where what `muon_adamw` makes
            is not wrapped.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or the first rank hangs up while another one still connects
    dist.destroy_process_group()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    printed, beside = io.StringIO(), BesidePlain() if how == "beside" else None
    with (
        mock.patch.dict(os.environ, {k: str(v) for k, v in variables.items()}, MASTER_ADDR="localhost"),
        mock.patch.object(sys, "argv", [path, *arguments]),
        fsdp2_on_cpus(),
        not_wrapped() if how == "plain" else contextlib.nullcontext(),
        WatchedChains() as watched,
        contextlib.redirect_stdout(printed),
    ):
        try:
            KEPT.append(runpy.run_path(path, run_name="__main__"))
        finally:
            if beside is not None:
                beside.close()
    compared, differing, ways = (0, [], {}) if beside is None else (beside.compared, beside.differing, beside.ways)
    return Ran(printed.getvalue(), compared, differing, watched.trained, ways)


def not_wrapped() -> contextlib.AbstractContextManager[Any]:
    """Inside this context, `muon_adamw` returns a plain chain."""
    return mock.patch.object(import_module("canzona_compile.api.whole_model"), "wrap", lambda chain, **options: chain)


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


def ran(path: Path, ranks: int, *arguments: str, how: How = "beside") -> list[Ran]:
    """Run a script on ranks; what `run_script` returns on each."""
    return run(ranks, run_script, str(path), list(arguments), free_port(), how, fresh=True)
