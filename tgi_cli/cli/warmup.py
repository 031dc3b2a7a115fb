"""``tgi warmup``: prepare for serving a model, and report how fast it will be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import WARMUP
from tgi_cli.errors import ConfigError
from tgi_cli.process.units import format_memory

_MS, _RATE = "ms:.2f", "tokens_per_second:.1f"
"""Columns of the tables of steps."""


@takes(
    WARMUP,
    ("tgi warmup ./my-model", "measure the limits, time steps"),
    ("tgi warmup ./my-model --batch-sizes 1,8,32", "time these batches"),
    ("tgi warmup --url http://127.0.0.1:3000", "warm up a running server"),
    ("tgi warmup", "compile the kernels for this CPU"),
)
def warmup(settings: ParsedSettings) -> None:
    """Compile and measure ahead for a faster `tgi serve`.

    With MODEL: runs its largest steps, saves the limits for later starts with the same settings,
    and prints the duration of steps. With --url: sends prompts of all sizes to a running server.
    With neither: compiles the kernels for this machine's CPU, unless the installation has done
    so. Without compiled kernels, the CPU uses PyTorch's operations, several times slower.
    """
    setup.prepare(settings, "warmup")
    if settings["url"] is not None:
        _warm_server(settings)
        return
    model = settings["model_id"]
    compiled = _compile(needed=not model)
    if model:
        _measure(settings, compiled)
    elif settings["json_output"]:
        print(json.dumps(compiled))
    else:
        print(f"kernels for {compiled['kernels'].replace('_', ' ')}: {compiled['path']}")


def _compile(needed: bool) -> dict[str, Any]:
    """Compile the kernels for the CPU; returns an empty dict if they are unavailable.

    Raises:
        ConfigError: they are unavailable, and ``needed``.
    """
    from rich.console import Console

    from tgi_cli.kernels import build
    from tgi_cli.kernels.library import runnable_levels

    levels = runnable_levels()
    if not levels:
        if not needed:
            return {}
        raise ConfigError(
            "there are no kernels for this processor: they need x86-64 with AVX2, and Linux",
            "serving works without them, with PyTorch's operations",
        )
    began = time.monotonic()
    try:
        text = "compiling the kernels for this processor"
        with Console(stderr=True).status(text) as status:

            def report(compiled: int, total: int) -> None:
                status.update(f"{text}: {compiled} of {total} files")

            level, path = build.build_for_use(levels, report)
    except (build.BuildError, OSError) as error:
        if not needed:
            return {}  # loading the model logs the consequences
        raise ConfigError(
            f"the kernels cannot be compiled: {error}",
            "install g++ or clang++ (or set CXX); serving works without, several times slower",
        ) from error
    seconds = round(time.monotonic() - began, 3)
    return {"kernels": level, "path": str(path), "seconds": seconds}


def _measure(settings: ParsedSettings, compiled: dict[str, Any]) -> None:
    from rich.console import Console

    from tgi_cli.cli.local_model import locate
    from tgi_cli.config import check_settings
    from tgi_cli.process.progress import ProgressReporter
    from tgi_cli.worker.sizing.step_timing import measure

    given = setup.serve_config(settings)
    check_settings(given)
    config, path = locate(given)
    progress = ProgressReporter(show_bar=False)
    with Console(stderr=True).status("") as status, progress:
        progress.start("loading weights", 0)
        found = measure(config, path, settings["batch_sizes"], status.update, progress.update)
    found["compiled"] = compiled
    if settings["json_output"]:
        print(json.dumps(found))
    else:
        _print_model(found)


def _warm_server(settings: ParsedSettings) -> None:
    from rich.console import Console

    from tgi_cli.cli.warmup_server import warm_server

    if settings["model_id"] and settings.is_set("model_id"):
        raise ConfigError(
            "a server named by --url has its own model", "give MODEL or --url, not both"
        )
    key = setup.checked_key(settings)
    with Console(stderr=True).status("") as status:
        found = warm_server(settings["url"], key, settings["batch_sizes"], status.update)
    if settings["json_output"]:
        print(json.dumps(found))
    else:
        _print_server(found)


def _print_model(found: dict[str, Any]) -> None:
    """Print the result of :func:`tgi_cli.worker.sizing.step_timing.measure` as tables."""
    from rich.console import Console

    console = Console(highlight=False)
    how = f"{found['quantize']} in {found['dtype']}" if found["quantize"] else found["dtype"]
    where = f"{found['device']} ({found['device_name']})"
    if found["num_shard"] > 1:
        where = f"{found['num_shard']} shards on {where}"
    console.print(f"{found['model']}: {how} on {where}", markup=False, soft_wrap=True)
    cache = (
        f"{found['kv_blocks']} of {found['block_size']} tokens, {format_memory(found['kv_bytes'])}"
    )
    states = f"{found['state_slots']}, {format_memory(found['state_bytes'])}"
    _table(
        console,
        ("", ""),
        [
            ("weights", format_memory(found["weight_bytes"])),
            ("activations", f"{format_memory(found['activation_bytes'])} at most"),
            ("KV blocks", cache),
            *((("state slots", states),) if found["state_slots"] else ()),
            *((name, str(found[name])) for name in found if name.startswith("max_")),
            ("CUDA graphs", "yes" if found["cuda_graphs"] else "no"),
            ("memory bandwidth", f"{found['memory_bytes_per_second'] / 1e9:.1f} GB/s"),
            ("loading", f"{found['load_seconds']:.2f} s"),
            ("warm-up", f"{found['warmup_seconds']:.2f} s"),
        ],
    )
    prefill = {"prefill: tokens": "tokens", "ms": _MS, "tokens/s": "tokens_per_second:.0f"}
    _step_table(console, prefill, found["prefill"])
    decode = {"decode: sequences": "batch_size", "ms per step": _MS, "tokens/s": _RATE}
    _step_table(console, decode | {"of memory bandwidth": "memory_share:.0%"}, found["decode"])
    for left_out in found["left_out"]:
        console.print(f"not timed: {left_out}", markup=False, soft_wrap=True)
    if found["kept"] is not None:
        console.print(f"saved for later starts: {found['kept']}", markup=False, soft_wrap=True)


def _print_server(found: dict[str, Any]) -> None:
    """Print the result of :func:`tgi_cli.cli.warmup_server.warm_server` as tables."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"{found['model']} at {found['url']}", markup=False)
    _step_table(console, {"prompt: tokens": "tokens", "ms": _MS}, found["prefill"])
    batches = {"concurrent requests": "batch_size", "ms": _MS, "tokens/s": _RATE}
    _step_table(console, batches, found["batches"])


def _step_table(
    console: Any, columns: Mapping[str, str], steps: Iterable[Mapping[str, Any]]
) -> None:
    """Print a row for each step; ``columns`` are replacement fields by their heads."""
    rows = (
        [f"{{{field}}}".format(ms=1e3 * step["seconds"], **step) for field in columns.values()]
        for step in steps
    )
    _table(console, tuple(columns), rows)


def _table(console: Any, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; outside of a terminal, plain columns."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.ROUNDED if console.is_terminal else None,
        show_header=any(heads),
        pad_edge=console.is_terminal,
    )
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
