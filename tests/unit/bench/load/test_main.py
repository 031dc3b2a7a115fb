"""The process of a load generator."""

from __future__ import annotations

import subprocess
import time

from tests.unit.bench.load.fake_server import FakeServer, completions
from tgi_cli.bench.events import BenchRequest, BenchStep, BenchTarget
from tgi_cli.bench.load import frames
from tgi_cli.bench.settings import RequestSettings
from tgi_cli.process.framing import FrameDecoder
from tgi_cli.process.spawn import child_environment, module_command


def test_it_ends_in_order_while_its_input_is_open() -> None:
    """Python aborts where a thread reads sys.stdin as the interpreter ends, after a second."""
    step = BenchStep(kind="concurrency", value=1, label="1", requests=1)
    request = BenchRequest(prompt="one two", prompt_tokens=2, max_tokens=4)
    with FakeServer(completions()).serving() as server:
        target = BenchTarget(kind="openai", address=server.url, model="m")
        process = subprocess.Popen(
            module_command("tgi_cli.bench.load"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for message in (
            frames.GeneratorJob(target, step, RequestSettings(), "completions", 0, 1, 1),
            frames.RequestChunk([frames.IndexedRequest(0, request)]),
            frames.EndOfRequests(),
            frames.BeginStep(time.perf_counter()),
        ):
            process.stdin.write(frames.pack(message))
            process.stdin.flush()
        told = [frames.decode(frame) for frame in FrameDecoder().feed(process.stdout.read())]
        errors, status = process.stderr.read(), process.wait(60)
        process.stdin.close()
    assert isinstance(told[-1], frames.GeneratorEnded)
    assert (status, errors) == (0, b"")
