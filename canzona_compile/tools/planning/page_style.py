"""The colours, words and frame that all charts of a forecast's page share.

Users choose the names of parameters, and plotly reads a little markup in texts, so `literal` escapes every name in a
chart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import plotly.graph_objects as go

from canzona_compile.report.units import format_seconds

# Okabe and Ito's hues, which colour-blind people tell apart, in shades that read on light and dark.
BLUE, PALE, ORANGE, GREEN, PINK, GREY = "#2a86c0", "#86bfe2", "#e39a1f", "#1fa37b", "#c76dab", "#969ca6"


def themes() -> dict[str, go.layout.Template]:
    """Return the look of figures on a light and on a dark page."""

    def theme(ink: str, line: str, card: str) -> go.layout.Template:
        clear, axis = "rgba(0,0,0,0)", {"gridcolor": line, "zerolinecolor": line, "linecolor": line}
        return go.layout.Template(
            layout={
                "paper_bgcolor": clear,
                "plot_bgcolor": clear,
                "font": {"color": ink, "size": 12, "family": "system-ui, sans-serif"},
                "xaxis": axis,
                "yaxis": axis,
                "shapedefaults": {"line": {"color": ink}},
                "hoverlabel": {"bgcolor": card, "bordercolor": line, "font": {"color": ink}, "align": "left"},
                "modebar": {"bgcolor": clear, "color": ink, "activecolor": BLUE},
            }
        )

    return {"light": theme("#3a424d", "#dedbd4", "#ffffff"), "dark": theme("#c9ccd1", "#3a4049", "#22262c")}


def literal(text: str, most: int = 10**6) -> str:
    """Escape a text so that plotly shows it unchanged, without its middle if it has more than `most` characters."""
    half = most // 2
    return html.escape(text if len(text) <= most else f"{text[:half]}…{text[-half:]}", quote=False)


def period(seconds: float) -> str:
    """Write seconds: "4.9 ms", "0", or "impossible" if they are infinite."""
    if not math.isfinite(seconds):
        return "impossible"
    return format_seconds(seconds).replace("us", "µs") if seconds else "0"


def share(part: float, whole: float) -> str:
    """Write a part of a whole: "3.6%"."""
    return f"{100 * part / whole:.3g}%" if whole else "0%"


def said(title: str, lines: Sequence[str]) -> str:
    """Write the text at the pointer."""
    return "<br>".join([f"<b>{title}</b>", *lines])


def finished(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """Give a figure the common frame. `height` in pixels is that of the plot, without margins and legend."""
    legend = any(trace.name and trace.showlegend is not False for trace in figure.data)
    top = 30 * legend + 24 * (figure.layout.xaxis.side == "top") + 8
    figure.update_yaxes(automargin=True)
    figure.update_layout(
        height=height + top + 28,
        margin={"l": 8, "r": 12, "t": top, "b": 28},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "xref": "container",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
        },
        **layout,
    )
    return figure
