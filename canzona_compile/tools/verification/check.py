"""`verify`: the wrapped optimizer on some ranks against the plain one on one device, bit by bit."""

from __future__ import annotations

import logging
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from canzona_compile.compat.telling import shown, tell
from canzona_compile.ir.options import MissingGrads, Numerics, StrategyOption, WrapOptions, made_options
from canzona_compile.ir.storage import parse_state
from canzona_compile.ownership import NAMES
from canzona_compile.tools.output import check_output, show, write
from canzona_compile.tools.processes import ProcessCall, run_ranks
from canzona_compile.tools.verification.as_is import compared
from canzona_compile.tools.verification.findings import Verification, merged, of_both_plans
from canzona_compile.tools.verification.layouts import LayoutName
from canzona_compile.tools.verification.user_model import Build, CannotVerify, name_of, packed
from canzona_compile.tools.verification.workers import Order, RankOutcome, run_plain, run_wrapped

log = logging.getLogger(__name__)

# These cannot be given: the layout of `verify` decides `replicate` and leaves no plain fragments; the plain optimizer
# neither staggers nor splits parameters, so there would be nothing to compare with; and the CPU has no CUDA graphs.
NOT_GIVEN = {"replicate", "layout", "skip_nonfinite", "stagger", "split", "cuda_graphs"}
HOW = ("eager", "local")  # ways that have a reason, as fields of `Verification`
OPTIONS = sorted(WrapOptions.__optional_keys__ - NOT_GIVEN)


def verify(
    build: Build | str,
    *,
    steps: int = 5,
    ranks: int = 2,
    layout: LayoutName = "fsdp",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    json: str | Path | None = None,
    limit: float | None = None,
    as_is: bool = False,
) -> Verification:
    """Compare the wrapped optimizer on gloo ranks with the plain one on one device, bit by bit.

    This starts `ranks` + 1 processes of one thread. One runs the plain optimizer on whole tensors. The others shard the
    parameters, wrap the optimizer, take the plain run's gradients, and compare their part of each parameter and of each
    leaf of `state_dict()` after every step. Where the plan has every rank compute a matrix, because it is small, they
    take all steps a second time with an owner for each matrix, as larger ones have, unless `options` say how to plan.

    With `as_is` the optimizer on the ranks is one that is distributed already. It gets the plain run's gradients, laid
    out as its parameters are, and parameters are compared. If bits differ, all processes run a second time, with floats
    of 64 bits: `.verdict` says whether rounding explains the difference.

    Args:
        build: a function that returns (model, optimizer) or (model, optimizer, loss). The model is not sharded, the
            optimizer is not wrapped, and parameters are on the CPU. `build` runs in every process, after `random`,
            torch and numpy were seeded, and has to make the same values each time. `loss(model, step)` returns a
            tensor of one element, whose gradients are used; without it gradients are random. A function has to be
            picklable, that is, a module has to define it at its top level. A text "module:function" names one that
            only the processes import. With `as_is` it takes an argument: None asks for the model and its plain
            optimizer as above, a `DeviceMesh` of all ranks for the same model sharded, with the same names, and the
            distributed optimizer.
        steps: how many to compare; at least 2, because the first step of a wrapped optimizer is always eager.
        ranks: how many gloo ranks to start on this machine.
        layout: "fsdp" shards rows, unevenly where they do not divide; "fsdp_columns" shards columns, and the rows of
            what has no columns; "hsdp" shards rows in two replicas; "ddp" gives every rank whole plain tensors; "zero1"
            does too, and calls `zero1` in place of `wrap`, with backward passes that reduce gradients to owners. With
            `as_is` it only names the dims of the mesh: "replicate" (of two) and "shard" for "hsdp", "replicate" for
            "ddp" and "zero1", "shard" for others.
        seed: for `build` and for random gradients.
        options: options of `wrap`. Not among them are `replicate`, which follows from the layout, options that make
            another algorithm (`stagger`, `split`), and those for CUDA.
        json: a file to write the result to.
        limit: seconds until the processes are ended, 600 if None. With `as_is`, seconds without progress after which
            the ranks hang, 60 if None.
        as_is: whether `build` returns a distributed optimizer on ranks.

    Returns:
        One row per leaf, and how each parameter was updated. Leaves that differ raise nothing: look at `.ok`. With
        `as_is`, `.verdict` is "equal bits", "equal to rounding", "another algorithm", "error" or "hang".

    Raises:
        CanzonaError: the file cannot be, or there is nothing to compare: `build` failed or returned something else,
            `wrap` refuses the optimizer, a process died, or the limit is over. All processes have ended then. With
            `as_is`, what the distributed optimizer does is a verdict, and only a failure of the plain one raises.
    """
    limit = (60.0 if as_is else 600.0) if limit is None else limit
    options = dict(options or {})
    check_arguments(steps, ranks, layout, limit, options)
    check_output(json, "json")
    if as_is and options:
        raise CannotVerify(f"as_is wraps nothing, so option {next(iter(options))!r} has no effect", hint="leave it out")
    if not as_is and layout == "zero1" and ranks & (ranks - 1):
        raise CannotVerify(
            f"zero1 averages gradients, which is not exact on {ranks} ranks, so bits would differ from the plain "
            "optimizer",
            hint="use 2, 4 or 8 ranks",
        )
    begin, source = time.monotonic(), packed(build)
    tell("starting processes", 0, steps)
    log.info("verify %s: %d ranks and the plain optimizer, %d steps", name_of(build), ranks, steps)
    order = Order(source, steps, layout, seed, options)
    seen = seen_as_is(order, ranks, limit) if as_is else seen_wrapped(order, ranks, limit)
    found = Verification(
        build=name_of(build),
        steps=steps,
        ranks=ranks,
        layout=layout,
        seed=seed,
        options=options,
        torch=torch.__version__,
        seconds=round(time.monotonic() - begin, 2),
        **seen,
    )
    if json is not None:
        write(f"{found.to_json()}\n", json, "json")
    return found


