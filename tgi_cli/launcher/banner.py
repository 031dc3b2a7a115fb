"""What is said when a server is ready: a short table on a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

from tgi_cli.config import ServeConfig
from tgi_cli.engine.messages import EngineInfo

log = logging.getLogger(__name__)

_EXAMPLE_PROMPT = "def read_json(path):"


def announce(
    config: ServeConfig, info: EngineInfo, url: str, seconds: float, key: bool = False
) -> None:
    """Say that the server is ready, with what it came to.

    Args:
        config: what was asked for.
        info: of the engine: what it is.
        url: of the HTTP port.
        seconds: since the command began.
        key: whether requests need one.
    """
    if config.json_output:
        log.info("ready: %s on %s", info.model_id, url, extra=fields(config, info, url, seconds))
        return
    log.info("ready: %s on %s in %.1f s", info.model_id, url, seconds)
    show(rows(config, info, url), sys.stderr)
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
    """The table's facts for programs."""
    return {
        "model_id": info.model_id,
        "revision": info.revision,
        "dtype": info.dtype,
        "quantize": info.quantize,
        "device": info.device,
        "num_shard": info.num_shard,
        "kv_blocks": info.max_batch_total_tokens // info.block_size,
        "block_size": info.block_size,
        "max_batch_total_tokens": info.max_batch_total_tokens,
        "max_input_tokens": info.max_input_tokens,
        "max_total_tokens": info.max_total_tokens,
        "max_batch_prefill_tokens": info.max_batch_prefill_tokens,
        "max_batch_size": info.max_batch_size,
        "max_concurrent_requests": config.max_concurrent_requests,
        "weight_bytes": info.weight_bytes,
        "url": url,
        "start_seconds": round(seconds, 3),
    }


def rows(config: ServeConfig, info: EngineInfo, url: str) -> list[tuple[str, str]]:
    """The same for people: a name and what is to be said of it."""
    model = info.model_id if not info.revision else f"{info.model_id} ({info.revision[:12]})"
    blocks = info.max_batch_total_tokens // info.block_size
    return [
        ("model", f"{model}, {_size(info.weight_bytes)} of weights"),
        ("dtype", info.dtype),
        ("quantization", info.quantize or "none"),
        ("device", info.device),
        ("shards", str(info.num_shard)),
        (
            "KV cache",
            f"{blocks:,} blocks of {info.block_size}: {info.max_batch_total_tokens:,} tokens",
        ),
        (
            "a request",
            f"up to {info.max_input_tokens:,} tokens in, {info.max_total_tokens:,} in and out",
        ),
        (
            "at once",
            f"{config.max_concurrent_requests:,} requests, {info.max_batch_size:,} of them running",
        ),
        ("a step", f"up to {info.max_batch_prefill_tokens:,} prompt tokens"),
        ("URL", url),
    ]


def show(table: Sequence[tuple[str, str]], file: TextIO) -> None:
    """Write a table: with a frame on a terminal, as plain lines without one."""
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
        frame.add_row(name, Text(text, style="bold" if name == "URL" else ""))
    console.print(frame)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
