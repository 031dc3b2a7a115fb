"""``tgi download-weights`` as a process: what it prints where, its exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.gguf_models import llama_gguf
from tests.tools.hub_server import HubServer, Stall
from tests.unit.hub.conftest import model, weights

WEIGHTS = "model.safetensors"
PROGRAM = [sys.executable, "-m", "tgi_cli", "download-weights"]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def environment(hub: HubServer, cache: Path, **more: str) -> dict[str, str]:
    unwanted = ("HF_", "HUGGING", "MODEL_ID", "REVISION", "LOG_LEVEL", "JSON_OUTPUT")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    home = {"HF_HOME": str(cache), "HF_ENDPOINT": hub.url}
    return kept | home | more


def run(
    hub: HubServer, cache: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=environment(hub, cache, **more),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_stdout_is_the_path_only(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/m", model(), revisions={"v1"}, private=True)
    done = run(hub, tmp_path, "org/m", HF_API_TOKEN=hub.reader, REVISION="v1")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.removesuffix("\n"))
    assert path == tmp_path / "hub" / "models--org--m" / "snapshots" / commit
    assert (path / WEIGHTS).read_bytes() == weights()
    assert "fetching 200.1 kB in 3 files" in done.stderr
    assert "\x1b" not in done.stderr

    quiet = run(hub, tmp_path, str(path), "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, f"{path}\n", "")


def test_a_tag_names_the_gguf_file_that_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    content = llama_gguf(tmp_path / "made.gguf").read_bytes()
    hub.add("org/g", {"m-Q4_K_M.gguf": content, "m-Q8_0.gguf": content, "mmproj-F16.gguf": content})
    done = run(hub, tmp_path, "org/g:q8_0")
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == {"m-Q8_0.gguf"}
    assert (Path(done.stdout.removesuffix("\n")) / "m-Q8_0.gguf").read_bytes() == content


def test_json_output_makes_the_log_json(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/m", model(README__md=b"x"))
    done = run(hub, tmp_path, "org/m", "--json-output", "--logger-level", "debug")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    messages = [line["fields"]["message"] for line in lines]
    assert any("README.md: skipped, not needed" in message for message in messages)
    assert any("fetching" in message for message in messages)
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "more", "code", "complaint"),
    [
        (["org/typo"], {}, 3, "no model 'org/typo'"),
        (["org/m"], {"HF_HUB_OFFLINE": "1"}, 3, "HF_HUB_OFFLINE"),
        (["./nowhere"], {}, 3, "no folder ./nowhere"),
        (["org/m", "--logger-level", "loud"], {}, 2, "loud"),
        (["org/m", "--no-such-option"], {}, 2, "no-such-option"),
        (["org/gguf:Q5_0"], {}, 3, "name one of Q4_0 (4 B), Q8_0 (4 B)"),
        (["org/gguf:Q4_0"], {}, 3, "m-Q4_0.gguf cannot be read: it is truncated"),
    ],
)
def test_errors_are_short_and_have_their_own_codes(
    hub: HubServer,
    tmp_path: Path,
    arguments: list[str],
    more: dict[str, str],
    code: int,
    complaint: str,
) -> None:
    hub.add("org/gguf", {"m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"})
    done = run(hub, tmp_path, *arguments, **more)
    assert done.returncode == code
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_download_resumes(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/m", model())
    hub.fault(WEIGHTS, Stall(after=100_000))
    process = subprocess.Popen(
        [*PROGRAM, "org/m"],
        env=environment(hub, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        blobs = tmp_path / "hub" / "models--org--m" / "blobs"
        while not any(path.stat().st_size == 100_000 for path in blobs.glob("*.incomplete")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stdout == ""
    assert "run the same command again" in stderr
    assert "Traceback" not in stderr

    again = run(hub, tmp_path, "org/m")
    assert again.returncode == 0, again.stderr
    assert hub.ranges(WEIGHTS) == [None, "bytes=100000-"]
    assert "resuming at 100000 of 200072 bytes" in again.stderr
