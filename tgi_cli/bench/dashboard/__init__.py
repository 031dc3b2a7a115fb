"""The dashboard of ``tgi bench``: a running benchmark, a saved run, or a server.

It follows the events of ``bench.events`` and never decides what is measured. Textual (extra
``bench``) is imported when a screen opens, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_cli.bench.dashboard.run_state import ScreenTitle
from tgi_cli.bench.dashboard.views import ScreenOptions, ViewName
from tgi_cli.bench.events import BenchRun
from tgi_cli.errors import ConfigError
from tgi_cli.process.installation import install_command

if TYPE_CHECKING:
    from tgi_cli.bench.dashboard.app import BenchApp


def run_screen(options: ScreenOptions) -> BenchRun | None:
    """Show a run from its first event until the user quits.

    Returns: The run, or None if the user did not wait for it.

    Raises: ConfigError without a terminal or without Textual; whatever ``options.start`` raises.
    """
    return _app(options).show()


def view(run: BenchRun, *, other: BenchRun | None = None, svg: Path | None = None) -> None:
    """Show a saved run, beside ``other`` if given."""
    run_screen(ScreenOptions(title=ScreenTitle.of(run), run=run, other=other, svg=svg))


def watch(url: str, *, headers: Mapping[str, str] | None = None, svg: Path | None = None) -> None:
    """Show the ``/metrics`` of a running server."""
    title = ScreenTitle(url)
    run_screen(ScreenOptions(title=title, url=url, headers=headers, svg=svg, first="server"))


def picture(
    run: BenchRun,
    *,
    other: BenchRun | None = None,
    first: ViewName = "steps",
    step: int = 0,
    width: int = 140,
    height: int = 45,
) -> str:
    """Draw one view of a saved run, at one of its steps, as SVG; needs no terminal."""
    title = ScreenTitle.of(run)
    options = ScreenOptions(title=title, run=run, other=other, first=first, step=step)
    return _app(options).picture(width, height)


def _app(options: ScreenOptions) -> BenchApp:
    try:
        from tgi_cli.bench.dashboard.app import BenchApp
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"textual", "textual_plot"}:
            raise
        raise ConfigError(
            "the dashboard needs Textual, which is not installed",
            f"{install_command('bench')}, or use --ui plain",
        ) from error
    return BenchApp(options)
