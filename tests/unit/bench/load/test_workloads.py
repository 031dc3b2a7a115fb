"""Workloads: exact lengths, distributions, arrivals; the same seed, the same requests."""

from __future__ import annotations

import json
import statistics
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.unit.bench.load.words import Words
from tgi_cli import demo
from tgi_cli.bench.plan import SharedPrefix
from tgi_cli.bench.token_counter import LocalTokenCounter, TokenEstimator
from tgi_cli.bench.workloads.distributions import ArrivalProcess, LengthDistribution, scheduled
from tgi_cli.bench.workloads.files import ShareGptWorkload, file_prompts, sharegpt, trace
from tgi_cli.bench.workloads.synthetic import (
    ConversationWorkload,
    SyntheticWorkload,
    conversations,
    synthetic,
)
from tgi_cli.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenCounter:
    return LocalTokenCounter.load(demo.model_path(), demo.MODEL_ID)


# ------------------------------------------------------------------ lengths


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("128", 128, 0),
        ("uniform:64,256", 160, 55.7),
        ("normal:512,128", 512, 128),
        ("lognormal:512,128", 512, 128),
        ("lognormal:300,600,1,100000", 300, 600),
    ],
)
def test_lengths_have_the_requested_mean_and_deviation(
    text: str, mean: float, deviation: float
) -> None:
    lengths, dice = LengthDistribution.parse(text), Random(1)
    drawn = [lengths.draw(dice) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.15, abs=0.01)
    assert str(LengthDistribution.parse(str(lengths))) == str(lengths)


def test_bounded_lengths_stay_within_their_bounds() -> None:
    lengths, dice = LengthDistribution.parse("normal:100,80,50,150"), Random(1)
    drawn = {lengths.draw(dice) for _ in range(2000)}
    assert min(drawn) == 50
    assert max(drawn) == 150


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "normal:1", "uniform:9,3", "zipf:3", "normal:5,nan", "inf"]
)
def test_lengths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        LengthDistribution.parse(text)


# ------------------------------------------------------------------ arrivals


def gaps(text: str, rate: float, count: int = 20_000) -> list[float]:
    times = list(islice(ArrivalProcess.parse(text).times(rate, seed=3), count))
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def test_constant_arrivals_are_evenly_spaced() -> None:
    times = list(islice(ArrivalProcess.parse("constant").times(4.0, seed=1), 9))
    assert times == [number / 4 for number in range(9)]


@pytest.mark.parametrize(
    ("text", "variation"), [("poisson", 1.0), ("gamma:0.25", 2.0), ("gamma:4", 0.5)]
)
def test_random_arrivals_have_their_rate_and_their_burstiness(text: str, variation: float) -> None:
    found = gaps(text, rate=5.0)
    mean = statistics.mean(found)
    assert mean == pytest.approx(0.2, rel=0.05)
    # Of gamma-distributed gaps it is one over the root of the shape.
    assert statistics.pstdev(found) / mean == pytest.approx(variation, rel=0.08)


def test_a_ramp_climbs_and_then_stays() -> None:
    times = list(islice(ArrivalProcess.parse("ramp:2,18,100").times(1.0, seed=2), 3000))
    assert times == sorted(times)

    def rate(begin: float, end: float) -> float:
        return sum(begin <= time < end for time in times) / (end - begin)

    assert rate(0, 25) == pytest.approx(4, rel=0.3)
    assert rate(75, 100) == pytest.approx(16, rel=0.2)
    assert rate(100, 150) == pytest.approx(18, rel=0.15)


def test_a_falling_ramp_and_a_flat_one_work_too() -> None:
    falling = list(islice(ArrivalProcess.parse("ramp:20,5,50").times(1.0, seed=2), 700))
    assert sum(time < 10 for time in falling) > 2 * sum(40 <= time < 50 for time in falling)
    flat = list(islice(ArrivalProcess.parse("ramp:10,10,50").times(1.0, seed=2), 1000))
    assert flat[-1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("text", ["", "gamma", "gamma:0", "ramp:1,2", "ramp:1,0,5", "poisson:3"])
def test_arrivals_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="arrivals"):
        ArrivalProcess.parse(text)


def test_a_rate_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="rate"):
        ArrivalProcess.parse("poisson").times(0.0, seed=1)


# ------------------------------------------------------------------ synthetic prompts


@pytest.mark.parametrize("text", ["2", "17", "256", "uniform:2,400", "lognormal:64,64"])
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_encode_to_exactly_their_length(
    tokenizer: LocalTokenCounter, text: str, chat: bool
) -> None:
    spec = SyntheticWorkload(
        prompt=LengthDistribution.parse(text), output=LengthDistribution.fixed(8), chat=chat
    )
    wanted = LengthDistribution.parse(text)
    for request in islice(synthetic(tokenizer, spec, seed=5), 20):
        assert tokenizer.count(request.prompt, special=not chat) == request.prompt_tokens
        assert wanted.low <= request.prompt_tokens <= wanted.high
        assert request.max_tokens == 8
        if chat:
            assert request.messages == [{"role": "user", "content": request.prompt}]


