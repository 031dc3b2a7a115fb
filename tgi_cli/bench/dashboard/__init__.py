"""The dashboard of ``tgi bench``: a run as it goes on, a saved run, a server.

Nothing here decides what is measured: the screens follow the events of ``bench.records``.
Textual (extra ``bench``) is imported when a screen opens, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_cli.bench.dashboard.run_state import Emit, ScreenTitle, Url
from tgi_cli.bench.dashboard.views import ViewName
from tgi_cli.bench.events import BenchRun
from tgi_cli.errors import ConfigError

if TYPE_CHECKING:
    from tgi_cli.bench.dashboard.app import BenchApp


def run_screen(
    title: ScreenTitle,
    start: Callable[[Emit], BenchRun],
    *,
    stop: Callable[[], None] | None = None,
    url: Url = None,
    headers: Mapping[str, str] | None = None,
    other: BenchRun | None = None,
    slo: Mapping[str, float] | None = None,
    svg: Path | None = None,
) -> BenchRun | None:
    """Shows a run from its first event until the user quits.

    Args:
        start: does the run, in a thread of its own: calls ``emit`` (from any thread) with each
            event, and with a line of text for what is waited for before the first one; returns
            the whole run, also when ``stop`` has cut it short. What it raises is shown, and
            raised again here once the terminal is restored.
        stop: asks the run to end soon, with what there is; called from the screen's thread when
            the user quits. A second q leaves at once, without the run.
        url: of the server measured; the live view reads its ``/metrics``, with ``headers``.
        other: a saved run to compare with; it is the earlier one.
        slo: limits by metric in ms, as a run has them.
        svg: where a picture of the last screen is to be left.

    Returns: the run, or None where the user did not wait for it.

    Raises: ConfigError without a terminal or without Textual; whatever ``start`` raises.
    """
    app = _app(
        title=title,
        start=start,
        stop=stop,
        url=url,
        headers=headers,
        other=other,
        slo=slo,
        svg=svg,
    )
    return app.show()


def view(run: BenchRun, *, other: BenchRun | None = None, svg: Path | None = None) -> None:
    """The same screens, of a saved run (and of another, to compare it with)."""
    _app(title=ScreenTitle.of(run), run=run, other=other, svg=svg).show()


def watch(url: str, *, headers: Mapping[str, str] | None = None, svg: Path | None = None) -> None:
    """A running server alone, by its ``/metrics``."""
    _app(title=ScreenTitle(url), url=url, headers=headers, svg=svg, first="server").show()


def picture(
    run: BenchRun,
    *,
    other: BenchRun | None = None,
    first: ViewName = "steps",
    step: int = 0,
    width: int = 140,
    height: int = 45,
) -> str:
    """One view of a saved run, at one of its steps, as SVG; needs no terminal."""
    app = _app(title=ScreenTitle.of(run), run=run, other=other, first=first, step=step)
    return app.picture(width, height)


def _app(**settings: Any) -> BenchApp:
    try:
        from tgi_cli.bench.dashboard.app import BenchApp
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"textual", "textual_plot"}:
            raise
        raise ConfigError(
            "the dashboard needs Textual, which is not installed",
            "pip install 'tgi-cli[bench]', or take --ui plain",
        ) from error
    return BenchApp(**settings)
