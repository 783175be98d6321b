"""A forecast as one HTML file, which opens from disk and loads nothing.

`page_charts` makes the figures, `page_document` the file around them. Both need the extra "page", so they are
imported only when a user asks for a page.
"""

from __future__ import annotations

from importlib.util import find_spec

from canzona_compile.errors import CanzonaError
from canzona_compile.tools.planning.figures import Forecast


def check_installed() -> None:
    """Make sure that pages can be made.

    Raises:
        CanzonaError: plotly or jinja2 is not installed.
    """
    if missing := [name for name in ("plotly", "jinja2") if find_spec(name) is None]:
        raise CanzonaError(
            f"the page of a plan needs {missing[0]}, which is not installed",
            hint='run `pip install "canzona-compile[page]"`, or choose another format',
        )


def page(forecast: Forecast) -> str:
    """Return the whole file; write it in UTF-8.

    Raises:
        CanzonaError: plotly or jinja2 is not installed.
    """
    check_installed()
    from canzona_compile.tools.planning.page_document import document

    return document(forecast)
