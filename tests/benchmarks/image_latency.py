"""Measure the time to the first token of requests with photos, and what they cost other streams.

    python -m tests.benchmarks.image_latency [MODEL ...] [--rounds 3] [--folder DIR] [--apart]
        [--serve=FLAG ...] [--no-peer] [--no-streams]

Models have published sizes and random weights in bfloat16, and take a photo of 1920 x 1080 pixels
as their processors make it. A run of a model measures

- the time from a request over HTTP with a JPEG in base64 to its answer of one token, beside
  transformers in a process of its own: file to Pillow, processor and ``generate`` of one token.
  Both use all cores and take turns, with another photo each round; medians, after one round with
  a smaller photo that is not counted. CPU times are those of all processes of either side.
  ``--apart`` measures one side after the other, where memory does not suffice for both;
- the next turn of the same conversation: tokens that are computed, runs of the encoder, seconds;
- gaps between the tokens of a text stream: alone, beside text prompts with as many tokens as a
  photo's, and beside photos. Longer texts take longer per token: so streams end after as many
  tokens as are measured alone, and the next one begins, in all three parts.

The photos beside streams are requested one after the other. ``--folder`` keeps checkpoints.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.benchmarks.overload import percentile
from tests.benchmarks.peers.machine import Clock, descendants, process_ticks
from tests.benchmarks.text_streams import TextStreams
from tests.tools.image_models import write_image_model
from tests.tools.published_shapes import write_published
from tests.tools.server_process import ServerProcess, stop

SIZE = (1920, 1080)
FIRST_SIZE = (480, 270)
"""Of the photo of the round that is not counted."""
QUESTION = "What is on this photo?"
START_SECONDS = 1200.0
ALONE = 3
"""Streams that are measured without anything beside them."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class VisionModel:
    """What a model has beside its weights, and how it is served.

    Attributes:
        kind: of :data:`tests.tools.image_models.IMAGE_MODELS`.
        preprocessor: keys of preprocessor_config.json.
        processor: arguments of transformers' processor.
        input_tokens: ``--max-input-tokens``, of which an image may take a quarter.
        tokens: of a stream, which are measured before anything else is requested.
    """

    kind: str
    preprocessor: dict[str, Any]
    processor: dict[str, Any]
    input_tokens: int
    tokens: int


_TILES: dict[str, Any] = {
    "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
}
MODELS = {
    "smolvlm-256m": VisionModel("Idefics 3", _TILES, {"image_seq_len": 64}, 8000, 600),
    "smolvlm-500m": VisionModel("Idefics 3", _TILES, {"image_seq_len": 64}, 8000, 600),
    "qwen2.5-vl-3b": VisionModel(
        "Qwen2.5-VL", {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}, {}, 12000, 150
    ),
}
"""By name of :data:`tests.tools.published_shapes.PUBLISHED_VISION`."""


def checkpoint(name: str, folder: Path) -> Path:
    """A complete checkpoint in ``folder``, written unless it is there."""
    path = folder / name
    if not (path / "complete").exists():
        write_published(name, path)
        config = json.loads((path / "config.json").read_text())
        write_image_model(MODELS[name].kind, path, config, **MODELS[name].preprocessor)
        vocabulary = {**config, **config.get("text_config", {})}["vocab_size"]
        _fill_vocabulary(path / "tokenizer.json", vocabulary)
        (path / "complete").touch()
    return path


