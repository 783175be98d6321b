"""The demo's losses, compared bit for bit: of two layouts, of two checkouts, or with those that are committed.

    python benchmarks/loss_compare.py zero1 zero1-forward
    python benchmarks/loss_compare.py HEAD~3:fsdp fsdp --optimizer muon
    python benchmarks/loss_compare.py golden .

A side is `layout`, `where:layout` or `where`, which stands for all layouts. `where` is a folder with a checkout, a
revision of git, or `golden`: tests/golden/losses/. It runs examples/train_lm.py there, prints the first step whose loss
or parameters have other bits, and exits with 1 if there is one. GOLDEN=accept rewrites the committed losses.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from demo_runs import ROOT, DemoFailed, Losses, read, run_demo

GOLDEN = ROOT / "tests" / "golden" / "losses"
LAYOUTS = {  # arguments of the demo
    "one": "--ranks 1",
    "fsdp": "--parallel fsdp",
    "hsdp": "--parallel hsdp",
    "tp": "--parallel tp --ranks 2",
    "fsdp-tp": "--parallel fsdp-tp",
    "ddp": "--parallel ddp",
    "zero1": "--parallel zero1",
    "zero1-forward": "--parallel zero1-forward",
    "experts": "--parallel fsdp --experts 8",
}
OPTIMIZERS = ("soap", "muon")
STEPS = 50
SHARED = "--steps {steps} --batch 8 --verify 0 --portable"


def text_of(losses: Losses) -> str:
    """What is committed: no times."""
    rows = [f"{i} {row.loss} {row.digest}" for i, row in enumerate(losses.rows, 1)]
    return "\n".join([f"# {losses.command}", f"# {losses.machine}", "# step  loss  digest", *rows, ""])


def first_difference(left: Losses, right: Losses) -> str | None:
    """The first step that differs, in words; None if all steps that both have are equal."""
    for step, (own, other) in enumerate(zip(left.rows, right.rows, strict=False), 1):
        if own.loss != other.loss:
            apart = abs(float(own.loss) - float(other.loss)) / abs(float(other.loss))
            return f"step {step} is the first that differs: loss {own.loss} and {other.loss}, by {apart:.1e}"
        if own.digest != other.digest:
            return f"step {step} is the first that differs: parameters, with the same loss {own.loss}"
    return None


def trained(folder: Path, layout: str, optimizer: str, steps: int, until: int | None, log: Path) -> Losses:
    """Train as one layout with the code of a folder."""
    asked = f"{LAYOUTS[layout]} --optimizer {optimizer} {SHARED.format(steps=steps)}"
    found = run_demo(folder, asked if until is None else f"{asked} --until {until}", until or steps, log)
    return replace(found, command=f"python examples/train_lm.py {asked}")


@contextmanager
def checkout(where: str) -> Iterator[Path | None]:
    """The folder of a side; of a revision, one that goes away. None for what is committed."""
    if where == "golden":
        yield None
    elif (Path(where) / "examples").is_dir():
        yield Path(where).resolve()
    else:
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", where], capture_output=True, check=False)
        if packed.returncode:
            raise SystemExit(f"{where!r} is no layout, no folder with a checkout and no revision of git")
        with tempfile.TemporaryDirectory(prefix="losses-") as folder:
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(folder, filter="data")
            yield Path(folder)


def side(text: str) -> tuple[str, str | None]:
    """Where a side is, and its layout; None for all layouts."""
    if text in LAYOUTS:
        return str(ROOT), text
    where, colon, layout = text.rpartition(":")
    if not colon:
        return text, None
    if layout not in LAYOUTS:
        raise SystemExit(f"there is no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    return where, layout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("left", "right"):
        parser.add_argument(name, type=side, help="layout, where:layout or where")
    parser.add_argument("--optimizer", help="muon, soap, ... (default: soap)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the schedule (default: %(default)s)")
    parser.add_argument("--until", type=int, help="the last step that is taken (default: all)")
    given = parser.parse_args()
    sides = given.left, given.right
    layouts = [[own] if own else list(LAYOUTS) for _, own in sides]
    if len(layouts[0]) != len(layouts[1]):
        parser.error("give a layout to both sides, or to none of them")
    found = True
    with checkout(sides[0][0]) as left, checkout(sides[1][0]) as right, tempfile.TemporaryDirectory() as logs:
        for optimizer in (given.optimizer,) if given.optimizer else OPTIMIZERS:
            for pair in zip(*layouts, strict=True):
                both = [
                    losses_of(folder, layout, optimizer, given.steps, given.until, Path(logs) / str(i))
                    for i, (folder, layout) in enumerate(zip((left, right), pair, strict=True))
                ]
                found &= say(pair, optimizer, *both)
                whole = given.until is None and given.steps == STEPS and pair[0] == pair[1]
                if None in (left, right) and whole and os.environ.get("GOLDEN") == "accept":
                    path = GOLDEN / f"{pair[0]}-{optimizer}.txt"
                    path.write_text(text_of(both[left is None]), encoding="utf-8")
    return 0 if found else 1


def losses_of(folder: Path | None, layout: str, optimizer: str, steps: int, until: int | None, log: Path) -> Losses:
    """The losses of a side: of a run, or as they are committed."""
    if folder is not None:
        return trained(folder, layout, optimizer, steps, until, log)
    path = GOLDEN / f"{layout}-{optimizer}.txt"
    return read(path) if path.exists() else Losses("", "", ())


def say(layouts: tuple[str, str], optimizer: str, left: Losses, right: Losses) -> bool:
    """Print what came of a comparison; whether all steps are equal."""
    named = " and ".join(dict.fromkeys(layouts))
    steps = min(len(left.rows), len(right.rows))
    different = first_difference(left, right) or (None if steps else "there is nothing to compare with")
    print(f"{named}, {optimizer}: {different or f'{steps} steps with equal bits'}", flush=True)
    if different and left.machine != right.machine:
        print(f"  {left.machine}\n  {right.machine}")
    return different is None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoFailed as error:
        sys.exit(str(error))
