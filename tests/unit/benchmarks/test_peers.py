"""Tests of the calculations and tables of the comparison with peers."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.peers import machine
from tests.benchmarks.peers.arguments import (
    GGUF_TYPES,
    Ours,
    contestants,
    named_megabytes,
    ours,
    parser,
    peer_path,
)
from tests.benchmarks.peers.client import events
from tests.benchmarks.peers.columns import Column, long_contexts, serving
from tests.benchmarks.peers.contestant import Contestant, Failure, Running, Setup, Wave
from tests.benchmarks.peers.llama_cpp import LlamaCpp
from tests.benchmarks.peers.process_memory import PeakMemory, memory
from tests.benchmarks.peers.report import Report, ratio, slope, spread
from tests.benchmarks.peers.rounds import Results, Rules, Run, figures, in_turn, prompts
from tests.benchmarks.peers.weights import cache_bytes, decoded_bytes
from tests.tools.checkpoints import FIRST_WORD, make_llama


def test_busy_ticks_include_stolen_time_but_not_idle_or_guest_time() -> None:
    busy, total = machine.cpu_ticks("cpu  10 20 30 400 50 6 7 8 9 9\ncpu0 1 1 1 1\n")
    assert (busy, total) == (10 + 20 + 30 + 6 + 7 + 8, 531)


def test_ticks_of_a_process_whose_name_contains_blanks_and_parentheses() -> None:
    stat = "7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 11 22 33 44 20 0 1 0"
    assert machine.process_ticks(stat) == 11 + 22 + 33 + 44


def test_foreign_share_excludes_own_and_idle_time() -> None:
    before = machine.Clock(busy=100, total=1000, own=40)
    after = machine.Clock(busy=190, total=1200, own=100)
    assert after.foreign_since(before) == pytest.approx((90 - 60) / 200)
    assert before.foreign_since(before) == 0


def test_descendants_and_their_memory() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while len(machine.descendants(child.pid)) < 2:
            assert child.poll() is None
        assert child.pid in machine.descendants(os.getpid())
        used = memory(child.pid)
        assert used.peak_resident >= used.resident >= used.proportional > 1
    finally:
        child.communicate(b"\n")


def test_pages_of_several_processes_count_once_in_the_peak(tmp_path: Path) -> None:
    """A parent and three children share 64 MB; then the parent has 32 MB of its own for a while."""
    code = f"""
import os
shared = bytearray(os.urandom(1 << 20)) * 64
reading, writing = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent ends
        os._exit(0)
