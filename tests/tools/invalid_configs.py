"""Invalid values in config.json: ``python -m tests.tools.invalid_configs EVERY FOLDER...``.

For each field of a FOLDER's config.json (and of each object in it) and every EVERYth absurd value,
a checkpoint that differs in that one place is made ready to serve, in this process, whose memory
is limited. A line of JSON on stdout says how each ended: place, value, error, seconds.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

NESTED = "nested"
"""Stands for arrays within each other, which json would not write."""

VALUES: tuple[Any, ...] = (
    0,
    -1,
    2**31,
    2**63,
    10**12,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [0] * 1000,
    {},
    {"x": 1},
    None,
    True,
    NESTED,
)
SECONDS = 20
"""That one may take; an alarm ends what takes longer."""
MORE_BYTES = 2 << 30
"""Address space beyond what this process has when its libraries are loaded."""


class TookTooLong(BaseException):
    """Raised by the alarm, through whatever catches exceptions."""


def places(raw: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every field, those of objects too."""
    for key, value in raw.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in places(value))


def changed(raw: dict[str, Any], place: tuple[str, ...], value: Any) -> str:
    """config.json with another value at one place."""
    whole = json.loads(json.dumps(raw))
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = "NESTED" if value is NESTED else value
    return json.dumps(whole).replace('"NESTED"', "[" * 100_000 + "]" * 100_000)


def _late(_number: int, _frame: FrameType | None) -> None:
    raise TookTooLong


def main(every: int, folders: list[Path]) -> None:
    """Try all of them."""
    from tgi_cli.config import ServeConfig
    from tgi_cli.errors import TgiError
    from tgi_cli.worker.factory import load_worker

    serve = ServeConfig(model_id="m", measured_limits=False, disable_grammar_support=True)
    for folder in folders:
        load_worker(serve, folder)  # as it is: libraries are loaded
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _late)
    for folder in folders:
        file = folder / "config.json"
        raw = json.loads(file.read_text())
        tries = list(product(places(raw), VALUES))
        for number, (place, value) in enumerate(tries):
            if (number + number // len(VALUES)) % every:
                continue
            file.write_text(changed(raw, place, value))
            began, error, told = time.monotonic(), "", False
            signal.alarm(SECONDS)
            try:
                worker, _ = load_worker(serve, folder)
                worker.close()
            except TgiError as refused:
                error, told = refused.cause, True
            except BaseException as failure:
                error = f"{type(failure).__name__}: {failure}"
            finally:
                signal.alarm(0)
            about = {
                "folder": folder.name,
                "place": ".".join(place),
                "value": "10**400" if value == 10**400 else str(value)[:40],
                "error": error,
                "told": told,
                "seconds": time.monotonic() - began,
            }
            print(json.dumps(about), flush=True)
        file.write_text(json.dumps(raw))


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
