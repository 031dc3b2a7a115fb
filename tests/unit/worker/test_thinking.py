"""Thinking budgets in front of real grammars: what follows the forced marker obeys the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jsonschema
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.unit.engine.fake_worker import FakeWorker
from tests.unit.engine.test_core import running
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli import demo
from tgi_cli.engine.messages import FinishReason
from tgi_cli.text.grammar.checker import token_setup
from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import Grammar, parse_response_format, parse_structural_tag
from tgi_cli.text.grammar.tokens import SpecialTokens
from tgi_cli.text.reasoning import AnswerMarkers
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.worker.grammar import LLGuidance

EOS = (2, 0)
VOCAB = 4103
ADDED = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<call>")
THINK = AnswerMarkers("<think>", "</think>")
TURNS = AnswerMarkers("<|channel|><|message|>", "<|end|>", "<|start|>", "<|channel|><call>")
"""As harmony's: reasoning has turns of its own, and the content is marked."""
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"]}
JSON = parse_response_format(
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
)
LONGEST_CHARACTER = 4
"""Bytes, each of which may be a token: the marker waits for the end of a character."""


class Model(NamedTuple):
    tokenizer: Tokenizer
    compiler: LLGuidance

    def compile(self, grammar: Grammar | None) -> str:
        assert grammar is not None
        tokens = SpecialTokens(**token_setup(self.tokenizer, EOS))
        return Compiler(tokens).compile(grammar.form)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in EOS], skip_special_tokens=False)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    backend = Backend.from_file(str(demo.model_path() / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=True) for text in ADDED])
    compiler = LLGuidance(backend.to_str(), VOCAB, EOS)
    yield Model(Tokenizer(backend), compiler)
    compiler.close()


def answers(
    model: Model,
    grammar: Grammar | None,
    markers: AnswerMarkers,
    inside: bool,
    tokens: int,
    **more: Any,
) -> list[list[int]]:
    """What a model that knows nothing says with a budget, through the engine."""
    compiled, budget = model.compile(grammar), markers.budget(tokens, inside, model.tokenizer)
    bounds = limits(max_total_tokens=512, block_size=16, num_blocks=300)
    with running(
        FakeWorker(16, vocab_size=VOCAB), bounds, more.get("depth", 0), model.compiler
    ) as client:
        for i in range(12):
            asked = request(i, [i + 3, 5], 200, grammar=compiled, stop_token_ids=frozenset(EOS))
            client.core.inbox.put(replace(asked, thinking=budget))
        client.read_until_finished(*range(12))
    assert {reason for reason, _ in client.finished.values()} == {FinishReason.EOS_TOKEN}
    return [client.tokens[i] for i in range(12)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 40])
def test_a_schema_holds_behind_reasoning_that_is_cut(model: Model, tokens: int, depth: int) -> None:
    assert JSON is not None
    grammar = JSON.behind(THINK.before(True))
    close = model.tokenizer.encode("</think>", False)
    for ids in answers(model, grammar, THINK, True, tokens, depth=depth):
        thought = ids.index(close[0])
        assert thought < tokens + LONGEST_CHARACTER
        jsonschema.validate(json.loads(model.text(ids[thought + 1 :])), SCHEMA)


@pytest.mark.parametrize("tokens", [0, 5])
def test_an_answer_that_is_a_turn_of_its_own_follows_reasoning_that_is_cut(
    model: Model, tokens: int
) -> None:
    assert JSON is not None
    grammar = JSON.behind(TURNS.before(False))
    for ids in answers(model, grammar, TURNS, False, tokens):
        *thoughts, answer = model.text(ids).split(TURNS.then)
        jsonschema.validate(json.loads(answer), SCHEMA)
        for thought in "".join(thoughts).split(TURNS.open)[1:]:
            reasoning, end, turn = thought.partition(TURNS.close)
            assert (end, turn.strip()) == (TURNS.close, TURNS.turn)
            assert len(model.tokenizer.encode(reasoning, False)) <= tokens + LONGEST_CHARACTER


def test_a_marker_is_not_allowed_within_a_character_or_a_call(model: Model) -> None:
    close = model.tokenizer.encode("</think>", False)
    assert JSON is not None
    matcher = model.compiler.compile(model.compile(JSON.behind(THINK.before(True)))).result(20)
    assert matcher.allows(close)
    *begun, last = model.tokenizer.encode("深", False)
    assert begun
    for token_id in begun:
        assert matcher.accept(token_id)
        assert not matcher.allows(close)
    assert matcher.accept(last)
    assert matcher.allows(close), "nothing was accepted"

    tag = {
        "triggers": ["<call>"],
        "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "!"}],
    }
    calls = model.compiler.compile(model.compile(parse_structural_tag(tag))).result(20)
    for token_id in model.tokenizer.encode('so<call>{"kind": ', False):
        assert calls.allows(close) == (token_id in model.tokenizer.encode("so<call>", False))
        assert calls.accept(token_id)
    for token_id in model.tokenizer.encode('"a"}!', False):
        assert not calls.allows(close)
        assert calls.accept(token_id)
    assert calls.allows(close)