def seen_wrapped(order: Order, ranks: int, limit: float) -> dict[str, Any]:
    """What is found of the wrapped optimizer, as fields of `Verification`."""
    with tempfile.TemporaryDirectory(prefix="canzona-journal-") as folder:
        plain = ProcessCall("plain", run_plain, (order, folder))
        outcomes: list[RankOutcome] = run_ranks(ranks, run_wrapped, (order, folder), limit, beside=[plain])
    first = outcomes[0]
    roles = {name: role for own in reversed(outcomes) for name, role in own.roles.items()}  # each knows what it owns
    reasons: dict[str, Any] = {how: {name: why for name, (own, why) in roles.items() if own == how} for how in HOW}
    return {
        **reasons,
        "optimizer": first.optimizer,
        "compiled": tuple(
            dict.fromkeys(n for own in outcomes for n, (how, _) in own.roles.items() if how == "compiled")
        ),
        "idle": first.idle,
        "leaves": of_both_plans(*(merged([getattr(o, plan) for o in outcomes]) for plan in ("leaves", "owned"))),
        "everywhere": first.everywhere,
        "bits": first.bits,
    }


def seen_as_is(order: Order, ranks: int, limit: float) -> dict[str, Any]:
    """What is found of an optimizer that is distributed already."""
    return dict(zip(("optimizer", "leaves", "as_is"), compared(order, ranks, limit), strict=True))


def check_arguments(steps: int, ranks: int, layout: LayoutName, limit: float, options: dict[str, Any]) -> None:
    """Refuse arguments with which every process would fail alike."""
    if steps < 2:
        raise CannotVerify(f"steps={steps} checks nothing", hint="use 2 or more, because the first step is eager")
    if ranks < 1:
        raise CannotVerify(f"ranks={ranks} is not positive")
    if layout not in get_args(LayoutName):
        raise CannotVerify(f"there is no layout {layout!r}", hint=f"one of {', '.join(get_args(LayoutName))}")
    if layout == "hsdp" and ranks % 2:
        raise CannotVerify(f"hsdp halves the ranks, and {ranks} is odd", hint="use an even number of ranks")
    if layout == "zero1" and "strategy" in options:
        raise CannotVerify("zero1 has no option strategy: each matrix has one owner", hint="leave it out")
    if limit <= 0:
        raise CannotVerify(f"limit={limit} is not positive")
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise CannotVerify(
            f"verify has no option {unknown[0]!r}",
            hint=f"use {', '.join(OPTIONS)}; layout determines replicate",
        )
    made_options("verify", WrapOptions.__optional_keys__, options)


# -- the command ----------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `verify` to its parser."""
    add = parser.add_argument
    add(
        "build",
        metavar="module:function",
        help="function that returns (model, optimizer) or (model, optimizer, loss) on the CPU",
    )
    add("--steps", type=int, default=5, help="number of steps to compare (%(default)s)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add(
        "--as-is",
        action="store_true",
        help="check an optimizer that is distributed already: the function takes None, or a DeviceMesh on ranks",
    )
    add("--ranks", type=int, default=2, help="number of gloo processes (%(default)s)")
    add(
        "--layout",
        choices=get_args(LayoutName),
        default="fsdp",
        help="how parameters are sharded (%(default)s)",
    )
    add("--seed", type=int, default=0, help="seed for build and for random gradients (%(default)s)")
    add(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="seconds before the processes are killed (600); with --as-is, seconds without progress (60)",
    )
    wrap = parser.add_argument_group("options of wrap")
    for name, kind in (("strategy", StrategyOption), ("numerics", Numerics), ("missing-grads", MissingGrads)):
        wrap.add_argument(f"--{name}", choices=get_args(kind))
    for name in ("capacity", "micro-groups", "depth", "audit"):
        wrap.add_argument(f"--{name}", type=int, metavar="N")
    wrap.add_argument("--state", type=parse_state, metavar="HOW", help="int8, bfloat16, cpu, or leaf=how,leaf=how")
    wrap.add_argument("--planner", choices=NAMES)
    wrap.add_argument("--alpha", type=float, metavar="A")
    for name in ("hardware", "plan"):
        wrap.add_argument(f"--{name}", metavar="FILE")


def run(given: Namespace) -> int:
    """Verify, print the result, and return the exit code: 0 if all is equal, 1 if not."""
    # No argument is a function, as `one_per_matrix` is.
    options = {name: value for name in OPTIONS if (value := getattr(given, name, None)) is not None}
    asked = {name: getattr(given, name) for name in ("steps", "ranks", "layout", "seed", "limit", "as_is")}
    with shown("verify", quiet=given.quiet):
        found = verify(given.build, options=options, **asked)
    show(found, found.to_json if given.json else None)
    return 0 if found.ok else 1
