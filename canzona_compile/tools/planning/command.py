"""`canzona-compile plan`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import get_args

from canzona_compile.compat.telling import shown, tell
from canzona_compile.data_parallel.engine import GatherAt
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.bucket import BUCKET_BYTES
from canzona_compile.ir.options import Numerics, StrategyOption
from canzona_compile.ir.storage import parse_state
from canzona_compile.ownership import NAMES
from canzona_compile.report.measured import read_measured
from canzona_compile.tools.output import check_output, show, write
from canzona_compile.tools.planning.configs import presets, read_object
from canzona_compile.tools.planning.lowered import TOKENS, Updates
from canzona_compile.tools.planning.plan import plan
from canzona_compile.tools.planning.result import check_installed
from canzona_compile.tools.planning.weights import Model, from_shapes

FORMATS = ("table", "json", "html", "perfetto", "markdown")  # all but the first have a method of `OfflinePlan` each
PASSED_ON = (  # arguments of `plan` that are options of the same name
    *("mesh", "optimizer", "hardware", "split", "strategy", "capacity", "micro_groups", "depth", "numerics"),
    *("state", "updates", "bucket_bytes", "tokens", "gather", "rank"),
)


def add_arguments(parser: ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME", help=f"a model that comes with the package: {', '.join(presets())}")
    model.add_argument("--hf-config", metavar="FILE", help="config.json of a Hugging Face causal LM, or its folder")
    model.add_argument(
        "--params", metavar="FILE", help='JSON file of shapes by parameter name: {"layers.0.q": [5120, 5120], ...}'
    )
    add = parser.add_argument
    add(
        "--mesh",
        required=True,
        metavar="DIMS",
        help="sizes of mesh dims, such as fsdp=32,tp=8; dims are dp, hsdp, fsdp, ep, tp, pp",
    )
    add(
        "--optimizer",
        default="muon",
        metavar="NAME",
        help="muon, muon+adamw, normuon, soap, shampoo, kl-shampoo, kl-soap, or module:Class (%(default)s)",
    )
    add("--hardware", default="h100", metavar="NAME", help="h100, h200, gb300, a100, cpu or file.json (%(default)s)")
    add(
        "--split",
        default="qkv,gate-up",
        metavar="PARTS",
        help="matrices of --model or --hf-config that are apart (%(default)s), or none",
    )
    add("--strategy", choices=get_args(StrategyOption), default="auto", help="how to distribute matrices (%(default)s)")
    add("--planner", choices=NAMES, help="algorithm that assigns owners (lpt-swap)")
    add(
        "--alpha",
        type=float,
        metavar="A",
        help="use the planner alpha: 0 balances communication, 1 balances computation",
    )
    add_arguments_of_the_step(parser)


def add_arguments_of_the_step(parser: ArgumentParser) -> None:
    """Add what decides how a step runs, and what is shown of it."""
    add = parser.add_argument
    add("--capacity", type=int, metavar="BYTES", help="the most bytes that a micro-group gathers to one rank")
    add(
        "--micro-groups",
        type=int,
        metavar="N",
        help="micro-groups per set of ranks (default: chosen by predicted time)",
    )
    add("--depth", type=int, default=2, metavar="N", help="micro-groups in flight (%(default)s)")
    add("--numerics", choices=get_args(Numerics), default="exact", help="numerics of the step (%(default)s)")
    add(
        "--state",
        type=parse_state,
        metavar="HOW",
        help="how state is stored: int8, bfloat16, cpu, or leaf=how,leaf=how (default: as the optimizer has it)",
    )
    add(
        "--updates",
        choices=get_args(Updates),
        default="ddp",
        help="how dp ranks share updates: ddp is wrap(replicate=), zero1 is zero1() (%(default)s)",
    )
    add("--bucket-bytes", type=int, default=BUCKET_BYTES, metavar="BYTES", help="zero1: size of a bucket (%(default)s)")
    add("--tokens", type=int, default=TOKENS, metavar="N", help="zero1: tokens per dp rank and step (%(default)s)")
    add("--gather", choices=get_args(GatherAt), default="step", help="zero1: when to gather parameters (%(default)s)")
    add("--measured", metavar="FILE", help="JSON report of a run, whose measured steps are shown next to the plan")
    add("--rank", type=int, metavar="N", help="show the timeline of this rank as well")
    add("--no-alternatives", action="store_true", help="do not compare with simpler plans")
    add("--format", choices=FORMATS, default="table", help="output format (%(default)s)")
    add("-o", "--output", metavar="FILE", help="write to this file instead of standard output")


def run(given: Namespace) -> int:
    """Make a plan, write it, and return the exit code 0."""
    planner = planner_of(given)
    if given.format == "html":
        check_installed()
    check_output(given.output, "-o")
    measured = None if given.measured is None else read_measured(given.measured)
    with shown("plan", quiet=given.quiet):
        made = plan(
            model_of(given),
            planner=planner,
            alpha=1.0 if given.alpha is None else given.alpha,
            alternatives=not given.no_alternatives,
            say=tell,
            **{name: getattr(given, name) for name in PASSED_ON},
        )
    if measured is not None:
        made = replace(made, forecast=replace(made.forecast, measured=measured))
    if given.format == "table" and given.output is None:
        show(made)
    else:
        text = made.to_text(120) if given.format == "table" else getattr(made, f"to_{given.format}")()
        write(text, given.output, "-o")
    return 0


def planner_of(given: Namespace) -> str:
    """Return the planner that the options name; raise CanzonaError if they name more than one."""
    if given.alpha is None or given.planner == "alpha":
        return str(given.planner or "lpt-swap")
    if given.planner:
        raise CanzonaError(f"--alpha is for the planner alpha, not for {given.planner}", at="plan")
    return "alpha"


def model_of(given: Namespace) -> str | Path | Model:
    if given.params:
        return from_shapes(read_object(Path(given.params)), Path(given.params).stem, given.params)
    return str(given.model) if given.hf_config is None else Path(given.hf_config)