own = bytearray(os.urandom(1 << 20)) * 32
open({str(tmp_path / "peak")!r}, "w").close()
input()
del own
open({str(tmp_path / "after")!r}, "w").close()
input()
"""
    with PeakMemory() as peak:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        assert child.stdin is not None
        try:
            for name, reached in (("peak", 95), ("after", 0)):
                while not (tmp_path / name).exists() or peak.megabytes < reached:
                    assert child.poll() is None
                    time.sleep(0.05)
                if name == "peak":
                    child.stdin.write(b"\n")
                    child.stdin.flush()
            after = memory(child.pid)
        finally:
            child.kill()
            child.wait()
    assert 96 < peak.megabytes < 200
    assert 64 < after.proportional < peak.megabytes - 25
    assert after.resident > 4 * 64


def test_events_are_read_across_parts_at_the_time_of_their_end() -> None:
    parts = [
        (1.0, b'data: {"a"'),
        (2.0, b': 1}\n\ndata: {"a": 2}\r\n'),
        (3.0, b": ping\n\ndata: [DONE]\n\n"),
    ]
    assert list(events(parts)) == [(2.0, {"a": 1}), (2.0, {"a": 2})]


def test_figures_of_one_request_are_medians_of_its_repeats() -> None:
    column = Column("c1", 1, 100, 11)
    waves = [Wave(last, (0.5,), (last,)) for last in (1.5, 2.5, 99.0)]
    assert figures(column, waves) == {
        "c1.ttft": 500,
        "c1.prefill": 200,
        "c1.rate": pytest.approx(11 / 2.5),
        "c1.token": pytest.approx(200),
        "c1.decode": pytest.approx(5),
    }


def test_figures_of_a_prompt_alone_and_of_a_wave() -> None:
    assert figures(Column("p8", 1, 8, 1), [Wave(0.5, (0.5,), (0.5,))]) == {
        "p8.ttft": 500,
        "p8.prefill": 16,
    }
    wave = figures(Column("c2", 2, 8, 3), [Wave(4.0, (1.0, 2.0), (3.0, 4.0))])
    assert wave["c2.rate"] == 6 / 4
    assert wave["c2.ttft"] == 1500
    assert "c2.prefill" not in wave


def test_prompts_are_words_and_the_same_for_every_contestant() -> None:
    column = Column("c2", 2, 16, 4)
    first = prompts(column, 400, "seed")
    assert first == prompts(column, 400, "seed") != prompts(column, 400, "another")
    assert first[0] != first[1]
    assert all(FIRST_WORD <= token < 400 for prompt in first for token in prompt)


def test_setup_holds_the_largest_of_each() -> None:
    assert Setup.of(serving([1, 32], [1024])) == Setup(32, 1025, 32 * 256)


def test_llama_cpp_starts_once_for_each_concurrency() -> None:
    columns = serving([8, 1], [512])
    groups = LlamaCpp(Path("build"), "bf16", Path("python")).visits(columns)
    assert [[column.name for column in group] for group in groups] == [["c1", "p512"], ["c8"]]


def test_contestants_are_parsed_from_the_command_line() -> None:
    assert ours("int8={checkpoint}: --quantize int8") == Ours(
        "int8", "{checkpoint}", "--quantize int8"
    )
    assert ours("tgi=/models/a") == Ours("tgi", "/models/a")
    assert peer_path("vllm=/venv") == ("vllm", Path("/venv"))
    assert named_megabytes("int8=1.5") == ("int8", 1_500_000)
    for wrong in ("tgi", "=a", "tgi="):
        with pytest.raises(argparse.ArgumentTypeError):
            ours(wrong)
    with pytest.raises(argparse.ArgumentTypeError):
        peer_path("sglang=/venv")


def test_peers_of_a_quantized_run_have_quantized_weights() -> None:
    line = ["w", "--peer", "vllm=/v", "--peer", "llama.cpp=/b", "--peer", "openvino=/o"]
    plain = [one.name for one in contestants(parser().parse_args(line))]
    assert plain == ["tgi", "vllm", "llama.cpp bf16", "openvino bf16"]
    line += ["--quantized"]
    peers = ["llama.cpp q8_0", "llama.cpp q4_0", "openvino int8"]
    quantized = [one.name for one in contestants(parser().parse_args(line))]
    ours = ["tgi int8", "tgi int8, 16-bit activations", "tgi int8, head too"]
    ours += ["tgi int4", "tgi int4, 16-bit activations"]
    ours += ["tgi int4, head of 8", "tgi int4, head of 4"]
    assert quantized == [*ours, *peers]
    line += ["--tgi", "a=x", "--tgi", "b=y"]
    assert [one.name for one in contestants(parser().parse_args(line))] == ["a", "b", *peers]
    with pytest.raises(SystemExit, match="names must differ"):
        contestants(parser().parse_args(["w", "--tgi", "a=x", "--tgi", "a=y"]))


def test_gguf_files_are_served_by_both() -> None:
    line = ["w", "--peer", "llama.cpp=/b", "--gguf"]
    found = [one.name for one in contestants(parser().parse_args(line))]
    both = [f"{name} {kind}" for kind in GGUF_TYPES for name in ("tgi", "llama.cpp")]
    assert found == both
    named = [one.name for one in contestants(parser().parse_args([*line, "q6_k"]))]
    assert named == ["tgi q6_k", "llama.cpp q6_k"]
    ours = ["--tgi", "tgi={gguf}", "--tgi", "a16={gguf}: --no-quantize-activations"]
    several = [one.name for one in contestants(parser().parse_args([*line, "q6_k", *ours]))]
    assert several == ["tgi q6_k", "a16 q6_k", "llama.cpp q6_k"]
    with pytest.raises(SystemExit, match=r"the checkpoint of --tgi is \{gguf\}"):
        contestants(parser().parse_args([*line, "--tgi", "a={checkpoint}"]))
    for wrong in (["w", "--gguf"], [*line, "--peer", "vllm=/v"]):
        with pytest.raises(SystemExit, match="--gguf needs"):
            contestants(parser().parse_args(wrong))


def test_ratios_are_above_one_where_ours_is_better() -> None:
    assert ratio([4, 2, 3], [1, 2, 1.5], more_is_better=True) == 2
    assert ratio([4, 2, 3], [6], more_is_better=False) == 2
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0-3.0)"
    assert spread([3.0], 0) == "3"
    assert slope([1000, 2000, 4000], [6, 7, 9]) == pytest.approx((5, 1))


def test_tables_mark_noise_and_failures() -> None:
    results = Results()
    columns = serving([1], [])
    results.add("tgi", {"c1.rate": 20.0, "c1.decode": 25.0, "c1.ttft": 50.0})
    results.add("slow", {"c1.rate": 10.0, "c1.decode": 12.5, "c1.ttft": 25.0})
    results.foreign = {"tgi": {"c1": [0.0]}, "slow": {"c1": [0.5]}}
    results.fail("broken", "preparation", "is not there")
    transports = {"tgi": "HTTP", "slow": "HTTP", "broken": "HTTP"}
    report = Report(results, transports, ["tgi"], noisy=0.1)
    lines = report.serving(columns).splitlines()
    assert "| slow | HTTP | 10.0* | 12.5* | 25* | - | - |" in "\n".join(lines).replace(
        "failed", "-"
    )
    assert "| tgi | HTTP | 20.0 | 25.0 | 50 |" in "\n".join(lines)
    assert "| slow | 2.00 | 2.00 | 0.50 | - | - | - |" in lines
    assert "| broken | - | - | - | - | - | - |" in lines
    assert report.failures() == "- broken, preparation: is not there"
    limit = report.limit({"tgi": 10**9}, 50e9, columns[0])
    assert "| tgi | 1000 | 50 | 25.0 | 50% |" in limit


def test_table_of_long_contexts_has_slopes() -> None:
    results = Results()
    columns = long_contexts([1000, 3000], new=2)
    for column, token in zip(columns, (5.0, 9.0), strict=True):
        results.add("tgi", {f"{column.name}.token": token, f"{column.name}.prefill": 100.0})
    text = Report(results, {"tgi": "HTTP"}, ["tgi"], noisy=0.1).long(columns)
    assert "| tgi | 5.00 | 9.00 | 3.00 | 2.00 |" in text
    assert "| tgi | 100 | 100 |" in text


def test_decoded_weights_exclude_an_untied_embedding(tmp_path: Path) -> None:
    tied = make_llama(tmp_path / "tied", dtype=torch.bfloat16)
    untied = make_llama(tmp_path / "untied", dtype=torch.bfloat16, tie_word_embeddings=False)
    config = json.loads((tied / "config.json").read_text())
    assert decoded_bytes(tied) == decoded_bytes(untied) > 2 * 256 * 64
    halved = 3 * 64 * (2 * 8 + 2 * 2) * 16 + 3 * 3 * 64 * 160  # of 8 and 2 heads, and the gates
    for each in (tied, untied):
        assert decoded_bytes(each) - decoded_bytes(each, layer_bits=8) == halved
        assert decoded_bytes(each) - decoded_bytes(each, head_bits=8) == 256 * 64
    assert cache_bytes(config, 2) == 2 * 3 * 2 * 16 * 2


def test_each_round_starts_with_another_contestant() -> None:
    three = [Echo("a"), Echo("b"), Echo("c")]
    orders = ["".join(one.name for one in in_turn(three, number)) for number in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


class Echo(Contestant):
    """A contestant that fails waves of any but two requests."""

    def versions(self) -> dict[str, str]:
        return {}

    def prepare(self, checkpoint: Path, folder: Path) -> Path:
        return checkpoint

    def start(self, model: Path, setup: Setup, log: Path) -> Running:
        if self.name == "broken":
            raise Failure("does not start")
        process = subprocess.Popen(["sleep", "60"], text=True, start_new_session=True)
        return EchoRunning(process, log)

    def weight_bytes(self, model: Path) -> int:
        return 1


class EchoRunning(Running):
    def wave(self, prompts: object, new: int, timeout: float) -> Wave:
        assert isinstance(prompts, list)
        if len(prompts) != 2:
            raise Failure("only two")
        return Wave(2.0, (1.0, 1.0), (2.0, 2.0))


def test_failures_discard_only_their_own_figures(tmp_path: Path) -> None:
    rules = Rules(1, foreign=1.0, retries=0, timeout=5, vocabulary=400)
    lines: list[str] = []
    run = Run(serving([1, 2], [], prompt=4, new=5), rules, tmp_path, lines.append)
    for name in ("works", "broken"):
        run.visit(Echo(name), tmp_path, 0)
    results = run.results
    assert results.failures == {
        "works": {"c1": "only two"},
        "broken": {"c1+c2": "does not start"},
    }
    assert results.values["works"]["c2.rate"] == [5.0]
    used = {key: results.values["works"][f"memory.{key}"][0] for key in ("peak", "after")}
    assert used["peak"] >= used["after"] > 0
    assert results.values["works"]["memory.resident"][0] >= used["after"]
    assert any("does not start" in line for line in lines)


def test_a_noisy_figure_is_measured_again_and_the_quietest_attempt_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.5, 0.2, 0.4])
    monkeypatch.setattr(machine.Clock, "foreign_since", lambda self, before: next(shares))
    rules = Rules(1, foreign=0.1, retries=2, timeout=5, vocabulary=400)
    run = Run(serving([2], [], prompt=4, new=5), rules, tmp_path, lambda text: None)
    run.visit(Echo("works"), tmp_path, 0)
    assert run.results.foreign == {"works": {"c2": [0.2]}}
