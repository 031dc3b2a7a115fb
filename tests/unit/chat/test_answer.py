"""The line below an answer."""

from __future__ import annotations

import pytest

from tgi_cli.chat.answer import SHORTEST_RATED, ReceivedAnswer
from tgi_cli.chat.stream_parser import ChatUsage


@pytest.mark.parametrize(
    ("tokens", "seconds", "rate"),
    [
        (41, 2.0, " · 20.0 tokens/s"),
        (41, SHORTEST_RATED, " · 400.0 tokens/s"),
        (41, SHORTEST_RATED / 2, ""),
        (41, 0.0, ""),
        (1, 0.0, ""),
    ],
)
def test_a_rate_needs_time_to_be_measured(tokens: int, seconds: float, rate: str) -> None:
    usage = ChatUsage(prompt_tokens=61, completion_tokens=tokens, cached_tokens=48)
    answer = ReceivedAnswer("text", usage=usage, began=-0.5, first=0.0, last=seconds)
    said = f"{tokens} token{'s' * (tokens > 1)}{rate} · first after 0.50 s"
    assert answer.summary() == f"{said} · prompt 61, 48 of them cached"


def test_without_usage_the_time_is_told() -> None:
    answer = ReceivedAnswer("text", began=0.0, first=0.5, last=2.5)
    assert answer.summary() == "2.5 s, first after 0.50 s"
