"""Which optimizer trains the demo's decoder best: five of them, dense and with experts, five seeds, equal tokens.

    python benchmarks/convergence.py run --jobs 2
    python benchmarks/convergence.py time
    python benchmarks/convergence.py page

`run` calls examples/train_lm.py for every run that has no log in benchmarks/results/convergence/ yet, so that it may be
stopped. Seed 0 tries learning rates until one ended lower than both of its neighbours; the other seeds take that one.
`time` begins a run of each kind once more, by itself, for the times of updates. `page` writes a table beside the logs,
and docs/images/convergence.svg.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo_runs import ROOT, DemoFailed, read, run_demo

LOGS = ROOT / "benchmarks" / "results" / "convergence"
MODELS = {"dense": "", "experts": "--experts 8"}
OPTIMIZERS = {"muon": "Muon", "normuon": "NorMuon", "soap": "SOAP", "kl-soap": "KL-SOAP", "adamw": "AdamW"}
KINDS = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
INT8 = "muon-int8"  # Muon with state="int8", by Muon's learning rate, for the dense model
RATES = ("0.0001", "0.0003", "0.001", "0.003", "0.009", "0.027", "0.081")
FIRST_TRIED = "0.003"
SEEDS = range(5)
STEPS, BATCH = 200, 8  # sequences of 128 bytes
TIMED = 40  # steps of the runs for times
FIRST = 10  # of them, which are not counted: programs are captured, compiled and recorded
LAST = 20  # steps whose mean is the loss at the end: single batches are noisy
SHOWN = 1.4, 4.0  # losses in the picture
SMOOTH = 10  # steps whose mean is a point of a curve, and counts as having reached a loss


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    model: str
    optimizer: str
    rate: str
    seed: int
    steps: int = STEPS

    @property
    def log(self) -> Path:
        timed = "" if self.steps == STEPS else "-time"
        return LOGS / f"{self.model}-{self.optimizer}-{self.rate}-seed{self.seed}{timed}.txt"

    @property
    def arguments(self) -> str:
        """Of the demo: one process. Exact products in bfloat16 take many times as long on some CPUs."""
        kind = self.optimizer if self.optimizer != INT8 else "muon --state int8"
        asked = f"--ranks 1 --batch {BATCH} --steps {STEPS} --numerics fast --no-digests --optimizer {kind}"
        until = "" if self.steps == STEPS else f" --until {self.steps}"
        return f"{asked} --lr {self.rate} --seed {self.seed}{until} {MODELS[self.model]}"


@dataclass(frozen=True, slots=True)
class Log:
    """What a run left: a loss per step, milliseconds of each update, and the machine."""

    losses: tuple[float, ...]
    update_ms: tuple[float, ...]
    machine: str

    @property
    def end(self) -> float:
        return statistics.fmean(self.losses[-LAST:])

    def smooth(self) -> tuple[float, ...]:
        """The mean of each step and those before it, up to `SMOOTH` in all."""
        return tuple(statistics.fmean(self.losses[max(0, i - SMOOTH) : i]) for i in range(1, len(self.losses) + 1))

    def steps_to(self, loss: float) -> int | None:
        """The first step whose smoothed loss is at most this."""
        return next((i for i, own in enumerate(self.smooth(), 1) if own <= loss), None)


def log_of(run: Run) -> Log | None:
    """The log of a run; None if there is none, or one that was cut off."""
    found = read(run.log) if run.log.exists() else None
    if found is None or len(found.rows) != run.steps:
        return None
    return Log(tuple(float(row.loss) for row in found.rows), tuple(row.ms for row in found.rows), found.machine)


def train(run: Run, device: str) -> None:
    """Run the demo, unless its log is there."""
    if log_of(run) is not None:
        return
    try:
        run_demo(ROOT, f"{run.arguments} --device {device}", run.steps, run.log)
    except DemoFailed as error:
        print(error, flush=True)
    if (log := log_of(run)) is not None:
        print(f"{run.log.stem}: ends at {log.end:.3f}", flush=True)


def best(model: str, optimizer: str) -> tuple[str, list[str]]:
    """The learning rate with which seed 0 ended lowest so far, and which of it and its neighbours were not tried."""
    tried = {rate: log_of(Run(model, optimizer, rate, SEEDS[0])) for rate in RATES}
    ends = {rate: log.end for rate, log in tried.items() if log is not None}
    rate = min(ends, key=ends.__getitem__, default=FIRST_TRIED)
    place = RATES.index(rate)
    return rate, [near for near in RATES[max(0, place - 1) : place + 2] if near not in ends]


def chosen(model: str, optimizer: str) -> str | None:
    """The learning rate that ended lower than its neighbours; None until they were tried."""
    rate, missing = best(model, optimizer if optimizer != INT8 else "muon")
    return None if missing else rate


def untried(model: str) -> list[Run]:
    """With the learning rates that are missing around the best ones."""
    return [Run(model, kind, rate, SEEDS[0]) for kind in OPTIMIZERS for rate in best(model, kind)[1]]


def run_all(jobs: int, device: str) -> None:
    """Of each model first the learning rates of the first seed, then the other seeds of the best."""
    LOGS.mkdir(parents=True, exist_ok=True)
    own = partial(train, device=device)
    with ThreadPoolExecutor(jobs) as pool:
        for model in MODELS:
            tries: list[Run] = []
            while tries != (tries := untried(model)):  # the same ones again: they failed
                list(pool.map(own, tries))
            found = {kind: rate for kind in OPTIMIZERS if (rate := chosen(model, kind)) is not None}
            list(pool.map(own, [Run(model, *pair, seed) for seed in SEEDS[1:] for pair in found.items()]))
        if rate := chosen("dense", INT8):
            list(pool.map(own, [Run("dense", INT8, rate, seed) for seed in SEEDS]))


def time_all(device: str) -> None:
    """One after the other, with nothing beside."""
    for kind in KINDS:
        train(Run(*kind, chosen(*kind) or FIRST_TRIED, SEEDS[0], TIMED), device)


# -- the page --------------------------------------------------------------------------------------


def of_seeds(model: str, optimizer: str) -> tuple[str, list[Log]]:
    """The best learning rate, and a log per seed; fewer if not all runs are there."""
    rate = chosen(model, optimizer)
    logs = [] if rate is None else [log_of(Run(model, optimizer, rate, seed)) for seed in SEEDS]
    return rate or "", [log for log in logs if log is not None]


def timed(model: str, optimizer: str) -> Log | None:
    """The log for times of the best learning rate."""
    return log_of(Run(model, optimizer, chosen(model, optimizer) or "", SEEDS[0], TIMED))


def machines(logs: Iterable[Log | None]) -> str:
    return "; ".join(sorted({log.machine for log in logs if log is not None}))


def finished() -> list[str]:
    """The models of which all runs are there."""
    found = [model for model in MODELS if all(len(of_seeds(model, own)[1]) == len(SEEDS) for own in OPTIMIZERS)]
    if len(found) < len(MODELS):
        print(f"of {', '.join(MODELS.keys() - found)} not all runs are there; `convergence.py run` makes them")
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation of the seeds."""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table(model: str) -> Iterator[str]:
    """The rows of a model, best first."""
    found = {optimizer: of_seeds(model, optimizer) for optimizer in OPTIMIZERS}
    plain = [log.end for log in found["adamw"][1]]
    yield "| optimizer | lr | loss at the end | below AdamW | steps to AdamW's loss | update, ms |"
    yield "|---|---|---|---|---|---|"
    for optimizer, (rate, logs) in sorted(
        found.items(), key=lambda row: statistics.fmean(own.end for own in row[1][1])
    ):
        gains = [other - own.end for own, other in zip(logs, plain, strict=True)]
        steps = [log.steps_to(other) for log, other in zip(logs, plain, strict=True)]
        reached = [step for step in steps if step is not None]
        below = "" if optimizer == "adamw" else f"{spread(gains, 3)}, {deviations(gains)}"
        to = spread(reached, 0) if len(reached) == len(steps) else f"{len(reached)} of {len(steps)} seeds reach it"
        alone = timed(model, optimizer)
        update = f"{statistics.fmean(alone.update_ms[FIRST:]):.1f}" if alone else ""  # a mean: some steps refresh
        ends = spread([log.end for log in logs], 3)
        yield f"| {OPTIMIZERS[optimizer]} | {rate} | {ends} | {below} | {to} | {update} |"


