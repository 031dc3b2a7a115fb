"""Markers of reasoning: its tokens are counted however the text is split into them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.unit.text import tiny
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.text.formats.detect import compose
from tgi_cli.text.formats.reasoning import REASONING_FORMATS
from tgi_cli.text.reasoning import AnswerMarkers, ReasoningCounter
from tgi_cli.text.tokenizer import Tokenizer

THINK = AnswerMarkers("<think>", "</think>")


def count(*tokens: str, inside: bool = False) -> int:
    counter = ReasoningCounter(THINK, inside)
    for token in tokens:
        counter.push(token)
    return counter.tokens


@pytest.mark.parametrize(
    ("tokens", "inside", "expected"),
    [
        (["a", "b"], False, 0),
        (["a", "b"], True, 2),
        (["<think>", "a", "b", "</think>", "c"], False, 2),
        (["<think>", "a", "", "b", "</think>", "c"], False, 3),
        (["<", "think", ">\n", "a", "b", "</", "think", ">\n\n", "c"], False, 2),
        (["a", ".</", "think", ">"], True, 1),
        (["a", "</", "thin", "g", "</think>"], True, 4),
        (["<think>", "</think>", "<think>", "a", "</think>", "b"], False, 1),
        (["</think>", "a"], False, 0),
        (["<think>"], True, 1),
        (["<think", "<think>", "a"], False, 1),
        (["<think>", "a", "b", "</think>", "<think></th", "ink>", "c"], False, 2),
    ],
)
def test_tokens_between_the_markers_count(tokens: list[str], inside: bool, expected: int) -> None:
    assert count(*tokens, inside=inside) == expected


@given(st.lists(st.integers(1, 12), max_size=60))
def test_the_count_follows_from_where_tokens_begin_and_end(sizes: list[int]) -> None:
    text = "so <thin <think>one < two </ three</think> four <think>five</thin"
    tokens, place, expected = [], 0, 0
    for size in sizes:
        token = text[place : place + size]
        begin, place = place, place + size
        if not token:
            break
        tokens.append(token)
        outside = [(0, text.index("one")), (text.index("</think>"), text.index("five"))]
        ends = [begin, begin + len(token)]
        expected += not any(ends[0] < stop and ends[1] > start for start, stop in outside)
    # An unfinished marker is reasoning until the text that completes it.
    shown = "".join(tokens)
    if text.index("</think>") < len(shown) < text.index(" four"):
        return
    assert count(*tokens) == expected


def test_the_markers_of_the_known_formats() -> None:
    def markers(name: str) -> AnswerMarkers:
        template = compose(None, REASONING_FORMATS[name])
        assert template is not None
        return AnswerMarkers.of(template)

    assert markers("think") == THINK
    assert markers("mistral") == AnswerMarkers("[THINK]", "[/THINK]")
    harmony = markers("harmony")
    assert (harmony.close, harmony.turn) == ("<|end|>", "<|start|>assistant")
    before = harmony.before(False)
    assert before is not None
    assert before["close"] == "<|end|><|start|>assistant"


def test_a_text_is_open_behind_the_last_opening_marker() -> None:
    assert THINK.is_open("a<think>b")
    assert not THINK.is_open("a<think>b</think>c")
    assert THINK.is_open("<think>b</think>c<think>")
    assert not AnswerMarkers().is_open("<think>")


def tokenizer(*added: str) -> Tokenizer:
    backend = tiny.byte_level()
    backend.add_tokens([AddedToken(text) for text in added])
    return Tokenizer(backend)


def test_a_budget_has_the_tokens_of_the_markers() -> None:
    known = tokenizer("<think>", "</think>")
    opening, close = (known.encode(text, False) for text in ("<think>", "</think>"))
    assert len(opening) == len(close) == 1
    assert THINK.budget(3, True, known) == ThinkingBudget(
        tokens=3, open=tuple(opening), close=tuple(close), inside=True
    )


def test_markers_of_plain_text_have_no_budget() -> None:
    with pytest.raises(ValueError, match="'<think>' as plain text"):
        THINK.budget(3, True, tokenizer("</think>"))
    with pytest.raises(ValueError, match="not marked"):
        AnswerMarkers().budget(3, False, tokenizer())
