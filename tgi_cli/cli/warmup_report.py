"""What `tgi warmup` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def print_model(found: dict[str, Any]) -> None:
    """What :func:`tgi_cli.worker.sizing.step_timing.measure` has found, as tables."""
    from rich.console import Console

    console = Console(highlight=False)
    how = f"{found['quantize']} in {found['dtype']}" if found["quantize"] else found["dtype"]
    where = f"{found['device']} ({found['device_name']})"
    if found["num_shard"] > 1:
        where = f"{found['num_shard']} shards on {where}"
    console.print(f"{found['model']}: {how} on {where}", markup=False, soft_wrap=True)
    cache = f"{found['kv_blocks']} of {found['block_size']} tokens, {_size(found['kv_bytes'])}"
    _table(
        console,
        ("", ""),
        [
            ("weights", _size(found["weight_bytes"])),
            ("a step beside them", f"{_size(found['activation_bytes'])} at most"),
            ("KV blocks", cache),
            *((name, str(found[name])) for name in found if name.startswith("max_")),
            ("CUDA graphs", "yes" if found["cuda_graphs"] else "no"),
            ("memory", f"{found['memory_bytes_per_second'] / 1e9:.1f} GB/s read"),
            ("loading", f"{found['load_seconds']:.2f} s"),
            ("warm-up", f"{found['warmup_seconds']:.2f} s"),
        ],
    )
    _table(
        console,
        ("prefill: tokens", "ms", "tokens/s"),
        (
            (f"{row['tokens']}", _ms(row["seconds"]), f"{row['tokens_per_second']:.0f}")
            for row in found["prefill"]
        ),
    )
    _table(
        console,
        ("decode: sequences", "ms a step", "tokens/s", "of the memory's rate"),
        (
            (
                f"{row['batch_size']}",
                _ms(row["seconds"]),
                f"{row['tokens_per_second']:.1f}",
                f"{row['memory_share']:.0%}",
            )
            for row in found["decode"]
        ),
    )
    for left_out in found["left_out"]:
        console.print(f"not timed: {left_out}", markup=False, soft_wrap=True)
    kept = found["kept"]
    if kept is not None:
        console.print(f"kept for the next start: {kept}", markup=False, soft_wrap=True)


def print_server(found: dict[str, Any]) -> None:
    """What :func:`tgi_cli.cli.warmup_server.warm_server` has found, as tables."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"{found['model']} at {found['url']}", markup=False)
    _table(
        console,
        ("prompt: tokens", "ms"),
        ((f"{row['tokens']}", _ms(row["seconds"])) for row in found["prefill"]),
    )
    _table(
        console,
        ("requests at once", "ms", "tokens/s"),
        (
            (f"{row['batch_size']}", _ms(row["seconds"]), f"{row['tokens_per_second']:.1f}")
            for row in found["batches"]
        ),
    )


def _table(console: Any, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """One on a terminal; columns with spaces between them elsewhere."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.ROUNDED if console.is_terminal else None,
        show_header=any(heads),
        pad_edge=console.is_terminal,
    )
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
