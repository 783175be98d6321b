"""Train a small language model on sharded weights, its hidden matrices with Muon and all else with AdamW: one line.

    python examples/train_lm.py
    python examples/train_lm.py --parallel tp --steps 100
    python examples/train_lm.py --experts 8
    python examples/train_lm.py --optimizer soap
    python examples/train_lm.py --device cuda --ranks 1

The line is `optimizer = canzona_compile.muon_adamw(model, ...)` in `make_optimizer`. Everything
around it is plain PyTorch: ranks that this script starts itself, a decoder spread over them, a
schedule, clipping. During the first steps the plain optimizers run in one process on the same
gradients; the script exits with 1 if a single bit of any parameter differs, or if the loss did not
fall. On GPUs it does not compare: products are rounded in other orders there. After the tenth step
it shows how long each phase of the optimizer's steps took.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import canzona_compile
from canzona_compile import Chain
from canzona_compile.optimizers import KLSOAP, SOAP, Muon, NorMuon
from lm_data import Batches, standard_library
from lm_log import LossLog
from lm_model import Decoder, ModelConfig
from lm_parallel import PARALLEL, Parallel, clip_gradients
from lm_show import Display, History
from lm_verify import NamedParameters, PlainOptimizer

# What the chosen optimizer trains decays, by the default of muon_adamw; embeddings, norms and all else do not.
OTHERS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
DECAY = 0.1
# What trains hidden matrices. Updates of all have the size of AdamW's, so one learning rate does for a whole model.
HIDDEN: dict[str, Callable[..., Any]] = {
    "muon": partial(Muon, adjust_lr_fn="match_rms_adamw"),
    "normuon": NorMuon,
    "soap": SOAP,
    "kl-soap": KLSOAP,
    "adamw": partial(AdamW, betas=(0.9, 0.95)),
}
BUILDERS: dict[str, Callable[..., Chain]] = {
    "muon": canzona_compile.muon_adamw,
    "soap": canzona_compile.soap_adamw,
    "kl-soap": canzona_compile.kl_soap_adamw,
}
PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}  # instructions that torch and MKL may use
WARM_UP, MEASURED = 5, 5  # steps before those that are timed, and how many are: then the report shows their phases


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    steps: int
    verify: int
    ranks: int
    parallel: str
    optimizer: str
    lr: float
    batch: int
    clip: float
    seed: int
    tied: bool
    experts: int
    until: int | None
    log: str | None
    digests: bool
    portable: bool
    numerics: str
    state: str | None
    device: str

    def place(self, rank: int) -> torch.device:
        """Say where a rank computes."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", rank)


def main() -> int:
    """Start the ranks, wait for them, and say with the exit code whether all went well."""
    options = parse()
    if options.portable:
        os.environ.update(PORTABLE)  # which libraries read when they first compute
    Console().print(
        f"[bold]{options.optimizer}[/] on [bold]{options.parallel}[/] over {options.ranks} ranks: "
        "a byte-level decoder learns Python from the standard library",
        highlight=False,
        soft_wrap=True,
    )
    spawn = get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.ranks, mp_context=spawn) as pool,
    ):
        meeting_point = f"file://{folder}/store"  # unlike a port, never taken by others
        ranks = range(options.ranks)
        futures = [pool.submit(worker, rank, options, meeting_point) for rank in ranks]
        good = [future.result() for future in as_completed(futures)]
    return 0 if all(good) else 1


def parse() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, metavar="N")
    add("--steps", type=int, default=60, help="training steps (60)")
    add("--verify", type=int, help="steps that plain optimizers check (3, or 0 on GPUs and with fast numerics)")
    add("--ranks", type=int, default=4, help="processes to start (4)")
    add("--batch", type=int, default=32, help="sequences per step, over all ranks (32)")
    add("--lr", type=float, default=4e-3, help="peak learning rate (0.004)")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient (1.0)")
    add("--seed", type=int, default=0, help="of weights and batches (0)")
    add("--experts", type=int, default=0, help="of each feed-forward, two per token (0: no experts)")
    choose = parser.add_argument
    choose("--parallel", choices=PARALLEL, default="fsdp", help="how the model is spread (fsdp)")
    choose("--optimizer", choices=HIDDEN, default="muon", help="of hidden matrices (muon)")
    choose("--portable", action="store_true", help="use no instructions beyond AVX2, for equal bits elsewhere; slower")
    choose("--untied", dest="tied", action="store_false", help="give the head its own weight")
    add("--until", type=int, help="stop after this step, on the way to the last one")
    choose("--log", metavar="FILE", help="write the loss of each step, and a digest of the parameters that it is of")
    choose("--no-digests", dest="digests", action="store_false", help="of parameters in the log, which take time")
    choose("--numerics", choices=("exact", "fast"), default="exact", help="fast rounds in other ways (exact)")
    choose("--state", metavar="HOW", help="store state so: int8, bfloat16, cpu, or a dtype and cpu")
    choose("--device", choices=("cpu", "cuda"), default="cpu", help="of each rank: on cuda a GPU (cpu)")
    given = parser.parse_args()
    if given.verify is None:
        given.verify = 3 if given.device == "cpu" and given.numerics == "exact" else 0
    options = Options(**vars(given))
    if options.device == "cuda" and options.ranks > torch.cuda.device_count():
        parser.error(
            f"--device cuda takes a GPU for each of {options.ranks} ranks: there are {torch.cuda.device_count()}"
        )
    if options.steps < 2 or options.ranks < 1:
        parser.error("a falling loss takes at least 2 steps and 1 rank")
    if options.ranks % 2 and options.parallel in ("tp", "fsdp-tp", "hsdp", "zero1-tp"):
        parser.error(f"--parallel {options.parallel} splits the ranks in two: give an even number")
    if options.experts and (options.experts < 2 or options.parallel in ("tp", "fsdp-tp", "zero1-tp")):
        parser.error("--experts takes at least 2, and no --parallel with tp, which would have to cut them")
    if options.batch % options.ranks:
        parser.error("--batch has to be a multiple of --ranks")
    return options


