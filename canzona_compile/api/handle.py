"""`optimizer.canzona`: everything that a person may want to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx, nn
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.fx_utils import graph_module
from canzona_compile.ir.pipeline import History
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.printer import show
from canzona_compile.ir.step import Step
from canzona_compile.options import Options
from canzona_compile.report.build import Report
from canzona_compile.report.explain import Explanation
from canzona_compile.session.session import Session

STAGES = ("captured", "placed", "program")


class Canzona:
    """Graphs, passes, plan and report of a wrapped optimizer. Nothing is there before the first step."""

    def __init__(self, optimizer: Optimizer, options: Options, lost: str = "") -> None:
        self.session = Session(optimizer, options, lost)

    def graph(self, stage: str = "program", template: str | None = None) -> nn.Module:
        """A stage's graph as a module with `print_readable()`.

        Args:
            stage: "captured" (one template as if on one device), "placed" (its prepare, compute and
                apply_updates as submodules) or "program" (what this rank executes).
            template: which template; the first one by default.
        """
        if stage not in STAGES:
            raise CanzonaError(f"no stage {stage!r}", hint=f"one of {', '.join(STAGES)}")
        step = self.step
        if stage == "program":
            module: fx.GraphModule = step.program.module
            return module
        names = [p.template.name for p in step.placed]
        wanted = template or (names[0] if names else "")
        found = next((p for p in step.placed if wanted in (p.name, p.template.name)), None)
        if found is None:
            raise CanzonaError(f"no template {wanted!r}", hint=f"there are {', '.join(names) or 'none'}")
        if stage == "captured":
            return graph_module(found.template.graph, found.template.name)
        parts = {"prepare": found.prepare, "compute": found.compute, "apply_updates": found.apply}
        return PlacedModule(parts, found.name)

    @property
    def step(self) -> Step:
        """The step of the last executed program, fully lowered; its earlier forms are in `passes()`."""
        return self.session.last()[0]

    def passes(self) -> History:
        """What each pass took and changed."""
        return self.session.last()[1]

    def plan(self) -> PlanFile:
        """Owners and micro-groups, to be saved (`to_json`) and followed by another run: wrap(..., plan=)."""
        return self.session.plan()

    def report(self) -> Report:
        """The schedule, for people (rich prints it) and machines (`to_json()`)."""
        return self.session.report()

    def explain(self) -> Explanation:
        """Per parameter: compiled, interpreted, local or refused, and why."""
        return self.session.explain()

    def dump(self, directory: str | Path) -> Path:
        """Write every form of the step, the generated code and the report; returns the rank's folder."""
        folder = Path(directory) / f"rank{self.session.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        for i, record in enumerate(self.passes().records):
            if i == 0:
                (folder / "000_captured.ir").write_text(show(record.before))
            (folder / f"{i + 1:03d}_{record.name}.ir").write_text(show(record.after))
        program = self.step.program
        parts = {"program": program.module, **dict(program.module.named_children())}
        for name, module in parts.items():
            (folder / f"{name}.py").write_text(module.print_readable(print_output=False))
        report = self.report()
        (folder / "plan.json").write_text(self.plan().to_json())
        (folder / "report.json").write_text(report.to_json())
        (folder / "report.txt").write_text(report.to_text())
        return folder


class PlacedModule(nn.Module):
    """The three graphs of a placed template."""

    def __init__(self, graphs: dict[str, fx.Graph], name: str) -> None:
        super().__init__()
        for part, graph in graphs.items():
            self.add_module(part, graph_module(graph, f"{name}_{part}"))

    def print_readable(self, print_output: bool = True, **options: Any) -> str:
        """The code of all three, as `torch.fx.GraphModule.print_readable`."""
        text = "\n".join(
            module.print_readable(print_output=False, **options)
            for module in self.children()
            if isinstance(module, fx.GraphModule)
        )
        if print_output:
            print(text)
        return text