def test_prompts_depend_on_the_seed_alone(tokenizer: LocalTokenCounter) -> None:
    spec = SyntheticWorkload(
        prompt=LengthDistribution.parse("normal:40,10"),
        output=LengthDistribution.parse("uniform:1,9"),
    )
    once, again, other = (list(islice(synthetic(tokenizer, spec, seed), 30)) for seed in (1, 1, 2))
    assert once == again
    assert once != other
    assert len({request.prompt for request in once}) == 30


def test_prefixes_are_shared_by_the_requested_share(tokenizer: LocalTokenCounter) -> None:
    spec = SyntheticWorkload(
        prompt=LengthDistribution.fixed(20),
        output=LengthDistribution.fixed(1),
        prefix=SharedPrefix(50, 0.75, 3),
    )
    requests = list(islice(synthetic(tokenizer, spec, seed=1), 400))
    lengths = {request.prompt_tokens for request in requests}
    assert lengths == {20, 70}
    long = [request.prompt for request in requests if request.prompt_tokens == 70]
    assert len(long) / 400 == pytest.approx(0.75, abs=0.07)
    # A prefix's own text, before whatever word comes behind it.
    assert len({" ".join(prompt.split(" ")[:45]) for prompt in long}) == 3
    assert len(set(long)) == len(long)


def test_prompts_shorter_than_what_the_tokenizer_adds_are_refused() -> None:
    spec = SyntheticWorkload(prompt=LengthDistribution.fixed(1), output=LengthDistribution.fixed(1))
    with pytest.raises(ConfigError, match="minimum is 2"):
        next(synthetic(Words(), spec))


def test_words_of_several_tokens_are_corrected_for() -> None:
    class Awkward(Words):
        """Long words are two tokens."""

        def count(self, text: str, special: bool = True) -> int:
            return sum(1 + (len(word) > 3) for word in text.split()) + special

    for length in (3, 20, 61):
        spec = SyntheticWorkload(
            prompt=LengthDistribution.fixed(length), output=LengthDistribution.fixed(1)
        )
        for request in islice(synthetic(Awkward(), spec), 20):
            assert Awkward().count(request.prompt) == request.prompt_tokens == length


def test_a_guess_makes_prompts_all_the_same() -> None:
    spec = SyntheticWorkload(
        prompt=LengthDistribution.fixed(100), output=LengthDistribution.fixed(1)
    )
    request = next(synthetic(TokenEstimator(), spec))
    assert request.prompt_tokens == 100 == len(request.prompt.split())


# ------------------------------------------------------------------ files


def test_a_text_file_is_a_prompt_a_line_and_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one two\n\nthree\n")
    requests = list(islice(file_prompts(path, Words(), LengthDistribution.fixed(5)), 6))
    rows = [(r.prompt, r.prompt_tokens, r.max_tokens) for r in requests]
    for start in (0, 2, 4):
        assert sorted(rows[start : start + 2]) == [("one two", 3, 5), ("three", 2, 5)]


def test_json_lines_may_have_messages_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "one two", "max_tokens": 9},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    requests = islice(file_prompts(path, Words(), LengthDistribution.fixed(5)), 2)
    first, second = sorted(requests, key=lambda request: request.messages is not None)
    assert (first.max_tokens, first.messages) == (9, None)
    assert (second.max_tokens, second.prompt_tokens) == (5, 3)
    assert second.messages is not None
    assert [message["role"] for message in second.messages] == ["system", "user"]


@pytest.mark.parametrize(
    "line", ["no json", "[]", "{}", '{"prompt": ""}', '{"prompt": "a", "max_tokens": 0}']
)
def test_the_error_of_an_invalid_line_has_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        file_prompts(path, Words(), LengthDistribution.fixed(5))


SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": "how are you"},
            {"from": "gpt", "value": "very well thank you"},
            {"from": "human", "value": "good"},
            {"from": "gpt", "value": "is it"},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "answers nobody"}]},
    {"conversations": [{"from": "human", "value": "never answered"}]},
]


def test_sharegpt_asks_for_as_much_as_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    requests = list(islice(sharegpt(path, Words(), ShareGptWorkload()), 1))
    assert [(r.prompt, r.prompt_tokens, r.max_tokens) for r in requests] == [("how are you", 3, 4)]
    several = ShareGptWorkload(turns=9, think=2.5)
    turns = list(islice(sharegpt(path, Words(), several), 3))
    assert [(r.prompt, r.conversation, r.think, r.max_tokens) for r in turns] == [
        ("how are you", 0, 0.0, 4),
        ("good", 0, 2.5, 2),
        ("how are you", 1, 0.0, 4),
    ]


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT[1:]))
    with pytest.raises(ConfigError, match="no conversation"):
        sharegpt(path, Words(), ShareGptWorkload())