def _fill_vocabulary(file: Path, size: int) -> None:
    """Give every id of a model a word, so that its answers have a text."""
    tokenizer = json.loads(file.read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    # Added tokens that are no words would be numbered anew, behind all words.
    words |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    taken = set(words.values())
    words |= {f"w{index}": index for index in range(size) if index not in taken}
    file.write_text(json.dumps(tokenizer))


def photo(seed: int, size: tuple[int, int] = SIZE) -> bytes:
    """A JPEG with details of eight pixels."""
    random_bytes = np.random.default_rng(seed)
    small = (size[1] // 8, size[0] // 8, 3)
    image = Image.fromarray(random_bytes.integers(0, 256, small, np.uint8))
    file = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, so far."""
    ticks = 0
    for process in descendants(pid):
        try:
            ticks += process_ticks(Path(f"/proc/{process}/stat").read_text())
        except OSError:  # it has exited
            continue
    return ticks / _TICKS


class Peer:
    """transformers in a process of its own."""

    def __init__(self, path: Path, model: VisionModel, log: Path) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.image_peer", str(path), model.kind]
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(model.processor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._read()

    def ask(self, file: Path) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps({"photo": str(file), "question": QUESTION}), file=self._process.stdin)
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers has ended: {self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True)
class Answer:
    """A response of one token: seconds by the clock and of CPUs, tokens of its prompt, its text."""

    seconds: float
    cpu: float
    tokens: int
    cached: int
    text: str


class Server:
    """Requests to a server of ours."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.client = httpx.Client(base_url=process.url, timeout=1200)

    def ask(self, messages: Sequence[dict[str, Any]], measures_cpu: bool = True) -> Answer:
        """The answer to a chat; looking for CPU times would disturb the times of a stream."""
        pid = self._process.process.pid
        body = {"model": "tgi", "messages": messages, "max_tokens": 1, "temperature": 0}
        cpu, begun = cpu_seconds(pid) if measures_cpu else 0.0, time.perf_counter()
        response = self.client.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - begun
        if response.status_code != 200:
            raise RuntimeError(response.text[:500])
        answer = response.json()
        usage = answer["usage"]
        return Answer(
            seconds,
            cpu_seconds(pid) - cpu if measures_cpu else 0.0,
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            answer["choices"][0]["message"]["content"] or "",
        )

    def encoded(self) -> int:
        """Runs of the encoder so far."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("tgi_images_encoded_total"):
                return int(float(line.split()[-1]))
        raise RuntimeError("no count of encoded images")

    def __call__(self, image: bytes) -> Answer:
        return self.ask([about(image)])


def about(image: bytes) -> dict[str, Any]:
    """A message with a photo and the question."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return {"role": "user", "content": parts}


@dataclass
class FirstTokens:
    """What the rounds of a model have measured.

    Attributes:
        ours: first turns.
        later: second turns, with the runs of the encoder.
        theirs: transformers' first turns.
        foreign: shares of the CPUs that other programs had.
    """

    ours: list[Answer] = field(default_factory=list)
    later: list[tuple[Answer, int]] = field(default_factory=list)
    theirs: list[dict[str, Any]] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)

    def measure(self, server: Server | None, peer: Peer | None, rounds: int, folder: Path) -> None:
        """Ask both sides, or one of them, in turns."""
        file = folder / "photo.jpg"
        before = Clock.read()
        for number in range(rounds + 1):
            image = photo(number, SIZE if number else FIRST_SIZE)
            file.write_bytes(image)
            if peer is not None and number % 2:
                self.theirs.append(peer.ask(file))
            if server is not None:
                self._ask(server, image)
            if peer is not None and not number % 2:
                self.theirs.append(peer.ask(file))
        self.foreign.append(Clock.read().foreign_since(before))

    def _ask(self, server: Server, image: bytes) -> None:
        self.ours.append(first := server(image))
        runs = server.encoded()
        turn = [about(image), {"role": "assistant", "content": first.text}]
        second = server.ask([*turn, {"role": "user", "content": "And what else?"}])
        self.later.append((second, server.encoded() - runs))

    def show(self, name: str) -> None:
        """Print the table, without the first round."""
        rounds, others = len(self.ours) - 1, max(self.foreign)
        print(f"\n## {name}: first token, {rounds} rounds; other programs {others:.0%} of CPUs\n")
        print("| | seconds (min-max) | CPU s | prompt tokens | computed | runs of the encoder |")
        print("|---|---|---|---|---|---|")
        _row("ours, a photo", self.ours[1:], 1)
        _row("ours, the next turn", [answer for answer, _ in self.later[1:]], self.later[-1][1])
        if not self.theirs:
            return
        theirs = self.theirs[1:]
        seconds = sorted(each["seconds"] for each in theirs)
        cpu = statistics.median(each["cpu"] for each in theirs)
        found = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
        count = theirs[-1]["tokens"]
        print(f"| transformers, a photo | {found} | {cpu:.2f} | {count} | {count} | 1 |")
        mine = statistics.median(each.seconds for each in self.ours[1:])
        own = statistics.median(each.cpu for each in self.ours[1:])
        processing = statistics.median(each["processing"] for each in theirs)
        print(
            f"\ntransformers takes {statistics.median(seconds) / mine:.2f} times as long, "
            f"{cpu / own:.2f} times the CPU time; {processing:.2f} s are its processor's",
            flush=True,
        )


def measure(name: str, path: Path, options: argparse.Namespace, folder: Path) -> None:
    """Print the tables of a model."""
    model, found = MODELS[name], FirstTokens()
    limits: tuple[str, ...] = ("--max-input-tokens", str(model.input_tokens))
    limits += ("--max-total-tokens", str(model.input_tokens + 190))
    limits += ("--max-batch-total-tokens", str(model.input_tokens * 2 + 2048))
    flags = ("serve", str(path), "--port", "0", "--dtype", "bfloat16", *limits, *options.serve)

    def started() -> Peer:
        return Peer(path, model, folder / f"{name}.log")

    with ExitStack() as stack:
        process = ServerProcess(folder / f"{name}.tgi", flags)
        stack.callback(stop, process.process)
        process.wait_ready(START_SECONDS)
        server = Server(process)
        stack.callback(server.client.close)
        peer = None
        if not (options.no_peer or options.apart):
            peer = stack.enter_context(closing(started()))
        found.measure(server, peer, options.rounds, folder)
        if peer is not None:
            peer.close()  # its memory is not needed any more
        if not options.apart:
            found.show(name)
        if not options.no_streams:
            streams(name, server, model, options.photos, found.ours[-1].tokens)
    if options.apart:
        if not options.no_peer:
            with closing(started()) as peer:
                found.measure(None, peer, options.rounds, folder)
        found.show(name)


def _row(label: str, answers: Sequence[Answer], runs: int) -> None:
    seconds = sorted(each.seconds for each in answers)
    cpu = statistics.median(each.cpu for each in answers)
    found = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
    last = answers[-1]
    computed = last.tokens - last.cached
    print(f"| {label} | {found} | {cpu:.2f} | {last.tokens} | {computed} | {runs} |", flush=True)


def streams(name: str, server: Server, model: VisionModel, count: int, tokens: int) -> None:
    """Measure the gaps of a stream alone, beside text prompts, and beside photos."""
    words = random.Random(0)

    def text() -> Answer:
        content = "".join(words.choices("abcdefgh ", k=tokens))
        return server.ask([{"role": "user", "content": content}], measures_cpu=False)

    photos = [photo(1000 + number) for number in range(count)]
    works: list[tuple[str, Callable[[], Answer]]] = [("text prompts", text)]
    works.append(("photos", lambda: server.ask([about(photos.pop())], measures_cpu=False)))
    print(f"\n## {name}: gaps between the tokens of a stream, {count} requests beside it\n")
    print("| beside | gaps | p50 ms | p99 ms | max ms | p99 vs alone | seconds of a request |")
    print("|---|---|---|---|---|---|---|")
    with TextStreams(server.client, model.tokens) as stream:
        stream.wait(2)  # the first one has found the server idle
        begun = time.perf_counter()
        stream.wait(ALONE)
        alone = stream.gaps(begun, time.perf_counter())
        _gaps("nothing", alone, alone, "-")
        for label, work in works:
            begun = time.perf_counter()
            took = [work().seconds for _ in range(count)]
            found = stream.gaps(begun, time.perf_counter())
            _gaps(label, found, alone, f"{statistics.median(took):.2f}")
            stream.wait(1)


def _gaps(label: str, found: Sequence[float], alone: Sequence[float], took: str) -> None:
    middle, high = percentile(found, 0.5), percentile(found, 0.99)
    ratio = high / percentile(alone, 0.99)
    print(
        f"| {label} | {len(found)} | {middle:.1f} | {high:.1f} | {max(found):.1f} "
        f"| {ratio:.2f} | {took} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=int, default=3, help="beside the stream")
    parser.add_argument("--folder", type=Path, help="for checkpoints, which are kept")
    parser.add_argument("--serve", action="append", default=[], help="another flag of `tgi serve`")
    parser.add_argument("--apart", action="store_true", help="one side after the other")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--no-streams", action="store_true", help="leave streams out")
    options = parser.parse_args()
    unknown = set(options.models) - MODELS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the processes, too
    os.environ.pop("OMP_NUM_THREADS", None)  # both sides use all cores
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or MODELS:
            path = checkpoint(name, options.folder or Path(folder))
            measure(name, path, options, Path(folder))


if __name__ == "__main__":
    main()