def stored() -> Iterator[str]:
    """What 8 bits for the state cost."""
    rate, logs = of_seeds("dense", INT8)
    own, plain = ([log.end for log in found] for found in (logs, of_seeds("dense", "muon")[1]))
    gains = [a - b for a, b in zip(own, plain, strict=True)]
    yield "| Muon, dense | lr | loss at the end | above |"
    yield "|---|---|---|---|"
    yield f"| state as it is | {rate} | {spread(plain, 3)} | |"
    yield f'| `state="int8"` | {rate} | {spread(own, 3)} | {spread(gains, 4)} |'


def deviations(gains: Sequence[float]) -> str:
    """How many standard deviations of the paired differences the mean is away from nothing."""
    return f"{statistics.fmean(gains) / statistics.stdev(gains):.1f} sd"


def draw(models: Sequence[str], path: Path) -> None:
    """The smoothed loss of each optimizer, a panel per model: the mean of the seeds, and from lowest to highest."""
    import matplotlib  # a machine that only runs may lack it

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif"})
    size = 6.4, 3.4 * len(models)  # one below the other, to be read on telephones
    figure, grid = plt.subplots(len(models), figsize=size, sharex=True, squeeze=False, layout="constrained")
    panels = grid[:, 0]
    for panel, model in zip(panels, models, strict=True):
        for optimizer, name in OPTIMIZERS.items():
            steps = range(1, STEPS + 1)
            points = list(zip(*(log.smooth() for log in of_seeds(model, optimizer)[1]), strict=True))
            (line,) = panel.plot(steps, [statistics.fmean(own) for own in points], label=name, linewidth=1.4)
            low, high = [min(own) for own in points], [max(own) for own in points]
            panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        panel.set(title=model, ylabel="loss", xlim=(0, STEPS), ylim=SHOWN)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})


def write_page(folder: Path) -> None:
    """Write the tables, which the pages include, and the picture."""
    if not (models := finished()):
        sys.exit(1)
    if "dense" in models and len(of_seeds("dense", INT8)[1]) == len(SEEDS):
        (LOGS / "state.md").write_text("\n".join([*stored(), ""]), encoding="utf-8")
    runs = machines(log for model in models for optimizer in OPTIMIZERS for log in of_seeds(model, optimizer)[1])
    times = machines(timed(model, optimizer) for model in models for optimizer in OPTIMIZERS)
    parts = [f"Losses on {runs}; updates on {times}.", ""]
    for model in models:
        parts += [f"**{model}**", "", *table(model), ""]
    (LOGS / "table.md").write_text("\n".join(parts), encoding="utf-8")
    draw(models, folder / "images" / "convergence.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "time", "page"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="as in the demo (default: %(default)s)"
    )
    given = parser.parse_args()
    if given.what == "run":
        run_all(given.jobs, given.device)
    elif given.what == "time":
        time_all(given.device)
    else:
        write_page(ROOT / "docs")


if __name__ == "__main__":
    main()
