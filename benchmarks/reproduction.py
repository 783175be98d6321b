"""Writes docs/reproduction.md: the headline of Canzona (arXiv 2602.06079), planned and simulated anew.

    python benchmarks/reproduction.py
    python benchmarks/reproduction.py --quick --output -

Nothing is run on GPUs: every figure is a prediction from the rates in canzona_compile/data/hardware/h100.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from reproduction_cases import HARDWARE, PAPER, SCALE, SETTINGS, Case, Iteration, Setting, iteration, measure, scale
from reproduction_text import document

OUTPUT = Path(__file__).parents[1] / "docs" / "reproduction.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the largest model only, and no scaling")
    parser.add_argument("-o", "--output", default=str(OUTPUT), help="- is standard output (%(default)s)")
    given = parser.parse_args()
    log = Console(stderr=True)
    settings: tuple[Setting, ...] = SETTINGS[-1:] if given.quick else SETTINGS
    cases: list[Case] = []
    for setting in settings:
        for split in ("none", "qkv,gate-up"):
            log.print(f"{setting.model} on {setting.mesh}, split {split}")
            cases.append(measure(setting, split))
    iterations: list[Iteration] = [iteration(case) for case in cases]
    rows = []
    for where in () if given.quick else SCALE:
        log.print(f"{where.name} on {where.mesh}")
        rows.append(scale(where))
    text = document(cases, iterations, rows, HARDWARE, PAPER)
    if given.output == "-":
        sys.stdout.write(text)
    else:
        Path(given.output).write_text(text, encoding="utf-8")
        log.print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
