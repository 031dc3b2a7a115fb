"""From what was asked for to plans, requests and their description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.bench.events import BenchRequest, BenchStep
from tgi_cli.bench.plan import (
    BenchOptions,
    SharedPrefix,
    StepBounds,
    client_step,
    plan_of,
    rate_step,
)
from tgi_cli.bench.settings import BenchSampling, RequestSettings
from tgi_cli.bench.workloads.build import described, notes_of, requests_of
from tgi_cli.errors import ConfigError


class Words:
    """A tokenizer that counts words."""

    name = "words"
    exact = True

    def count(self, text: str, special: bool = True) -> int:
        return len(text.split())

    def words(self) -> Sequence[str]:
        return [f"word{number}" for number in range(1000)]


def some(options: BenchOptions, step: BenchStep, count: int = 20) -> list[BenchRequest]:
    return list(islice(requests_of(options, Words())(step, 0), count))


ONE, TWO = (client_step(count, StepBounds()) for count in (1, 2))


def test_prompts_have_their_length_and_differ_between_steps() -> None:
    options = BenchOptions(load="concurrency", input_tokens="12", output_tokens="5")
    first, again, second = some(options, ONE), some(options, ONE), some(options, TWO)
    assert {request.prompt_tokens for request in first} == {12}
    assert {request.max_tokens for request in first} == {5}
    assert first == again
    assert len({request.prompt for request in [*first, *second]}) == 40
    other = BenchOptions(load="concurrency", input_tokens="12", output_tokens="5", seed=1)
    assert some(other, ONE) != first


def test_a_rate_s_requests_are_due() -> None:
    options = BenchOptions(load="rate", values=(4.0,), input_tokens="3", arrival="constant")
    due = [request.at for request in some(options, rate_step(4.0, StepBounds()))]
    assert due[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {request.at for request in some(options, ONE)} == {None}


def test_a_ramp_climbs() -> None:
    options = BenchOptions(load="ramp", values=(1.0, 99.0), seconds=10.0, input_tokens="3")
    (step,) = [next(plan_of(options).search())]
    assert (step.kind, step.value, step.label, step.seconds) == ("rate", 50, "1 to 99/s", 10)
    due = [request.at or 0.0 for request in some(options, step, 500)]
    assert sum(at < 5 for at in due) < sum(5 <= at < 10 for at in due) / 2


def test_prefixes_are_shared() -> None:
    options = BenchOptions(load="concurrency", input_tokens="4", prefix=SharedPrefix(6, 1.0, 2))
    beginnings = {" ".join(request.prompt.split()[:6]) for request in some(options, ONE)}
    assert len(beginnings) == 2
    assert {request.prompt_tokens for request in some(options, ONE)} == {10}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", SharedPrefix(512)),
        ("512:0.5", SharedPrefix(512, 0.5)),
        ("9:1:3", SharedPrefix(9, 1.0, 3)),
    ],
)
def test_prefixes_as_text(text: str, expected: SharedPrefix) -> None:
    assert SharedPrefix.parse(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "5:0", "5:2", "5:1:0", "5:1:1:1", "5:1:x"])
def test_invalid_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prefix"):
        SharedPrefix.parse(text)


def test_conversations() -> None:
    options = BenchOptions(load="concurrency", input_tokens="3", turns="2", think=1.0, chat=True)
    found = some(options, ONE, 4)
    assert [request.conversation for request in found] == [0, 0, 1, 1]
    assert all(request.messages for request in found)
    assert [bool(request.think) for request in found] == [False, True, False, True]


def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("one two\nthree\n")
    options = BenchOptions(load="concurrency", prompts=lines)
    assert {request.prompt for request in some(options, ONE)} == {"one two", "three"}
    assert "prefix cache" in notes_of(options)[0]
    assert notes_of(BenchOptions(load="sweep")) == []
    assert {request.max_tokens for request in some(options, ONE)} == {128}
    shared = tmp_path / "shared.json"
    turns = [("human", "how are you"), ("gpt", "I am well thanks"), ("human", "so"), ("gpt", "so")]
    talk = [{"from": who, "value": text} for who, text in turns]
    shared.write_text(json.dumps([{"conversations": talk}]))
    options = BenchOptions(load="concurrency", prompts=shared)
    assert {(r.prompt, r.max_tokens) for r in some(options, ONE)} == {("how are you", 4)}
    options = BenchOptions(load="concurrency", prompts=shared, turns="2", output_tokens="9")
    assert [(r.conversation, r.max_tokens) for r in some(options, ONE, 3)] == [
        (0, 9), (0, 9), (1, 9),
    ]  # fmt: skip


def test_a_trace_is_one_step_with_times_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"at": at, "prompt": "a b", "max_tokens": 3} for at in (5.0, 6.0, 9.0)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = BenchOptions(load="trace", trace=path, speed=2.0)
    plan = plan_of(options)
    step = next(plan.search())
    assert (plan.total, step.kind, step.label) == (1, "rate", "trace x2")
    assert (step.requests, step.seconds) == (None, None)
    assert [request.at for request in some(options, step)] == [0.0, 0.5, 2.0]


def test_invalid_options_are_errors_before_the_first_step(tmp_path: Path) -> None:
    empty = tmp_path / "none.txt"
    empty.write_text("\n")
    for options in (
        BenchOptions(load="concurrency", prompts=empty),
        BenchOptions(load="concurrency", input_tokens="many"),
        BenchOptions(load="rate", values=(1.0,), arrival="never"),
    ):
        with pytest.raises(ConfigError):
            requests_of(options, Words())
    with pytest.raises(ConfigError, match="0 or less"):
        plan_of(BenchOptions(load="rate", values=(0.0,)))


def steps(**options: Any) -> list[BenchStep]:
    plan = plan_of(BenchOptions(**options))
    search = plan.search()
    return list(search)


def test_steps_are_bounded_by_requests_and_seconds() -> None:
    (step,) = steps(load="concurrency", values=(4.0,))
    assert (step.requests, step.seconds) == (None, 30.0)
    (step,) = steps(load="concurrency", values=(4.0,), requests=40)
    assert (step.requests, step.seconds) == (44, None)
    (step,) = steps(load="rate", values=(4.0,), requests=40, seconds=7.0, warmups=0)
    assert (step.requests, step.seconds) == (40, 7.0)


def test_the_usual_loads() -> None:
    assert [step.value for step in steps(load="batch")] == [1, 2, 4, 8, 16, 32]
    assert [step.value for step in steps(load="concurrency")] == [1, 2, 4, 8, 16, 32]
    assert plan_of(BenchOptions(load="sweep")).total == 0
    assert plan_of(BenchOptions(load="peak", slo={"ttft": 1.0})).total == 0


def test_the_description_has_what_shaped_the_requests_and_no_secret() -> None:
    settings = RequestSettings(
        api_key="secret",
        headers={"X": "secret"},
        sampling=BenchSampling(temperature=0.5),
        ignore_eos=True,
    )
    options = BenchOptions(load="rate", values=(1.0,), prefix=SharedPrefix(8), seconds=5.0, seed=3)
    assert described(options, settings, "a/model") == {
        "load": "rate",
        "tokenizer_name": "a/model",
        "route": "auto",
        "input_tokens": "256",
        "output_tokens": "128",
        "arrival": "poisson",
        "prefix": {"tokens": 8, "share": 1.0, "count": 1},
        "seconds": 5.0,
        "warmups": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": 3,
    }
    batch = described(
        BenchOptions(load="batch", input_tokens="10", output_tokens="8"), settings, "a/model"
    )
    assert (batch["sequence_length"], batch["decode_length"], batch["runs"]) == (10, 8, 10)
    assert batch["top_k"] is None
