"""The report that a server is ready: a table on a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

from tgi_cli.config import ServeConfig
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.process.units import format_size

log = logging.getLogger(__name__)

_EXAMPLE_PROMPT = "def read_json(path):"


def announce(
    config: ServeConfig,
    info: EngineInfo,
    url: str,
    seconds: float,
    *,
    key: bool = False,
    web_ui: bool = True,
    places: Sequence[object] = (),
) -> None:
    """Report that the server is ready, with its effective settings.

    Args:
        config: The user's settings.
        info: The engine's effective settings.
        url: URL of the HTTP port.
        seconds: Since the command began.
        key: Whether requests need an API key.
        web_ui: Whether there is a page for browsers.
        places: Where each replica runs, if there are several.
    """
    if config.json_output:
        log.info("ready: %s on %s", info.model_id, url, extra=fields(config, info, url, seconds))
        return
    log.info("ready: %s on %s in %.1f s", info.model_id, url, seconds)
    show(rows(config, info, url, web_ui=web_ui, places=places), sys.stderr)
    body = {"inputs": _EXAMPLE_PROMPT, "parameters": {"max_new_tokens": 40}}
    header = '-H "Authorization: Bearer ${API_KEY%%,*}" ' if key else ""
    print(
        f"\n  curl {url}/generate {header}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}\n",
        file=sys.stderr,
        flush=True,
    )


def fields(
    config: ServeConfig, info: EngineInfo, url: str, seconds: float
) -> dict[str, str | int | float]:
    """Return the effective settings as fields of a JSON record."""
    names = (
        *("model_id", "revision", "dtype", "quantize", "device", "block_size"),
        *("num_shard", "pipeline_parallel_size"),
        *("max_batch_total_tokens", "max_input_tokens", "max_total_tokens"),
        *("max_batch_prefill_tokens", "max_batch_size", "weight_bytes", "speculate", "kernels"),
    )
    return {name: getattr(info, name) for name in names} | {
        "kv_blocks": info.max_batch_total_tokens // info.block_size,
        "replicas": config.replicas,
        "max_concurrent_requests": config.max_concurrent_requests,
        "url": url,
        "start_seconds": round(seconds, 3),
    }


def rows(
    config: ServeConfig,
    info: EngineInfo,
    url: str,
    *,
    web_ui: bool,
    places: Sequence[object] = (),
) -> list[tuple[str, str]]:
    """Return the effective settings as rows of a table."""
    model = info.model_id if not info.revision else f"{info.model_id} ({info.revision[:12]})"
    blocks = info.max_batch_total_tokens // info.block_size
    drafts = f", {info.speculate} drafts per sequence" if info.speculate else ""
    return [
        ("model", f"{model}, {format_size(info.weight_bytes)} of weights"),
        ("dtype", info.dtype),
        ("quantization", info.quantize or "none"),
        ("device", info.device),
        *(
            [("replicas", f"{config.replicas}, on {' | '.join(map(str, places))}")]
            if config.replicas > 1
            else []
        ),
        ("shards", str(info.num_shard)),
        *([("stages", str(stages))] if (stages := info.pipeline_parallel_size) > 1 else []),
        *([("nodes", " | ".join(info.nodes))] if info.nodes else []),
        (
            "KV cache",
            f"{blocks:,} blocks of {info.block_size}: {info.max_batch_total_tokens:,} tokens",
        ),
        (
            "request",
            f"up to {info.max_input_tokens:,} tokens in, {info.max_total_tokens:,} in and out",
        ),
        (
            "concurrency",
            f"{config.max_concurrent_requests:,} requests, {info.max_batch_size:,} of them running",
        ),
        ("step", f"up to {info.max_batch_prefill_tokens:,} prompt tokens{drafts}"),
        ("URL", url),
        *([("web UI", f"{url}/ in a browser")] if web_ui else []),
        *([("kernels", info.kernels)] if info.kernels else []),
    ]


def show(table: Sequence[tuple[str, str]], file: TextIO) -> None:
    """Write a table, with a frame on a terminal."""
    if not file.isatty():
        width = max(len(name) for name, _ in table)
        lines = (f"  {name:<{width}}  {text}\n" for name, text in table)
        file.write("".join(lines))
        file.flush()
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file)
    frame = Table(box=box.ROUNDED, show_header=False, border_style="dim", padding=(0, 1))
    frame.add_column(style="dim", no_wrap=True)
    frame.add_column(overflow="fold")
    for name, text in table:
        slow = name == "kernels" and text.startswith("torch:")
        style = "yellow" if slow else "bold" if name in ("URL", "web UI") else ""
        frame.add_row(name, Text(text, style=style))
    console.print(frame)
