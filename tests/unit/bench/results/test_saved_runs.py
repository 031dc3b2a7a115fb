"""Saved runs: written whole, read again, refused with a reason."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import msgspec
import pytest

from tests.unit.bench.results.simulation import Server, request, saved
from tgi_cli.bench import events, plan, saved_runs
from tgi_cli.bench.events import RequestDone, RunEnded, StepEnded, StepStarted
from tgi_cli.bench.plan import StepBounds
from tgi_cli.bench.saved_runs import EventLog, RunStarted
from tgi_cli.errors import ConfigError

BOUNDS = StepBounds(requests=12)


def run() -> events.BenchRun:
    server = Server()
    return saved(
        [server.answer(plan.client_step(count, BOUNDS)) for count in (1, 2)],
        notes=["a note"],
        slo={"ttft": 100.0},
    )


def test_a_saved_run_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    saved_runs.save(run(), path)
    assert saved_runs.load(path) == run()
    assert json.loads(path.read_text())["version"] == events.VERSION
    assert list(tmp_path.iterdir()) == [path]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_an_older_file_stays_whole_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text("before")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        saved_runs.save(run(), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_newer_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"version": events.VERSION + 1, "steps": "another shape"}))
    with pytest.raises(ConfigError, match=f"version {events.VERSION + 1} of saved runs") as raised:
        saved_runs.load(path)
    assert "newer" in raised.value.remedy


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    saved_runs.save(run(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_later": 1}))
    assert saved_runs.load(path) == run()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', "{}", '{"type":"StepStarted"']
)
def test_a_file_that_is_not_a_run_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not a saved run"):
        saved_runs.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        saved_runs.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "said"),
    [("no/run.json", "does not exist"), ("folder", "is a folder")],
)
def test_files_that_cannot_be_are_refused_before_the_run(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=said):
        saved_runs.check_writable(None, tmp_path / name)
    saved_runs.check_writable(None, tmp_path / "new.json")


def follow(path: Path, made: events.BenchRun, *, cut: int | None = None) -> None:
    lines = EventLog(path)
    lines(RunStarted(msgspec.structs.replace(made, steps=[], notes=[])))
    for index, record in enumerate(made.steps):
        lines(StepStarted(index, 2, record.step))
        for done in record.requests[:cut]:
            lines(RequestDone(index, done))
        if cut is not None:
            break
        lines(StepEnded(index, record))
    else:
        lines(RunEnded(made))
    lines.close()


def test_lines_hold_the_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    follow(path, run())
    assert saved_runs.load(path) == run()
    types = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert types == [
        "RunStarted",
        *("StepStarted", *["RequestDone"] * 13, "StepEnded"),
        *("StepStarted", *["RequestDone"] * 14, "StepEnded"),
        "RunEnded",
    ]


def test_lines_of_a_run_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    follow(path, run(), cut=5)
    with path.open("ab") as file:
        file.write(b'{"type":"RequestDone","index":0,"rec')
    found = saved_runs.load(path)
    assert found.notes == ["the run did not end; this is what it had written"]
    (record,) = found.steps
    assert record.requests == run().steps[0].requests[:5]
    assert record.stopped == "the run did not end"
    counted = record.requests[1:]
    assert record.duration == pytest.approx(counted[-1].finished - counted[0].scheduled)


def test_lines_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"type":"RunStarted","run":{"version":99}}\n')
    with pytest.raises(ConfigError, match="version 99"):
        saved_runs.load(path)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_of_requests(tmp_path: Path) -> None:
    steps = [
        msgspec.structs.replace(
            run().steps[0],
            requests=[request(0), request(1, error="http 500", detail='said "no", and left')],
            duration=5.0,
        )
    ]
    saved_runs.save_csv(saved(steps), tmp_path / "run.csv")
    (step,) = rows(tmp_path / "run.csv")
    assert (step["kind"], float(step["value"]), step["succeeded"], step["failed"]) == (
        "concurrency", 1.0, "1", "1",
    )  # fmt: skip
    assert float(step["ttft_p50_ms"]) == 1000.0
    assert float(step["output_tokens_per_second"]) == pytest.approx(3 / 5)
    assert step["prefill_p50_ms"] == ""
    assert step["goodput"] == ""
    each = rows(tmp_path / "run-requests.csv")
    assert [row["error"] for row in each] == ["", "http 500"]
    assert each[1]["detail"] == 'said "no", and left'
    assert float(each[0]["tpot_ms"]) == 1500.0


def test_csv_of_batches(tmp_path: Path) -> None:
    made = saved([Server().batch(plan.batch_step(size, 3, 1)) for size in (1, 2)])
    saved_runs.save_csv(made, tmp_path / "run.csv")
    steps = rows(tmp_path / "run.csv")
    assert [row["batch_runs"] for row in steps] == ["3", "3"]
    assert float(steps[1]["prefill_p50_ms"]) == pytest.approx(100, rel=0.1)
    each = rows(tmp_path / "run-requests.csv")
    assert [row["batch_size"] for row in each] == ["1"] * 4 + ["2"] * 4
    assert len(each[0]["decode_ms_each"].split()) == 7
