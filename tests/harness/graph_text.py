"""One graph as text, for messages and comparisons of tests."""

from __future__ import annotations

from torch import fx

from canzona_compile.ir.printer import indented, show_nodes
from canzona_compile.ir.step import placeholders


def show_graph(graph: fx.Graph) -> str:
    """Print one graph, a node per line."""
    inputs = ", ".join(f"%{node.name}" for node in placeholders(graph))
    return "\n".join([f"({inputs}) {{", *indented(show_nodes(graph)), "}"])
