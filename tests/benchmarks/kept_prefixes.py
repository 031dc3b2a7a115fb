"""What a conversation costs after a restart, with and without ``--kv-cache-dir``.

    python -m tests.tools.checkpoints --shape 135m --full-tokenizer /tmp/model
    python -m tests.benchmarks.kept_prefixes /tmp/model [--tokens 3000]

Serves the model, sends a prompt of random tokens, and stops the server. A new one gets the prompt,
its answer and 20 more tokens. Times are those of whole requests for one token.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.tools.server_process import ServerProcess, poll, stop

_MAX_SECONDS = 600.0
_ANSWER, _MORE = 20, 20
_LEAST_ID, _MOST_ID = 100, 20_000


@contextmanager
def serving(folder: Path, model: str, flags: list[str]) -> Iterator[httpx.Client]:
    """A client of a new server."""
    arguments = ["serve", model, "--port=0", "--hostname=127.0.0.1", *flags]
    server = ServerProcess(folder, arguments)
    try:
        server.wait_ready(_MAX_SECONDS)
        with httpx.Client(base_url=server.url, timeout=_MAX_SECONDS) as client:
            yield client
    finally:
        stop(server.process)
        server.kill()


def ask(client: httpx.Client, ids: list[int], new_tokens: int) -> tuple[list[int], int, float]:
    """The ids of the answer, the prompt tokens that were computed, and the seconds it took."""
    body = {
        "prompt": ids,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    began = time.perf_counter()
    answer = client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - began
    found = answer.raise_for_status().json()
    usage = found["usage"]
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["token_ids"], computed, seconds


def measure(folder: Path, model: str, tokens: int, flags: list[str]) -> None:
    """Print what the next turn computes in a new process."""
    kept = folder / "kv"
    ids = random.Random(0).choices(range(_LEAST_ID, _MOST_ID), k=tokens + _MORE)
    first, more = ids[:tokens], ids[tokens:]
    keeping = [f"--kv-cache-dir={kept}"]
    with serving(folder / "first", model, [*flags, *keeping]) as client:
        answer, computed, seconds = ask(client, first, _ANSWER)
        print(f"first turn: {computed} of {tokens} prompt tokens computed, {seconds:.2f} s")
        blocks = (tokens + _ANSWER - 1) // 16
        poll(lambda: len([*kept.glob("*.kv")]) >= blocks, _MAX_SECONDS, "all are written")
    size = sum(path.stat().st_size for path in kept.glob("*.kv"))
    print(f"the folder: {len([*kept.glob('*.kv')])} blocks, {size / 1e6:.0f} MB")
    turn = first + answer + more
    for name, own in (("with", keeping), ("without", [])):
        with serving(folder / name, model, [*flags, *own]) as client:
            ask(client, more, 1)  # the first request of a process is slower
            _, computed, seconds = ask(client, turn, 1)
        print(
            f"second turn in a new process, {name} the folder: {computed} of {len(turn)} "
            f"prompt tokens computed, {seconds:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--flags", default="", help="of tgi serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgi-kept-") as folder:
        measure(Path(folder), arguments.model, arguments.tokens, arguments.flags.split())


if __name__ == "__main__":
    main()
