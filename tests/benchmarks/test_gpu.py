"""Tests of the GPU benchmark, without a GPU and with no dependencies but torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.gpu import check, peers, speed
from tests.benchmarks.gpu.__main__ import main
from tests.benchmarks.gpu.engine import Workload
from tests.benchmarks.gpu.sections import DEVICE_LOST, Call, Section, saved_sections
from tests.benchmarks.gpu.shapes import write_shape
from tests.benchmarks.gpu.supervisor import supervise
from tests.benchmarks.gpu.trace import exposed_in, top_kernels_in

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
    "anyio",
    "httpcore",
    "regex",
    "yaml",
    "markdown_it",
    "prompt_toolkit",
    "PIL",
    "obstore",
    "ray",
    "pyarrow",
    "opentelemetry",
    "textual",
    "gguf",
    "jsonschema",
    "openai",
    "anthropic",
    "trustme",
    "schemathesis",
]
"""Modules that a machine with only torch may lack."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command sets it, which other tests in this process are not to see."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


TRANSFORMERS = {"transformers", "huggingface_hub", "httpx", "httpcore", "anyio", "regex", "yaml"}
TRANSFORMERS |= {"typer", "rich", "jinja2", "markdown_it"}
"""Those of them that transformers brings."""


def lacking(modules: Collection[str]) -> str:
    """The beginning of a program in whose process the modules cannot be imported."""
    return f"""
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(modules)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


WITHOUT = lacking(ABSENT)
PROGRAM = f"""{WITHOUT}
runpy.run_module("tests.benchmarks.gpu", run_name="__main__", alter_sys=True)
"""
COLLECT = f"""{WITHOUT}
import pytest

sys.exit(pytest.main(["--collect-only", "-q", "-c", "/dev/null", "--rootdir", ".", *sys.argv[1:]]))
"""
MAKE = f"""{lacking(set(ABSENT) - TRANSFORMERS)}
from pathlib import Path
from tests.benchmarks.gpu.check import LIMITS, MINIATURES
from tgi_cli.config import ServeConfig, resolve
from tgi_cli.device import describe
from tgi_cli.models import model_facts, read_config

for number, (name, miniature) in enumerate(MINIATURES.items()):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    made = miniature.make(folder)
    serve = ServeConfig(model_id=made.name, **LIMITS | miniature.options)
    resolve(serve, model_facts(read_config(made)), describe("cpu"), made)
    print(name)
