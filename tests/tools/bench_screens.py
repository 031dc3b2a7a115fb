"""Pictures of every view of the dashboard, for the documentation and to be looked at.

python -m tests.tools.bench_screens FOLDER              # the scripted runs of the tests
python -m tests.tools.bench_screens --texts             # the texts of them that tests compare
python -m tests.tools.bench_screens docs/images --run after.json --other before.json --step 3 \\
    --view steps --view percentiles --view requests --view compare    # saved runs

The server's view has samples of a live run only: `tgi bench --svg FILE` draws the last screen.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tests.unit.bench.dashboard.test_screens import TEXTS
from tests.unit.bench.dashboard.views import SIZES, drawn_views, opened
from tgi_cli.bench.dashboard import picture
from tgi_cli.bench.dashboard.views import VIEWS, ViewName
from tgi_cli.bench.saved_runs import load


async def texts() -> None:
    """Write the texts anew; those of views that are no more go."""
    TEXTS.mkdir(exist_ok=True)
    for old in TEXTS.glob("*.txt"):
        old.unlink()
    for size in SIZES:
        async for name, lines in drawn_views(size):
            path = TEXTS / f"{name}-{size[0]}x{size[1]}.txt"
            path.write_text("\n".join(lines) + "\n")


async def pictures(folder: Path) -> None:
    """Write a picture of every view of the written-down runs."""
    for size in SIZES:
        async for name, app in opened(size):
            path = folder / f"bench-{name}-{size[0]}x{size[1]}.svg"
            path.write_text(app.export_screenshot(), encoding="utf-8")


def pictures_of(
    run: Path, other: Path | None, names: list[ViewName], step: int, folder: Path
) -> None:
    """Write a picture of every named view of a saved run, at one of its steps."""
    for name in names:
        for width, height in SIZES:
            before = load(other) if other else None
            svg = picture(
                load(run), other=before, first=name, step=step, width=width, height=height
            )
            path = folder / f"bench-{name}-{width}x{height}.svg"
            path.write_text(svg, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--other", type=Path, help="an earlier one, to compare with")
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--view", action="append", choices=VIEWS)
    parser.add_argument("--texts", action="store_true")
    given = parser.parse_args()
    if given.texts:
        asyncio.run(texts())
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        if given.run is not None:
            pictures_of(given.run, given.other, given.view or list(VIEWS), given.step, given.folder)
        else:
            asyncio.run(pictures(given.folder))


if __name__ == "__main__":
    main()
