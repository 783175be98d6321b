"""What people read as a page. Only what is printed loads `rich`: training needs no terminal, nor does a machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from canzona_compile.report.page import PageModel

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Printable:
    """What people read as a page: print it, also with rich or in a notebook."""

    __slots__ = ()
    text_width: ClassVar[int] = 80

    def page(self) -> PageModel:
        """What people read of it."""
        raise NotImplementedError

    def to_text(self, width: int | None = None) -> str:
        """Render it without colours, `width` columns wide; `text_width` if None."""
        from canzona_compile.report.terminal import printed

        return printed(self, width or self.text_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from canzona_compile.report.terminal import render

        yield render(self.page())

    def _repr_mimebundle_(self, include: Iterable[str], exclude: Iterable[str], **given: Any) -> dict[str, str]:
        """What a notebook shows."""
        from rich.jupyter import JupyterMixin

        return JupyterMixin._repr_mimebundle_(self, include, exclude, **given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.to_text()
