"""``tgi bench``: which flags mean what, what is left behind, how a run ends."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.bench.results.simulation import Server, request, saved
from tgi_cli.bench import plan, saved_runs
from tgi_cli.bench.events import BenchRun, RunEnded, StepEnded, StepStarted
from tgi_cli.bench.plan import StepBounds
from tgi_cli.bench.run import BenchConfig, BenchJob
from tgi_cli.bench.workloads.build import described
from tgi_cli.cli import main
from tgi_cli.errors import ExitCode
from tgi_cli.process.installation import install_command

STEP = plan.client_step(2, StepBounds(requests=10))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    """The configurations of the benchmarks that would have run; each returns a saved run."""
    seen: list[BenchConfig] = []

    class SavedJob(BenchJob):
        def __init__(self, request: BenchConfig, log_line: Callable[[str], None]) -> None:
            super().__init__(request, log_line)
            seen.append(request)

        def run(self, on_event: Callable[..., None], *, signals: bool = False) -> BenchRun:
            made = saved([Server().answer(STEP)])
            on_event(StepStarted(0, 1, STEP))
            on_event(StepEnded(0, made.steps[0]))
            on_event(RunEnded(made))
            return made

    monkeypatch.setattr("tgi_cli.bench.run.BenchJob", SavedJob)
    return seen


def options(asked: list[BenchConfig], *arguments: str) -> Any:
    assert main.run(["bench", *arguments]) == ExitCode.OK
    return asked[-1].options


def test_a_model_alone_is_benchmarked_in_closed_batches(asked: list[BenchConfig]) -> None:
    found = options(asked, "a/model")
    assert (found.load, found.values, found.requests, found.warmups) == ("batch", (), 10, 1)
    assert (found.input_tokens, found.output_tokens) == ("10", "8")
    (made,) = asked
    assert (made.address, made.model, made.tokenizer_name) == ("", "a/model", "a/model")
    assert made.settings.ignore_eos
    plan = BenchJob(made).plan
    assert plan.total == 6


def test_the_flags_of_text_generation_benchmark_are_accepted(asked: list[BenchConfig]) -> None:
    found = options(
        asked,
        *("--tokenizer-name", "a/model", "--revision", "main", "-b", "1", "-b", "8"),
        *("-s", "20", "-d", "4", "-r", "3", "-w", "2", "-m", "/tmp/a-socket"),
        *("--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--typical-p", "0.8"),
        *("--repetition-penalty", "1.1", "--frequency-penalty", "0.1", "--watermark"),
        *("--do-sample", "--top-n-tokens", "2"),
    )
    assert found.values == (1, 8)
    assert (found.input_tokens, found.output_tokens) == ("20", "4")
    assert (found.requests, found.warmups) == (3, 2)
    (made,) = asked
    assert (made.address, made.tokenizer_name, made.revision) == (
        "/tmp/a-socket",
        "a/model",
        "main",
    )
    sampling = msgspec.structs.asdict(made.settings.sampling)
    assert sampling == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "top_n_tokens": 2,
        "watermark": True,
        "do_sample": True,
    }


def test_a_tokenizer_alone_selects_tgis_socket(asked: list[BenchConfig]) -> None:
    options(asked, "-t", "a/model")
    assert asked[-1].address == "/tmp/text-generation-server-0"
    options(asked, "a/model", "-t", "another")
    assert asked[-1].address == ""


@pytest.mark.parametrize(
    ("arguments", "load", "values"),
    [
        ("--url http://h", "concurrency", ()),
        ("--url http://h -b 4", "batch", (4,)),
        ("--url http://h -c 1,2", "concurrency", (1, 2)),
        ("--url http://h --rate 0.5,2", "rate", (0.5, 2)),
        ("--url http://h --ramp 1:9", "ramp", (1, 9)),
        ("--url http://h --sweep", "sweep", ()),
        ("--url http://h --slo ttft:200", "peak", ()),
        ("--url http://h --slo ttft:200 --sweep", "sweep", ()),
        ("--url http://h --trace t.jsonl", "trace", ()),
        ("a/model --concurrency 4", "concurrency", (4,)),
        ("a/model --duration 5", "concurrency", ()),
        ("a/model", "batch", ()),
    ],
)
def test_flags_select_the_load(
    asked: list[BenchConfig], arguments: str, load: str, values: tuple[float, ...]
) -> None:
    found = options(asked, *arguments.split())
    assert (found.load, found.values) == (load, values)
    BenchJob(asked[-1])


def test_flags_set_the_options_of_a_load(asked: list[BenchConfig]) -> None:
    found = options(
        asked,
        *("a-model", "--url", "http://h", "-c", "2", "--slo", "ttft:200,tpot:50"),
        *("--input-tokens", "normal:100,10", "-d", "16", "--prefix", "512:0.5:4", "--seed", "7"),
        *("--conversations", "3", "--think", "1.5", "--duration", "9", "-n", "20"),
        *("--route", "chat", "--ignore-eos", "--api-key", "secret", "-H", "X-Team: a"),
        *("--extra-body", '{"min_tokens": 2}', "--timeout", "30"),
    )
    assert found.slo == {"ttft": 200.0, "tpot": 50.0}
    assert (found.input_tokens, found.output_tokens) == ("normal:100,10", "16")
    assert msgspec.structs.astuple(found.prefix) == (512, 0.5, 4)
    assert (found.turns, found.think, found.seconds, found.requests) == ("3", 1.5, 9, 20)
    assert found.chat
    settings = asked[-1].settings
    assert (settings.model, settings.api_key, settings.route) == ("a-model", "secret", "chat")
    assert settings.headers == {"X-Team": "a"}
    assert settings.extra_body == {"min_tokens": 2}
    assert settings.ignore_eos
    assert settings.timeout == 30
    assert "secret" not in json.dumps(described(found, settings, "t"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--url http://h -m /s", "two targets"),
        ("--url ftp://h", "is not a URL"),
        ("-m /s -c 4", "behind a shard's socket"),
        ("--url http://h -c 4 --rate 1", "--concurrency and --rate are two loads"),
        ("--url http://h -c x", "--concurrency: 'x' is not numbers"),
        ("--url http://h -c 0", "is out of range"),
        ("--url http://h --rate -1", "is out of range"),
        ("--url http://h --ramp 3", "is not FROM:TO"),
        ("--url http://h --slo speed:3", "--slo:"),
        ("--url http://h -b 4 --requests 3", "--requests does not apply to closed batches"),
        ("--url http://h -c 4 -r 3", "--runs is for closed batches only"),
        ("--url http://h --input-tokens 5 -s 5", "set the same"),
        ("--url http://h --input-tokens much", "not a distribution of lengths"),
        ("--url http://h --arrival never --rate 1", "not a process of arrivals"),
        ("--url http://h --arrival ramp:1,2,3 --rate 1", "use --ramp"),
        ("--url http://h --prefix 0", "--prefix"),
        ("--url http://h --header nothing", "is not NAME:VALUE"),
        ("--url http://h --extra-body [1]", "is not a JSON object"),
        ("--url http://h --serve-args x", "that this command starts"),
        ("--url http://h --output no/such/run.json", "does not exist"),
        ("--url http://h --svg a.svg --ui plain", "screenshot of the dashboard"),
        ("--url http://h --ui tui", "--ui tui"),
        ("--url http://h --batch-size 0", "is not at least 1"),
        ("compare a.json", "Missing argument"),
        ("view none.json", "cannot be read"),
    ],
)
def test_invalid_flags_are_rejected_before_anything_runs(
    asked: list[BenchConfig], arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", *arguments.split()]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert asked == []


def test_a_run_writes_the_requested_files(
    asked: list[BenchConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("run.json", "run.csv", "run.html", "run.md")
    flags = [f"--{flag}={tmp_path / name}" for flag, name in
             zip(("output", "csv", "html", "markdown"), names, strict=True)]  # fmt: skip
    assert main.run(["bench", "--url", "http://h", *flags]) == ExitCode.OK
    assert {path.name for path in tmp_path.iterdir()} == {*names, "run-requests.csv"}
    out, err = capsys.readouterr()
    assert out == (tmp_path / "run.md").read_text()
    assert out.startswith("| Load ")
    assert err.startswith("[1/1] 2 clients: 10 responses, TTFT ")
    assert saved_runs.load(tmp_path / "run.json").steps


def test_ui_none_prints_nothing(
    asked: list[BenchConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.json"
    arguments = ["bench", "--url", "http://h", "--ui", "none", "--output", str(output)]
    assert main.run(arguments) == ExitCode.OK
    assert capsys.readouterr() == ("", "")
    assert output.exists()


def test_nothing_measured_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = saved(
        [
            msgspec.structs.replace(
                Server().answer(STEP),
                requests=[request(0, error="connect", detail="connection refused")],
            )
        ]
    )

    def run(self: BenchJob, on_event: Callable[..., None], *, signals: bool = False) -> BenchRun:
        on_event(RunEnded(made))
        return made

    monkeypatch.setattr(BenchJob, "run", run)
    output = tmp_path / "run.json"
    arguments = ["bench", "--url", "http://h", "--output", str(output)]
    assert main.run(arguments) == ExitCode.FAILURE
    assert "error: nothing was measured: connection refused" in capsys.readouterr().err
    assert output.exists()


def test_an_interrupted_run_leaves_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = saved([Server().answer(STEP)], notes=["the run was interrupted before its end"])

    def run(self: BenchJob, on_event: Callable[..., None], *, signals: bool = False) -> BenchRun:
        assert signals
        on_event(RunEnded(made))
        return made

    monkeypatch.setattr(BenchJob, "run", run)
    monkeypatch.setattr(BenchJob, "interrupted", True)
    output = tmp_path / "run.json"
    arguments = ["bench", "--url", "http://h", "--output", str(output)]
    assert main.run(arguments) == ExitCode.INTERRUPTED
    assert saved_runs.load(output) == made


def test_without_textual_a_line_per_step_is_printed_with_the_reason(
    asked: list[BenchConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "textual" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert main.run(["bench", "--url", "http://h"]) == ExitCode.OK
    assert capsys.readouterr().err.splitlines()[0] == (
        f"no dashboard: {install_command('bench')} brings it"
    )
    assert main.run(["bench", "--url", "http://h", "--ui", "tui"]) == ExitCode.USAGE
    assert install_command("bench") in capsys.readouterr().err


def two(tmp_path: Path, **second: Any) -> tuple[str, str]:
    step = plan.client_step(2, StepBounds(seconds=30))
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, server in zip(paths, (Server(), Server(seed=1, **second)), strict=True):
        saved_runs.save(saved([server.answer(step)]), path)
    return str(paths[0]), str(paths[1])


def test_compare_exits_with_1_on_a_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, slower = two(tmp_path, slowed=1.1)
    note = tmp_path / "note.md"
    assert main.run(["bench", "compare", first, slower, "--markdown", str(note)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("REGRESSION: ")
    assert note.read_text() == out
    assert err == ""
    for tolerance in ("20%", "never"):
        assert main.run(["bench", "compare", first, slower, "--fail-on", tolerance]) == ExitCode.OK
    assert main.run(["bench", "compare", slower, first]) == ExitCode.OK
    assert main.run(["bench", "compare", first, slower, "--fail-on", "much"]) == ExitCode.USAGE


def test_compare_finds_no_regression_on_the_same_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "compare", *two(tmp_path)]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-1].startswith("no regression: ")


def test_view_prints_tables_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two(tmp_path)
    page = tmp_path / "run.html"
    assert main.run(["bench", "view", first, "--html", str(page)]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("| Load ")
    assert page.read_text().startswith("<!doctype html>")
    assert main.run(["bench", "view", first, second]) == ExitCode.OK
    assert "no regression: " in capsys.readouterr().out


def test_a_model_named_as_a_command_is_given_as_a_path(asked: list[BenchConfig]) -> None:
    options(asked, "./view")
    assert asked[-1].model == "./view"


def test_secrets_are_masked_in_the_saved_command(asked: list[Any]) -> None:
    options(asked, "m", "--url", "http://h", "--api-key=b", "-H", "c: d", "-Hx:e", "-n", "3")
    assert asked[-1].command == [
        *("tgi", "bench", "m", "--url", "http://h", "--api-key", "***"),
        *("--header", "***", "--header", "***", "--requests", "3"),
    ]


def test_a_configuration_file_sets_options_of_bench(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tgi.yaml"
    path.write_text("port: 8080\napi_key: [a, b]\nbench:\n  batch-size: [2, 4]\n  runs: 3\n")
    found = options(asked, "a/model", "--config", str(path), "--runs", "5", "--api-key", "c")
    assert (found.values, found.requests) == ((2, 4), 5)
    path.write_text("bench:\n  batch-size: [0]\n")
    assert main.run(["bench", "a/model", "--config", str(path)]) == ExitCode.USAGE
    assert "bench: batch-size: 0 is not at least 1" in capsys.readouterr().err


def test_help_lists_view_and_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "--help-all"]) == ExitCode.OK
    out = " ".join(capsys.readouterr().out.split())
    assert "tgi bench view" in out
    assert out.lower().count("default: ") > 10, "also those that the help texts name"
    assert "Default: 10." in out
    assert "tgi bench compare" in out
    assert main.run(["bench", "compare", "--help"]) == ExitCode.OK
    assert "--fail-on" in capsys.readouterr().out
