"""Tests of the GPU benchmark, without a GPU and with no dependencies but torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import gpu, gpu_check
from tests.benchmarks.gpu_trace import exposed_in, top_kernels_in

ABSENT = [
    "msgspec",
    "pydantic",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "grpc",
    "google",
    "llguidance",
    "httpx",
    "huggingface_hub",
    "typer",
    "rich",
    "prometheus_client",
    "jinja2",
    "transformers",
]
"""Modules that a machine with only torch may lack."""

PROGRAM = f"""
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_module("tests.benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_the_whole_script_runs_on_a_miniature_with_only_torch(tmp_path: Path) -> None:
    sections = ["decode", "ladder", "prefill", "offline", "trace", "kernels", "syncs"]
    arguments = ["--device", "cpu", "--shape", "tiny", "--out", str(tmp_path), "--only", *sections]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(gpu.__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert list(results) == ["device", "load", *sections]
    assert not [name for name, entry in results.items() if "failed" in entry]
    assert [row["batch"] for row in results["decode"]["figures"]] == [1, 3]
    assert all(row["step ms"] > 0 for row in results["decode"]["figures"])
    assert results["device"]["figures"]["copy GB/s, read and written"] > 0
    table = (tmp_path / "gpu.md").read_text()
    assert "| workload | requests |" in table
    assert (tmp_path / "decode-trace.json").stat().st_size > 0


def test_without_a_gpu_it_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_a_section_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    options = argparse.Namespace(device="cpu", out=tmp_path, minutes=1, shape="tiny", peers=None)
    benchmark = gpu.Benchmark(options)

    def fail() -> Any:
        raise RuntimeError("the device is lost")

    benchmark.section("decode", lambda: {"a": 1.0})
    benchmark.section("prefill", fail)
    benchmark.section("offline", lambda: [{"b": 2}, {"c": None}])
    results = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert results["decode"]["figures"] == {"a": 1.0}
    assert results["prefill"]["failed"] == "RuntimeError: the device is lost"
    assert results["offline"]["figures"] == [{"b": 2}, {"c": None}]
    assert "failed: RuntimeError: the device is lost" in (tmp_path / "gpu.md").read_text()


def test_the_shape_has_the_weights_of_llama_3_1_8b(tmp_path: Path) -> None:
    shape = gpu.gpu_engine.write_shape("8b", tmp_path)
    assert shape.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert shape.kv_bytes == 128 * 1024
    assert shape.decode_bytes(32, 1024) == pytest.approx(19.3e9, rel=0.01)
    assert shape.prefill_flops(8192) == pytest.approx(2 * 7.0e9 * 8192, rel=0.2)


def event(start: float, duration: float, correlation: int, kind: str = "kernel") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": kind, "ts": start, "dur": duration, "args": args}


def test_exposed_host_time_is_the_idle_time_between_graphs() -> None:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for step in range(5):
        start = 1000.0 * step
        # A graph of 20 kernels of 40 us, 2 us apart; then a sampler's 60 us, and a copy beside it.
        events += [event(start + 42 * i, 40, correlation=10 + step) for i in range(20)]
        events.append(event(start + 838 + 30, 60, correlation=100 + step))
        events.append(event(start + 838 + 50, 30, 200 + step, "gpu_memcpy"))
        events.append(event(start, 500, 10 + step, "cuda_runtime"))
    found = exposed_in(events)
    assert found is not None
    assert found.steps == 4
    assert found.step == pytest.approx(1000)
    assert found.graph == pytest.approx(838)
    assert found.between == pytest.approx(162)
    assert found.idle == pytest.approx(162 - 60)
    assert found.idle_inside == pytest.approx(19 * 2)
    assert found.share == pytest.approx(0.102)
    assert exposed_in(events[:20]) is None
    first = top_kernels_in(events, runs=5, limit=1)
    assert first == [{"kernel": "kernel", "us": 20 * 40 + 60, "launches": 21}]


def test_the_check_finds_wrong_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "LENGTHS", (1, 17))
    monkeypatch.setattr(gpu_check, "NEW_TOKENS", 4)
    found = gpu_check.parity(tmp_path, "cpu")
    for miniature in ("attention", "recurrent states"):
        assert found[miniature]["tokens"] == 8
        assert "8 equal tokens" in found[miniature]["float32, graphs, depth 1"]
    honest = gpu_check.play

    def wrong_when_overlapped(worker: Any, limits: Any, prompts: Any, new: int, depth: int) -> Any:
        played = honest(worker, limits, prompts, new, depth)
        if depth:
            played.logprobs[1][2] += 1.5
        return played

    monkeypatch.setattr(gpu_check, "play", wrong_when_overlapped)
    with pytest.raises(AssertionError, match="float32, eager, depth 1"):
        gpu_check.parity(tmp_path, "cpu")
