"""`python -m canzona_compile verify module:function`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, get_args

from canzona_compile.compat.telling import shown
from canzona_compile.ir.options import MissingGrads, Numerics, StrategyOption
from canzona_compile.ownership import NAMES
from canzona_compile.tools.output import show
from canzona_compile.tools.verification.check import OPTIONS, verify
from canzona_compile.tools.verification.layouts import LayoutName


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
    add_run_arguments(parser)


def add_run_arguments(parser: ArgumentParser) -> None:
    """Add what says how a user's model runs on gloo ranks: how many, its layout, and options of `wrap`."""
    add = parser.add_argument
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
        default=600.0,
        metavar="SECONDS",
        help="seconds before the processes are killed (%(default)s)",
    )
    wrap = parser.add_argument_group("options of wrap")
    for name, kind in (("strategy", StrategyOption), ("numerics", Numerics), ("missing-grads", MissingGrads)):
        wrap.add_argument(f"--{name}", choices=get_args(kind))
    for name in ("capacity", "micro-groups", "depth", "audit"):
        wrap.add_argument(f"--{name}", type=int, metavar="N")
    wrap.add_argument("--planner", choices=NAMES)
    wrap.add_argument("--alpha", type=float, metavar="A")
    for name in ("hardware", "plan"):
        wrap.add_argument(f"--{name}", metavar="FILE")


def run_arguments(given: Namespace) -> dict[str, Any]:
    """What `add_run_arguments` added, as arguments of `verify` and `profile`."""
    # No argument is a function, as `one_per_matrix` is.
    options = {name: value for name in OPTIONS if (value := getattr(given, name, None)) is not None}
    return {name: getattr(given, name) for name in ("ranks", "layout", "seed", "limit")} | {"options": options}


def run(given: Namespace) -> int:
    """Verify, print the result, and return the exit code: 0 if all is equal, 1 if not."""
    with shown("verify", quiet=given.quiet):
        found = verify(given.build, steps=given.steps, **run_arguments(given))
    show(found, found.to_json if given.json else None)
    return 0 if found.ok else 1
