"""A plan made offline, and the formats in which it can be written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from canzona_compile.compat.garbage import not_collecting
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import PlanFile
from canzona_compile.ir.step import Step
from canzona_compile.report.markdown import markdown
from canzona_compile.report.page import PageModel
from canzona_compile.report.printable import Printable
from canzona_compile.tools.planning.figures import Forecast
from canzona_compile.tools.planning.plan_page import plan_page
from canzona_compile.tools.planning.trace import trace


@dataclass(frozen=True, slots=True, repr=False)
class OfflinePlan(Printable):
    """A plan and its forecast, as `canzona_compile.plan` returns them. Print it, or show it in a notebook.

    Attributes:
        step: fully scheduled; `canzona_compile.ir.printer.show` prints it.
        file: the decisions, for `wrap(..., plan=)`.
        forecast: all figures.
    """

    text_width = 100

    step: Step
    file: PlanFile
    forecast: Forecast

    @property
    def fingerprint(self) -> str:
        """The fingerprint; `optimizer.canzona.plan()` has the same one in a run that follows the same plan."""
        return self.file.fingerprint

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the plan file, and those of the forecast under "forecast"; infinite numbers are None."""
        own = {**asdict(self.forecast), "hardware": self.forecast.hardware.to_dict()}
        own["mesh"], own["options"] = dict(self.forecast.mesh), dict(self.forecast.options)
        found: dict[str, Any] = finite({**self.file.to_dict(), "forecast": own})
        return found

    @not_collecting()
    def to_json(self) -> str:
        """Return the plan file with the forecast, as JSON."""
        return json.dumps(self.to_dict()) + "\n"

    def to_html(self) -> str:
        """Write one HTML page that needs nothing else, not even a network."""
        check_installed()
        from canzona_compile.report.html import html

        return html(self.page())

    def to_perfetto(self) -> str:
        """Write a trace for ui.perfetto.dev or chrome://tracing."""
        return json.dumps(trace(self.forecast)) + "\n"

    def to_markdown(self) -> str:
        """Write the page without its charts, to paste into a document or an issue."""
        return markdown(self.page())

    def page(self) -> PageModel:
        """All figures, as people read them."""
        return plan_page(self.forecast)

    def __repr__(self) -> str:
        return f"<OfflinePlan {self.forecast.model} on {dict(self.forecast.mesh)} {self.fingerprint[:12]}>"


def check_installed() -> None:
    """Make sure that HTML pages can be made."""
    if missing := [name for name in ("plotly", "jinja2") if find_spec(name) is None]:
        raise CanzonaError(
            f"the HTML page needs {missing[0]}, which is not installed",
            hint='run `pip install "canzona-compile[page]"`, or choose another format',
        )


def finite(value: Any) -> Any:
    """Return the same value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