# ------------------------------------------------------------------ conversations


def test_conversations_have_their_turns_in_order() -> None:
    spec = ConversationWorkload(
        turns=LengthDistribution.parse("uniform:2,4"),
        first=LengthDistribution.fixed(12),
        turn=LengthDistribution.fixed(3),
        output=LengthDistribution.fixed(5),
        think=1.5,
        system_tokens=7,
    )
    requests = list(islice(conversations(Words(), spec, seed=1), 300))
    assert requests == list(islice(conversations(Words(), spec, seed=1), 300))
    by_number: dict[int | None, list[Any]] = {}
    for request in requests:
        by_number.setdefault(request.conversation, []).append(request)
    whole = list(by_number.values())[:-1]
    assert {len(turns) for turns in whole} == {2, 3, 4}
    systems = set()
    for first, *later in whole:
        assert [message["role"] for message in first.messages] == ["system", "user"]
        systems.add(first.messages[0]["content"])
        assert (first.prompt_tokens, first.think) == (19, 0.0)
        assert all(len(turn.messages) == 1 and turn.prompt_tokens == 3 for turn in later)
    assert len(systems) == 1
    thinks = [request.think for request in requests if request.think]
    assert statistics.mean(thinks) == pytest.approx(1.5, rel=0.3)


def test_only_the_first_turn_of_a_conversation_is_due() -> None:
    spec = ConversationWorkload(
        turns=LengthDistribution.fixed(2),
        first=LengthDistribution.fixed(4),
        turn=LengthDistribution.fixed(3),
        output=LengthDistribution.fixed(5),
        chat=False,
    )
    requests = scheduled(
        conversations(Words(), spec), ArrivalProcess.parse("constant").times(2.0, seed=1)
    )
    assert [request.at for request in islice(requests, 6)] == [0.0, None, 0.5, None, 1.0, None]


# ------------------------------------------------------------------ traces


def write_trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake_requests_share_what_the_traced_ones_shared(
    tmp_path: Path, tokenizer: LocalTokenCounter
) -> None:
    path = write_trace(
        tmp_path / "mooncake.jsonl",
        [
            {"timestamp": 1000, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
            {"timestamp": 1500, "input_length": 1100, "output_length": 0, "hash_ids": [1, 2, 4]},
            {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [7, 2]},
            {"timestamp": 3500, "input_length": 1536, "output_length": 9, "hash_ids": [1, 2, 3]},
        ],
    )
    first, second, third, fourth = trace(path, tokenizer, seed=4)
    assert [r.at for r in (first, second, third, fourth)] == [0.0, 0.5, 2.0, 2.5]
    assert [r.max_tokens for r in (first, second, third)] == [5, 1, 9]
    for request, length in ((first, 1200), (second, 1100), (third, 600), (fourth, 1536)):
        assert request.prompt_tokens == length == tokenizer.count(request.prompt)

    def shared(one: str, other: str) -> int:
        pairs = zip(one.split(), other.split(), strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), 10**9)

    # Two blocks, and perhaps a word by chance; the rest is another block.
    assert 1024 <= shared(first.prompt, second.prompt) < 1030
    assert shared(first.prompt, third.prompt) < 6
    assert shared(first.prompt, fourth.prompt) >= 1190
    assert [r.prompt for r in trace(path, tokenizer, seed=4)][1] == second.prompt
    assert next(trace(path, tokenizer, seed=5)).prompt != first.prompt


def test_a_trace_can_be_replayed_faster(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace.jsonl",
        [
            {"at": 14.0, "prompt": "the second", "max_tokens": 3},
            {"at": 10.0, "prompt": "the first", "max_tokens": 2},
            {"at": 12.0, "messages": [{"role": "user", "content": "much " * 50}], "max_tokens": 1},
        ],
    )
    requests = list(trace(path, Words(), speed=2.0))
    assert [(r.at, r.prompt, r.prompt_tokens) for r in requests] == [
        (0.0, "the first", 3),
        (1.0, "much " * 50, 51),
        (2.0, "the second", 3),
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_length": 3, "output_length": 1}, "timestamp"),
        ({"timestamp": "x", "input_length": 3, "output_length": 1}, "not a number"),
        ({"timestamp": 1, "input_length": 3}, "whole numbers"),
        ({"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": ["a"]}, "hash_ids"),
        ({"at": 1, "max_tokens": 1}, "neither input_length"),
        ({"at": 1, "prompt": "x"}, "max_tokens"),
    ],
)
def test_a_line_of_neither_form_is_named(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    good = {"at": 0, "prompt": "x", "max_tokens": 1}
    path = write_trace(tmp_path / "trace.jsonl", [good, row])
    with pytest.raises(ConfigError, match=f"line 2 .*{why}"):
        trace(path, Words())