"""


def run_without(
    program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository's folder, with the modules absent that a machine may lack."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(check.__file__).parents[3],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
    )


def run_call(call: str, out: Path, *options: str) -> dict[str, Any]:
    """The sections of a call on a CPU, with the modules absent that a machine may lack."""
    arguments = [call, "--device", "cpu", "--shape", "tiny", "--out", str(out), "--one-process"]
    arguments += options
    done = run_without(PROGRAM, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    sections: dict[str, Any] = json.loads((out / f"{call}.json").read_text())["sections"]
    assert not [name for name, entry in sections.items() if "failed" in entry]
    return sections


def test_all_of_speed_runs_on_a_miniature_with_only_torch(tmp_path: Path) -> None:
    sections = run_call("speed", tmp_path)
    assert list(sections) == [section.name for section in speed.SECTIONS]
    rows = sections["decode"]["figures"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 32), (3, 32), (1, 60)]
    assert all(row["step ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert sections["device"]["figures"]["sum GB/s, read"] > 0
    shapes = [
        row for name in sections if name.startswith("shape ") for row in sections[name]["figures"]
    ]
    assert [(row["model"], row["batch"]) for row in shapes] == [
        *(("tiny-moe", 1), ("tiny-moe", 3)),
        *(("tiny", 1), ("tiny", 3)),
    ]
    assert [row["read by"] for row in sections["loading"]["figures"]] == ["mappings", "threads"]
    assert "| workload | requests |" in (tmp_path / "speed.md").read_text()
    assert (tmp_path / "decode-trace.json").stat().st_size > 0


def test_check_and_peers_run_with_only_torch(tmp_path: Path) -> None:
    names = ("variants", "attention", "operations", "experts")
    sections = run_call("check", tmp_path, "--only", *names)
    assert sections["variants"]["figures"] == {"steps": 10, "compiled": 0}
    assert len(sections["attention"]["figures"]) == 4
    assert "add_rms_norm" in sections["operations"]["figures"]["table"]
    assert "one by one" in sections["experts"]["figures"]["table"]
    sections = run_call("peers", tmp_path)
    assert list(sections) == [section.name for section in peers.SECTIONS]
    assert len(sections["ours"]["figures"]) == 2


def test_every_miniature_can_be_made_and_served_with_only_torch_and_transformers(
    tmp_path: Path,
) -> None:
    """Its checkpoint is written, and the engine takes its options."""
    done = run_without(MAKE, str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-len(check.MINIATURES) :] == [*check.MINIATURES]


def test_the_hosts_part_of_steps_is_measured_without_a_gpu() -> None:
    """With Triton's launches looked up, and with those that it dispatches itself."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    module = "tests.benchmarks.gpu.host"
    for options in ([], ["--before"]):
        done = subprocess.run(
            [sys.executable, "-m", module, "--shape", "tiny", "--rows", "2", *options],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=Path(check.__file__).parents[3],
            env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
        assert [(row[0].strip("| "), row[2]) for row in rows] == [
            ("decode", "graphs"),
            ("decode", "eager"),
            ("mixed", "graphs"),
            ("mixed", "eager"),
        ]
        assert all(float(row[5].strip("| ")) > 0 for row in rows)


def test_the_kernels_tests_are_all_found() -> None:
    names = {Path(file).name for file in check.native_tests("triton_*results.py")}
    assert {"triton_attention_results.py", "triton_ops_results.py"} <= names
    graphs = {Path(file).name for file in check.native_tests("test_*_device.py")}
    assert "test_cuda_graphs_device.py" in graphs


def test_the_kernels_tests_need_only_torch_and_pytest() -> None:
    """And Hypothesis; their modules, and what these import, are found without anything else."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    files = check.native_tests("triton_*results.py") + check.native_tests("test_*_device.py")
    done = run_without(COLLECT, *files, TRITON_INTERPRET="1")  # as they are without a GPU
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_without_a_gpu_it_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in ("check", "speed", "peers"):
        assert main([call]) == 0
        assert capsys.readouterr().out.count("\n") == 1


def test_a_section_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed", "--only", "decoding"])
    assert "no sections decoding; there are: device, start, decode" in capsys.readouterr().err


def test_a_section_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    call = Call("speed", "cpu", tmp_path, 1, "tiny")

    def fail(_: Call) -> Any:
        raise RuntimeError("the device is lost")

    sections = [
        Section("decode", lambda _: {"a": 1.0}),
        Section("prefill", fail),
        Section("offline", lambda _: [{"b": 2}, {"c": None}]),
        Section("left out", fail),
    ]
    assert call.run(sections, ["decode", "prefill", "offline"]) == 1
    results = json.loads((tmp_path / "speed.json").read_text())["sections"]
    assert list(results) == ["decode", "prefill", "offline"]
    assert results["decode"]["figures"] == {"a": 1.0}
    assert results["prefill"]["failed"] == "RuntimeError: the device is lost"
    assert results["offline"]["figures"] == [{"b": 2}, {"c": None}]
    assert "failed: RuntimeError: the device is lost" in (tmp_path / "speed.md").read_text()


def test_a_section_is_not_begun_without_the_time_it_takes(tmp_path: Path) -> None:
    call = Call("speed", "cuda", tmp_path, 1, "tiny")
    ran: list[str] = []
    sections = [
        Section("short", lambda _: ran.append("short"), seconds=10),
        Section("long", lambda _: ran.append("long"), seconds=70),
    ]
    assert call.run(sections) == 1
    assert ran == ["short"]
    failed = call.results["sections"]["long"]["failed"]
    assert failed.startswith("not begun: ")


def test_the_shapes_have_the_weights_of_their_models(tmp_path: Path) -> None:
    shape = write_shape("8b", tmp_path)
    assert shape.weight_bytes() == pytest.approx(15.0e9, rel=0.01)
    assert shape.weight_bytes(bits=8) == pytest.approx(8.0e9, rel=0.02)
    assert shape.kv_bytes == 128 * 1024
    assert shape.decode_bytes(32, 1024) == pytest.approx(19.3e9, rel=0.01)
    assert shape.prefill_flops(8192) == pytest.approx(2 * 7.0e9 * 8192, rel=0.2)
    experts = write_shape("30b-a3b", tmp_path)
    assert experts.weight_bytes(1) == pytest.approx(2 * 3.0e9, rel=0.1)
    assert experts.weight_bytes(4096) == pytest.approx(2 * 30.2e9, rel=0.02)
    assert experts.weight_bytes(1) < experts.weight_bytes(8) < experts.weight_bytes(64)


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


def test_parity_finds_wrong_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LENGTHS", (1, 17))
    monkeypatch.setattr(check, "NEW_TOKENS", 4)
    names = ("attention", "adapter", "gptq, 4 bits")
    for number, name in enumerate(names):
        found = check.parity(folder_of(tmp_path, number), "cpu", name)
        assert found[f"{name}, tokens"] == 8
        assert "equal tokens, logprobs within" in found[f"{name}, bfloat16, graphs, depth 1"]
        if name != "gptq, 4 bits":
            assert "8 equal tokens" in found[f"{name}, float32, graphs, depth 1"]
    honest = check.play

    def wrong_when_overlapped(worker: Any, limits: Any, workload: Workload, depth: int) -> Any:
        played = honest(worker, limits, workload, depth)
        if depth:
            played.logprobs[1][2] += 1.5
        return played

    monkeypatch.setattr(check, "play", wrong_when_overlapped)
    with pytest.raises(AssertionError, match="attention, float32, eager, depth 1"):
        check.parity(folder_of(tmp_path, 9), "cpu", "attention")


def folder_of(parent: Path, number: int) -> Path:
    folder = parent / str(number)
    folder.mkdir()
    return folder


SUPERVISED = """
import ctypes, os, sys
from pathlib import Path
from tests.benchmarks.gpu import sections

sections.GRACE = 0.0
out, resumed, only = Path(sys.argv[1]), sys.argv[2] == "True", sys.argv[3:]

def hang(call):
    ctypes.CDLL(None).sleep(600)  # as a call of CUDA's does: Python cannot interrupt it

call = sections.Call("speed", "cuda", out, 1, "tiny", resumed)
sys.exit(call.run(
    [
        sections.Section("first", lambda call: {"process": os.getpid()}),
        sections.Section("hangs", hang, limit=1.0),
        sections.Section("crashes", lambda call: os._exit(9)),
        sections.Section("last", lambda call: {"process": os.getpid()}),
    ],
    only,
))
"""


def test_sections_behind_one_that_hangs_or_crashes_run_in_another_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["first", "hangs", "crashes", "last"]

    def command(left: Sequence[str], minutes: float, resumed: bool) -> list[str]:
        return [sys.executable, "-c", SUPERVISED, str(tmp_path), str(resumed), *left]

    assert supervise("speed", names, tmp_path, 5, command) == 1
    found = saved_sections(tmp_path, "speed")
    assert list(found) == names
    for name in ("hangs", "crashes"):
        assert found[name]["failed"] == "it ended the process, or took too long"
    assert len({found[name]["figures"]["process"] for name in ("first", "last")}) == 2
    printed = capfd.readouterr()
    assert "in hang" in printed.err, "where it hung"
    assert printed.out.splitlines()[-1].endswith("failed: hangs, crashes")


def test_a_process_ends_when_its_device_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is for another one."""
    monkeypatch.setattr(Call, "_device_is_lost", lambda call: True)

    def fail(_: Call) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    call = Call("speed", "cpu", tmp_path, 1, "tiny")
    assert call.run([Section("decode", fail), Section("prefill", fail)]) == DEVICE_LOST
    assert list(saved_sections(tmp_path, "speed")) == ["decode"]


def test_a_process_that_begins_no_section_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[bool] = []

    def command(left: Sequence[str], minutes: float, resumed: bool) -> list[str]:
        started.append(resumed)
        return [sys.executable, "-c", "raise SystemExit(1)"]

    assert supervise("speed", ["decode"], tmp_path, 5, command) == 1
    assert started == [False]
    assert "not begun, see above: decode" in capfd.readouterr().out


def test_a_programs_output_is_kept_if_it_takes_too_long(tmp_path: Path) -> None:
    call = Call("check", "cpu", tmp_path, 1, "tiny")
    program = "import time; print('half of it', flush=True); time.sleep(600)"
    call.deadline = time.monotonic() + 2
    with pytest.raises(AssertionError, match=r"not done within .*\nhalf of it"):
        call.program([sys.executable, "-c", program], tmp_path / "slow.txt")
    assert (tmp_path / "slow.txt").read_text() == "half of it\n"
