"""``tgi bench`` as people run it: against our server, another one, and a shard of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.tools.httpx_load import load
from tests.tools.openai_stub import MODEL, Stub
from tests.tools.server_process import ServerProcess, poll
from tgi_cli.bench import saved_runs
from tgi_cli.bench.compare import compare
from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics
from tgi_cli.errors import ExitCode

pytestmark = pytest.mark.system


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tgi_cli", "bench", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def median(figures: StepMetrics, name: str, otherwise: float) -> float:
    """The median of a latency in ms; ``otherwise`` where the machine was too busy to resolve it."""
    return otherwise if name in figures.unresolved else figures.latencies[name].p50


def bench(folder: Path, *arguments: str, **environment: str) -> tuple[BenchRun, str, str]:
    path = folder / "run.json"
    code, out, err = finished(start(*arguments, "--output", str(path), **environment))
    assert code == ExitCode.OK, err
    return saved_runs.load(path), out, err


def test_our_server_beside_an_independent_generator(server: ServerProcess, tmp_path: Path) -> None:
    run, out, err = bench(
        tmp_path,
        *("--url", server.url, "--concurrency", "1,4", "--requests", "16"),
        *("--input-tokens", "24", "--output-tokens", "12", "--ignore-eos"),
        *("--html", str(tmp_path / "run.html"), "--jsonl", str(tmp_path / "run.jsonl")),
    )
    assert run.target.kind == "tgi"
    assert run.notes == []
    figures = [step_metrics(record, intervals=False) for record in run.steps]
    assert [(step.succeeded, step.failed) for step in figures] == [(16, 0), (16, 0)]
    assert [step.input_tokens for step in figures] == [16 * 24] * 2, "exact, by its tokenizer"
    assert [step.output_tokens for step in figures] == [16 * 12] * 2
    assert 0 < figures[0].concurrency < 1.1, "one at a time"
    theirs = asyncio.run(load(server.url, 4, 16, 24, 12))
    assert theirs["requests"] == figures[1].succeeded
    assert theirs["tokens"] == figures[1].output_tokens
    # The machine is shared with other tests, whose number changes between the two: they agree
    # within a factor that only other units exceed.
    for name, other in (("ttft", "ttft_p50"), ("e2e", "e2e_p50")):
        ours = median(figures[1], name, theirs[other])
        assert 1 / 100 < ours / theirs[other] < 100, (name, theirs)
    ratio = figures[1].rates["requests_per_second"] / theirs["requests_per_second"]
    assert 1 / 100 < ratio < 100
    assert out.startswith("| Load ")
    assert [line.split("]")[0] for line in err.splitlines() if line[0] == "["] == ["[1/2", "[2/2"]
    assert compare(run, run).regressions == []
    assert saved_runs.load(tmp_path / "run.jsonl").steps == run.steps
    assert "</html>" in (tmp_path / "run.html").read_text()


def test_another_server_of_openai_s_routes(tmp_path: Path) -> None:
    with Stub(prefill=0.05, token=0.04, failing=10).serving() as stub:
        run, _, err = bench(
            tmp_path,
            *("--url", f"{stub.url}/v1", "-c", "4", "-n", "36", "-w", "1"),
            *("--output-tokens", "8", "--input-tokens", "16"),
        )
        assert stub.requests == 40
    assert (run.target.kind, run.target.model) == ("openai", MODEL)
    (figures,) = (step_metrics(record) for record in run.steps)
    assert figures.requests == 36
    assert figures.errors == {"http 503": 4}, "every tenth of 40; the warm-ups are four"
    assert figures.input_tokens == figures.succeeded * 7, "as the server counts"
    assert figures.output_tokens == figures.succeeded * 8
    assert figures.counted_by == {"usage": figures.succeeded}
    assert median(figures, "ttft", 50) >= 50
    assert 1 < median(figures, "itl", 40) < 4000, "milliseconds"
    assert "http 503" in err


def test_requests_leave_when_they_are_due(tmp_path: Path) -> None:
    with Stub(prefill=0.02, token=0.01, places=1).serving() as stub:
        run, out, _ = bench(
            tmp_path,
            *("--url", stub.url, "--rate", "20", "--arrival", "constant", "-n", "60", "-w", "0"),
            *("--slo", "ttft:1000", "--input-tokens", "16", "--output-tokens", "8"),
        )
    # One place of 0.09 s serves 11 of 20 requests a second: the queue grows.
    (record,) = run.steps
    due = [request.scheduled for request in record.requests]
    assert due == pytest.approx([number / 20 for number in range(60)])
    figures = step_metrics(record, run.slo)
    assert figures.succeeded == 60
    waiting = [
        sum(other.dispatched < request.dispatched < other.finished for other in record.requests)
        for request in record.requests
    ]
    assert max(waiting) > 10, "the client does not wait for the server"
    assert figures.latencies["ttft_scheduled"].maximum > 1000
    assert figures.attainment is not None
    assert 0 < figures.attainment < 0.5
    assert "Goodput/s" in out


def test_ctrl_c_leaves_what_there_is(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    with Stub(prefill=0.01, token=0.01).serving() as stub:
        process = start(
            *("--url", stub.url, "-c", "2", "--duration", "600", "--output", str(output)),
            *("--output-tokens", "4"),
        )
        poll(lambda: stub.requests > 20, 60, "requests come")
        os.kill(process.pid, signal.SIGINT)
        code, out, _ = finished(process)
    assert code == ExitCode.INTERRUPTED
    run = saved_runs.load(output)
    assert run.notes[-1] == "the run was interrupted before its end"
    assert step_metrics(run.steps[0]).succeeded > 10
    assert "the run was interrupted before its end" in out


def test_in_a_terminal_it_is_the_dashboard(tmp_path: Path) -> None:
    output, lines, picture = (tmp_path / name for name in ("run.json", "run.jsonl", "run.svg"))
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal closes with its last process
            while part := os.read(master, 65536):
                seen.extend(part)

    with Stub(prefill=0.01, token=0.005).serving() as stub:
        command = [sys.executable, "-m", "tgi_cli", "bench", "--url", stub.url]
        command += ["-c", "1", "-n", "4", "--output-tokens", "4", "--output", str(output)]
        process = subprocess.Popen(
            [*command, "--jsonl", str(lines), "--svg", str(picture)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            poll(
                lambda: lines.exists() and b'"RunEnded"' in lines.read_bytes(),
                120,
                "the run ends",
            )
            os.write(master, b"q")
            assert process.wait(120) == ExitCode.OK
        finally:
            process.kill()
            process.wait()
            reader.join(10)
            os.close(master)
    assert step_metrics(saved_runs.load(output).steps[0]).succeeded == 4
    assert picture.read_text().startswith("<svg")
    screen, _, after = bytes(seen).rpartition(b"\x1b[?1049l")
    assert b"\x1b[?1049h" in screen, "the terminal's other screen"
    assert b"| Load " in after, "the tables are on the one that stays"


def test_batches_on_a_shard_of_its_own(tmp_path: Path) -> None:
    run, out, err = bench(
        tmp_path,
        *("-b", "1", "-b", "4", "-s", "16", "-d", "6", "-r", "3"),
        XDG_RUNTIME_DIR=str(_private(tmp_path)),
    )
    assert run.target.kind == "shard-v3"
    assert run.target.started_here
    assert [len(record.batches) for record in run.steps] == [4, 4]
    for record in run.steps:
        for batch in record.batches:
            assert batch.batch_size == record.step.value
            assert (batch.sequence_length, batch.decode_length) == (16, 6)
            assert len(batch.decodes) == 5
    tables = out.split("\n\n")
    assert tables[0].splitlines()[0].split("|")[1].strip() == "Parameter"
    assert "Decode (token)" in tables[1]
    assert "tokens/secs" in tables[2]
    assert "[2/2] batch size 4: 3 runs" in err


def _private(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def test_nobody_there(tmp_path: Path) -> None:
    code, _, err = finished(start("--url", "http://127.0.0.1:9", "-c", "1"))
    assert code == ExitCode.ROUTER_FAILED
    assert "cannot be reached" in err.splitlines()[0]


def test_a_server_that_dies_ends_the_run_with_what_there_is(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    with Stub(prefill=0.01, token=0.02).serving() as stub:
        process = start(
            *("--url", stub.url, "-c", "2,4,8", "-n", "2000", "--output", str(output)),
            *("--output-tokens", "4"),
        )
        poll(lambda: stub.requests > 8, 60, "requests come")  # of the first 2000
    code, _, err = finished(process)
    assert code == ExitCode.FAILURE, err
    run = json.loads(output.read_text())
    assert len(run["steps"]) == 1
    assert run["failure"] == run["notes"][-1]
    assert run["notes"][-1].startswith("the run ended at concurrency 2: ")
    assert "has accepted no connection for" in run["notes"][-1]
