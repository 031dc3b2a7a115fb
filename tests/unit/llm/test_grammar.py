"""What callers of the Python API may say that a text must be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pytest

from tests.unit.llm.conftest import LIMITS
from tgi_cli import LLM, GenerationError, SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["one of them", "another"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TGI = {"type": "json", "value": SCHEMA}
PROMPTS = ["def read_json(path):", "The function returns"]


@pytest.mark.parametrize("form", [OPENAI, TGI])
def test_texts_are_valid_for_their_schema(llm: LLM, form: dict[str, Any]) -> None:
    for completion in llm.generate(
        PROMPTS, SamplingParams(seed=5), grammar=form, n=3, max_new_tokens=100
    ):
        jsonschema.validate(json.loads(completion.text), SCHEMA)
        assert completion.finish_reason == "eos_token"
        assert completion.token_ids[-1] in llm.info.eos_token_ids
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.logprobs.count(0.0) > 3, "what is fixed is not computed"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"type": "regex", "value": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"type": "grammar", "grammar": 'start: "yes" | "no" | "ja" start'}, "(ja)*(yes|no)"),
        (llguidance.grammar_from("regex", "(left|right){2}"), "(left|right){2}"),
    ],
)
def test_other_forms_of_a_grammar(llm: LLM, grammar: Any, pattern: str) -> None:
    for seed in range(4):
        (completion,) = llm.generate(
            "x", SamplingParams(seed=seed), grammar=grammar, max_new_tokens=60
        )
        if completion.finish_reason == "eos_token":
            assert re.fullmatch(pattern, completion.text)


def test_a_grammar_does_not_change_a_text_that_matches_it() -> None:
    grammar = {"type": "regex", "value": r"(?s:.)*"}
    with LLM(**LIMITS) as trained:
        free = trained.generate(PROMPTS, max_new_tokens=30)
        bound = trained.generate(PROMPTS, max_new_tokens=30, grammar=grammar)
    for one, other in zip(free, bound, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_stream_has_the_same_text(llm: LLM) -> None:
    (whole,) = llm.generate("x", SamplingParams(seed=2), grammar=OPENAI, max_new_tokens=100)
    pieces = list(llm.stream("x", SamplingParams(seed=2), grammar=OPENAI, max_new_tokens=100))
    assert "".join(piece.text for piece in pieces) == whole.text


def test_penalties_and_biases_apply_to_allowed_tokens(llm: LLM) -> None:
    nine = llm.tokenizer.encode("9", add_special_tokens=False)[0]
    params = SamplingParams(temperature=0.0, logit_bias=((nine, 100.0),))
    grammar = {"type": "regex", "value": "[0-9]{6}"}
    assert llm.generate("x", params, grammar=grammar)[0].text == "999999"
    params = SamplingParams(temperature=0.0, logit_bias=((nine, 100.0),), bad_words=((nine,),))
    (completion,) = llm.generate("x", params, grammar=grammar)
    assert re.fullmatch("[0-9]{6}", completion.text)
    assert nine not in completion.token_ids


def test_a_grammar_chooses_among_allowed_tokens(llm: LLM) -> None:
    ends = llm.info.eos_token_ids
    nine = llm.tokenizer.encode("9", add_special_tokens=False)[0]
    params = SamplingParams(temperature=0.0, allowed_token_ids=(nine, *ends))
    grammar = {"type": "regex", "value": "[0-9]{5}"}
    assert llm.generate("x", params, grammar=grammar)[0].text == "99999"
    (completion,) = llm.generate("x", params, grammar={"type": "regex", "value": "9"})
    assert completion.text == "9"


def test_forced_tokens_must_be_allowed(llm: LLM) -> None:
    first, *others = llm.tokenizer.encode('{"name": 1}', add_special_tokens=False)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(first,))
    assert first not in others
    with pytest.raises(GenerationError, match="no token that may be chosen") as failed:
        llm.generate("x", params, grammar={"type": "regex", "value": re.escape('{"name": 1}')})
    assert set(failed.value.completions[0].token_ids) <= {first}


def test_unsupported_parts_are_named_before_submission(llm: LLM) -> None:
    with pytest.raises(ValueError, match="`type` must be"):
        llm.generate("x", grammar={"type": "poem"})
    with pytest.raises(ValueError, match="not"):
        llm.generate("x", grammar={"type": "json", "value": {"properties": {}, "not": {}}})


def test_an_invalid_grammar_fails_its_requests(llm: LLM) -> None:
    with pytest.raises(GenerationError, match="invalid grammar"):
        llm.generate("x", grammar="nonsense")


def test_shards_generate_the_text_of_one_process(make_llm: Callable[..., LLM], llm: LLM) -> None:
    """Tokens that no step chose must reach every shard's rows."""
    expected = llm.generate(PROMPTS, grammar=OPENAI, max_new_tokens=100)
    with make_llm(num_shard=2) as two:
        sharded = two.generate(PROMPTS, grammar=OPENAI, max_new_tokens=100)
    assert [c.text for c in sharded] == [c.text for c in expected]
