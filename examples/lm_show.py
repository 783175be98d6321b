"""What a person sees of a run: a progress bar, a line now and then, the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(slots=True)
class History:
    """What a run leaves behind.

    Attributes:
        losses: of every step.
        verified: steps whose weights were compared with those of a plain run.
        differing: names of the parameters whose weights differed in any bit.
    """

    losses: list[float] = field(default_factory=list)
    verified: int = 0
    differing: list[str] = field(default_factory=list)

    @property
    def smooth(self) -> tuple[float, float]:
        """Return the mean loss of the first and of the last steps, up to five of each: single batches are noisy."""
        count = max(1, min(5, len(self.losses) // 2))
        return sum(self.losses[:count]) / count, sum(self.losses[-count:]) / count

    @property
    def good(self) -> bool:
        """Say whether the loss fell and all compared weights were equal."""
        begin, end = self.smooth
        return end < begin and not self.differing


class Display:
    """A progress bar with lines above it.

    Args:
        steps: of the whole run.
        silent: whether to show nothing, as on all ranks but one.
    """

    def __init__(self, steps: int, *, silent: bool) -> None:
        self.console = Console(quiet=silent)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=silent or not self.console.is_terminal,
            transient=True,
        )
        self.task = self.progress.add_task("training", total=steps, loss="")

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def advance(self, loss: float, learning_rate: float, note: str, *, always: bool) -> None:
        """Move the bar by one step.

        Args:
            loss: of this step.
            learning_rate: of this step.
            note: what else to say of this step.
            always: whether to write a line; otherwise every tenth step gets one.
        """
        self.progress.update(self.task, advance=1, loss=f"loss {loss:.3f}")
        step = int(self.progress.tasks[0].completed)
        if always or step % 10 == 0:
            self.say(f"step {step:3}  loss {loss:.3f}  lr {learning_rate:.1e}  {note}")

    def say(self, line: RenderableType) -> None:
        """Write a line, or a report, above the bar."""
        self.console.print(line, highlight=False, soft_wrap=isinstance(line, str))

    def outcome(self, history: History, seconds: float) -> None:
        """Sum up what the run showed.

        Args:
            history: of the whole run.
            seconds: how long it took.
        """
        begin, end = history.smooth
        verdict = "[green]fell[/]" if end < begin else "[red]did not fall[/]"
        self.say(f"loss {verdict}: {begin:.3f} -> {end:.3f}, {seconds:.0f} s")
        if history.differing:
            self.say(f"[red]weights differ[/] from plain: {', '.join(history.differing)}")
        elif history.verified:
            self.say(f"weights [green]bitwise equal[/] to plain, steps verified: {history.verified}")
