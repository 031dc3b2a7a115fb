"""llguidance over real tokenizers: whatever is chosen among what it allows, the text is right."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.unit.engine.fake_worker import FakeWorker
from tests.unit.engine.test_core import running
from tests.unit.engine.test_scheduler import GREEDY, limits, request
from tests.unit.text import tiny
from tgi_cli import demo
from tgi_cli.engine.messages import FinishReason
from tgi_cli.engine.step import GrammarMatcher
from tgi_cli.text.tokenizer import Tokenizer as TextTokenizer
from tgi_cli.worker.grammar import (
    MAX_COMPILED,
    LLGuidance,
    Matcher,
    load_grammars,
    read_tokenizer,
)

EOS = (2, 0)
VOCAB = 4096
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "colour": {"enum": ["red", "green", "blue", "rather green"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
            "required": ["street"],
            "additionalProperties": False,
        },
        "married": {"type": ["boolean", "null"]},
    },
    "required": ["name", "born", "address", "married"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"anyOf": [{"const": "a b"}, {"type": "boolean"}]}, "maxItems": 4},
    {"type": "string", "maxLength": 20, "minLength": 3},
    {"const": {"everything": ["is", {"fixed": "Grüße, 深層 🤗"}]}},
]
OF_TEXT = {
    "date": ("regex", r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"),
    "words": ("regex", r"(quick|quiet|brown) (fox|föx)( runs){0,3}\."),
    "bytes": ("regex", r"[äöü深🤗]{1,4}"),
    "sum": ("lark", "start: number (SIGN number){1,3}\nnumber: /[1-9][0-9]{0,2}/\nSIGN: /[+*-]/"),
}
"""Each with the regular expression that its texts match in full."""
MATCHES = {"sum": r"[1-9][0-9]{0,2}([+*-][1-9][0-9]{0,2}){1,3}"}


@pytest.fixture(scope="module")
def compiler() -> Any:
    made = load_grammars(demo.model_path(), VOCAB, EOS)
    assert made is not None
    yield made
    made.close()


def grammar(kind: Any, text: Any) -> str:
    return llguidance.grammar_from(kind, text if isinstance(text, str) else json.dumps(text))


def matcher_of(compiler: LLGuidance, text: str) -> Matcher:
    matcher = compiler.compile(text).result(20)
    assert isinstance(matcher, Matcher)
    return matcher


def allowed(
    compiler: LLGuidance,
    *matchers: GrammarMatcher,
    drafts: Sequence[Sequence[int]] | None = None,
) -> list[set[int]]:
    bits = compiler.fill(matchers, drafts)
    rows = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def answers(
    compiler: LLGuidance, text: str, count: int, new: int, jumps: bool = True, depth: int = 0
) -> list[list[int]]:
    """What a model that knows nothing says under a grammar, through the engine.

    Without ``jumps`` the requests have bad words, and who has those gets to see every token.
    """
    worker = FakeWorker(16, vocab_size=VOCAB)
    bounds = limits(max_total_tokens=512, block_size=16, num_blocks=300)
    sampling = GREEDY if jumps else replace(GREEDY, bad_words=((1, 1, 1),))
    with running(worker, bounds, depth, compiler) as client:
        for i in range(count):
            stops = frozenset(EOS)
            asked = request(i, [i + 3, 5], new, grammar=text, stop_token_ids=stops)
            client.core.inbox.put(replace(asked, sampling=sampling))
        client.read_until_finished(*range(count))
    assert {reason for reason, _ in client.finished.values()} == {FinishReason.EOS_TOKEN}
    return [client.tokens[i] for i in range(count)]


def decoded(ids: Sequence[int]) -> str:
    return Tokenizer.from_file(str(demo.model_path() / "tokenizer.json")).decode(
        [i for i in ids if i not in EOS], skip_special_tokens=False
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema.get("type", "const")))
def test_whatever_is_sampled_under_a_schema_is_json_that_it_describes(
    compiler: LLGuidance, schema: dict[str, Any], depth: int
) -> None:
    for ids in answers(compiler, grammar("json_schema", schema | COMPACT), 12, 400, depth=depth):
        jsonschema.validate(json.loads(decoded(ids)), schema)


@pytest.mark.parametrize("name", OF_TEXT)
def test_whatever_is_sampled_under_an_expression_matches_it(
    compiler: LLGuidance, name: str
) -> None:
    kind, text = OF_TEXT[name]
    for ids in answers(compiler, grammar(kind, text), 12, 100):
        assert re.fullmatch(MATCHES.get(name, text), decoded(ids)), decoded(ids)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema.get("type", "const")))
def test_forced_tokens_are_those_that_a_constrained_model_would_choose(
    compiler: LLGuidance, schema: dict[str, Any]
) -> None:
    text = grammar("json_schema", schema | COMPACT)
    with_jumps = answers(compiler, text, 6, 400)
    without = answers(compiler, text, 6, 400, jumps=False)
    assert [[i for i in ids if i not in EOS] for ids in with_jumps] == without


def test_forced_tokens_are_those_of_the_tokenizer(compiler: LLGuidance) -> None:
    matcher = matcher_of(compiler, grammar("regex", r"The function returns (one|two)"))
    assert allowed(compiler, matcher) == [set(matcher.forced()[:1])]
    tokenizer = Tokenizer.from_file(str(demo.model_path() / "tokenizer.json"))
    whole = tokenizer.encode("The function returns one").ids
    assert matcher.forced() == whole[: len(matcher.forced())]
    assert len(matcher.forced()) > 2


def test_the_end_is_allowed_where_the_text_may_end_and_forced_where_it_must(
    compiler: LLGuidance,
) -> None:
    open_end = matcher_of(compiler, grammar("regex", "[0-9]+"))
    assert not allowed(compiler, open_end)[0] & set(EOS)
    digit = next(iter(allowed(compiler, open_end)[0]))
    assert open_end.accept(digit)
    assert allowed(compiler, open_end)[0] >= set(EOS)
    assert not open_end.stopped
    assert open_end.accept(EOS[0])
    assert open_end.stopped
    closed = matcher_of(compiler, grammar("regex", "[0-9]"))
    assert closed.accept(allowed(compiler, closed)[0].pop())
    assert closed.stopped
    assert not closed.error


def test_a_token_that_is_not_allowed_is_an_error_in_one_line(compiler: LLGuidance) -> None:
    matcher = matcher_of(compiler, grammar("regex", "[0-9]+"))
    assert not matcher.accept(EOS[0])
    assert matcher.error
    assert "\n" not in matcher.error
    assert not matcher.stopped
    assert not matcher.accept(25)


@pytest.mark.parametrize("others", [0, 20])
def test_a_dead_end_allows_no_token_and_reports_an_error(compiler: LLGuidance, others: int) -> None:
    """Also where masks are filled by several threads."""
    dead = matcher_of(compiler, grammar("lark", 'start: "x" | "a" Y\nY: /q/ & ~/q/'))
    (a,) = [i for i in allowed(compiler, dead)[0] if decoded([i]) == "a"]
    assert dead.accept(a)
    good = [matcher_of(compiler, grammar("regex", "[0-9]+")) for _ in range(others)]
    masks = allowed(compiler, *good, dead)
    assert masks[-1] == set()
    assert all(mask == masks[0] != set() for mask in masks[:-1])
    assert dead.error == "no token of the vocabulary may come next"


@pytest.mark.parametrize("count", [1, 3, 8, 33])
def test_each_mask_is_that_of_its_matcher_however_many_are_filled(
    compiler: LLGuidance, count: int
) -> None:
    texts = [grammar("regex", f"{'ab' * (i % 5)}[0-9]{{{i + 1}}}") for i in range(count)]
    matchers = [matcher_of(compiler, text) for text in texts]
    together = allowed(compiler, *matchers)
    assert together == [allowed(compiler, matcher)[0] for matcher in matchers]


def test_masks_behind_drafts_are_those_of_matchers_that_accepted_them(
    compiler: LLGuidance,
) -> None:
    """Of rows with drafts and without, in one call; behind a forbidden draft, all are allowed."""
    text = grammar("regex", "([a-m]x){60}")
    walk = matcher_of(compiler, text)
    path: list[int] = []
    expected = allowed(compiler, walk)
    for _ in range(3):
        path.append(max(expected[-1]))
        assert walk.accept(path[-1])
        expected += allowed(compiler, walk)
    assert len(set(map(frozenset, expected))) > 1
    everything = set(range(VOCAB))
    wrong = min(everything - expected[1])
    matchers = [matcher_of(compiler, text) for _ in range(3)]
    drafts = [path, [], [path[0], wrong, path[1]]]
    found = allowed(compiler, *matchers, drafts=drafts)
    assert found == [*expected, expected[0], *expected[:2], everything, everything]
    assert allowed(compiler, *matchers) == [expected[0]] * 3, "no draft was accepted"
    assert [matchers[0].num_allowed(each) for each in drafts] == [3, 0, 1]


def test_requests_with_one_grammar_share_its_compilation_and_nothing_else(
    compiler: LLGuidance,
) -> None:
    text = grammar("regex", "[a-f]{3}unique")
    one, two = matcher_of(compiler, text), matcher_of(compiler, text)
    letter = min(allowed(compiler, one)[0])
    before = allowed(compiler, two)
    assert one.accept(letter)
    assert allowed(compiler, two) == before
    assert compiler.compile(text).done(), "what is compiled is there at once"


def test_the_number_of_cached_grammars_is_limited(compiler: LLGuidance) -> None:
    for i in range(MAX_COMPILED + 5):
        compiler.compile(grammar("regex", f"number {i}")).result(20)
    assert len(compiler.compiled) == MAX_COMPILED


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (grammar("json_schema", {"type": "object", "not": {}}), "not"),
        (grammar("lark", "start: nowhere"), "nowhere"),
        (grammar("regex", "(a"), ""),
        ("nonsense", ""),
        ("{}", ""),
    ],
)
def test_errors_of_a_grammar_are_reported(compiler: LLGuidance, text: str, cause: str) -> None:
    for _ in range(2):
        error = compiler.compile(text).exception(20)
        assert isinstance(error, ValueError)
        assert str(error)
        assert cause in str(error)


@pytest.mark.parametrize("vocab_size", [VOCAB - 96, VOCAB, VOCAB + 1, VOCAB + 904])
def test_masks_are_as_wide_as_the_logits(vocab_size: int) -> None:
    """Which may be wider than the tokenizer, where a model's rows were padded, or narrower."""
    made = load_grammars(demo.model_path(), vocab_size, (2, 0, 10**6))
    assert made is not None
    assert made.eos_token_ids == (2, 0)
    matcher = matcher_of(made, grammar("regex", "(?s:.)*"))
    bits = made.fill([matcher])
    assert bits.shape == (1, -(-vocab_size // 32))
    assert bits.dtype == np.int32
    mask = allowed(made, matcher)[0]
    assert len(mask) > 3500
    assert max(mask) < VOCAB
    made.close()


def test_without_a_stop_id_that_the_tokenizer_knows_its_own_ends_the_text() -> None:
    made = load_grammars(demo.model_path(), VOCAB, (10**6,))
    assert made is not None
    assert len(made.eos_token_ids) == 1
    made.close()


def test_bytes_that_make_up_a_character_are_chosen_one_by_one() -> None:
    """A vocabulary with byte fallback, in which most characters have no token of their own."""
    backend = tiny.byte_fallback()
    made = LLGuidance(backend.to_str(), backend.get_vocab_size(), (2,))
    random_ = random.Random(1)
    for _ in range(20):
        matcher = matcher_of(made, grammar("regex", "[äé深🤗]{3}"))
        ids: list[int] = []
        while not matcher.stopped:
            ids.append(random_.choice(sorted(allowed(made, matcher)[0])))
            assert matcher.accept(ids[-1])
        assert re.fullmatch("[äé深🤗]{3}", backend.decode(ids))
    made.close()


def test_tokens_that_only_the_configuration_lists_can_be_named(tmp_path: Path) -> None:
    tiny.write_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    number = tiny.byte_level().get_vocab_size()
    config["added_tokens_decoder"] = {str(number): {"content": "<|tool|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = load_grammars(tmp_path, number + 10, (1,))
    assert made is not None
    matcher = matcher_of(made, grammar("lark", 'start: <|tool|> "a"'))
    assert allowed(made, matcher) == [{number}]
    text = TextTokenizer.load(tmp_path).backend
    assert text.token_to_id("<|tool|>") == number
    made.close()


def test_a_folder_without_a_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    backend = tiny.byte_level()
    backend.model.save(str(tmp_path))
    kind = {"tokenizer_class": "GPT2Tokenizer", "eos_token": tiny.EOS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(kind))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    read = Tokenizer.from_str(read_tokenizer(tmp_path))
    assert read.encode("the fox").ids == backend.encode("the fox", add_special_tokens=False).ids
    made = load_grammars(tmp_path, 500, (1,))
    assert made is not None
    made.close()


def test_a_model_without_a_usable_tokenizer_runs_without_grammars(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_grammars(tmp_path, 100, (1,)) is None
    assert "grammars are unavailable" in caplog.text


def test_a_vocabulary_that_llguidance_cannot_read_turns_grammars_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token of so many bytes is beyond its tables."""
    backend = Tokenizer(models.BPE(unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_tokens(["a", "a" * 5000])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_grammars(tmp_path, 100, (0,)) is None
    assert "grammars are unavailable" in caplog.text