def worker(rank: int, options: Options, meeting_point: str) -> bool:
    """Train as one rank among others."""
    torch.set_num_threads(1)  # the ranks share the cores
    if options.portable:
        torch.backends.mkldnn.set_flags(_enabled=False)  # it chooses kernels by the processor, whatever it is told
    place = options.place(rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=meeting_point,
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=2),
    )
    try:
        return train(options, place)
    finally:
        dist.destroy_process_group()


def train(options: Options, place: torch.device) -> bool:
    """Train, and say whether the loss fell and every weight that was verified was equal."""
    begin = time.perf_counter()
    torch.manual_seed(options.seed)  # the same weights on every rank
    config = ModelConfig(tied=options.tied, num_experts=options.experts)
    model = Decoder(config).to(place)
    parallel = PARALLEL[options.parallel](model)
    parameters = list(model.parameters())
    choice = canzona_compile.hidden_matrices(model, batch_dims=True)
    optimizer: Any = make_optimizer(options, model, parallel)
    schedule = LambdaLR(optimizer, partial(warm_cosine, options.steps))
    plain = PlainOptimizer(optimizer, choice.matrices, choice.others, partial(plain_chain, options))

    batches = Batches(
        standard_library(),
        batch=options.batch // parallel.num_data_ranks,
        context=config.context,
        seed=options.seed,
        part=parallel.data_rank,
    )
    history, log = History(), LossLog(options.log, place, options.digests)
    with Display(options.steps, silent=dist.get_rank() != 0) as display:
        for step in range(1, (options.until or options.steps) + 1):
            loss = parallel.forward(*(part.to(place) for part in batches.draw()))
            loss.backward()
            if parallel.zero1 is None:
                parallel.finish_gradients(parameters)
                norm = clip_gradients(parameters, options.clip)
            else:
                norm = float(optimizer.canzona.clip_grad_norm_(options.clip))

            digest = log.digest(model)
            verify = step <= options.verify
            if verify:
                plain.step()
            if step == WARM_UP + 1:
                optimizer.canzona.measure(MEASURED)
            finish(place)
            step_begin = time.perf_counter()
            optimizer.step()
            finish(place)
            seconds = time.perf_counter() - step_begin
            model.zero_grad()

            history.losses.append(average_over_ranks(loss.detach()))
            log.add(step, history.losses[-1], digest, seconds)
            note = f"gradient {norm:.2f}  optimizer {1000 * seconds:.0f} ms"
            if verify:
                if parallel.zero1 is not None:
                    optimizer.canzona.synchronize()
                note += f"  {verdict(plain, history)}"
            if step in (1, WARM_UP + MEASURED):
                display.say(optimizer.canzona.report())
            learning_rate = float(schedule.get_last_lr()[0])
            display.advance(history.losses[-1], learning_rate, note, always=verify)
            schedule.step()
        display.outcome(history, time.perf_counter() - begin)
    return history.good


def make_optimizer(options: Options, model: Decoder, parallel: Parallel) -> Chain:
    """Make one optimizer for the whole model, which computes each hidden matrix on one rank."""
    how = {**parallel.options, "zero1": parallel.zero1, "numerics": options.numerics, "state": options.state}
    if build := BUILDERS.get(options.optimizer):
        return build(model, options.lr, adamw=OTHERS, **how)
    return canzona_compile.optimizer_for(model, *both(options), batch_dims=True, **how)


def plain_chain(options: Options, matrices: NamedParameters, others: NamedParameters) -> Chain:
    """Make the same optimizers as plain ones."""
    hidden, other = both(options)
    made = canzona_compile.chain(hidden(matrices), other(others))
    if options.state is not None:
        canzona_compile.round_state(made, options.state)
    return made


def both(options: Options) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Say what makes the optimizer of hidden matrices, and that of all else."""
    hidden = partial(HIDDEN[options.optimizer], lr=options.lr, weight_decay=DECAY)
    return hidden, partial(AdamW, lr=options.lr, **OTHERS)


def verdict(plain: PlainOptimizer, history: History) -> str:
    """Compare the weights with the plain optimizer's, and say it."""
    differing = plain.differing()
    history.verified += 1
    history.differing += [name for name in differing if name not in history.differing]
    if differing:
        return f"[red]{differing[0]} differs from plain, {len(differing)} in all[/]"
    return f"[green]{plain.num_matrices} matrices and {plain.num_others} others bitwise equal to plain[/]"


def finish(place: torch.device) -> None:
    """Wait for a GPU, so that times are of its work."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def average_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a number over all ranks."""
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def warm_cosine(steps: int, step: int) -> float:
    """Scale the learning rate: up over the first steps, then half a cosine down to a tenth."""
    warmup = max(1, min(5, steps // 4))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


if __name__ == "__main__":
    sys.exit(main())
