"""Thinking budgets on a real engine: the answer is that to a prompt with the closed reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.tools.checkpoints import make_llama
from tests.unit.llm.conftest import LIMITS
from tgi_cli import LLM, Completion, SamplingParams, demo

OPEN, CLOSE = 4096, 4097
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n{# </think> #}"
)
CHATS = [[{"role": "user", "content": f"What is {n}?"}] for n in ("json", "a path", "os")]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinking")
    make_llama(path, vocab_size=4098, tokenizer=demo.model_path())
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    assert [backend.token_to_id(t) for t in ("<think>", "</think>")] == [OPEN, CLOSE]
    backend.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **LIMITS) as llm:
        yield llm


def begun(completion: Completion, tokens: int) -> list[int]:
    """The prompt with the reasoning up to the cut, and the closing marker."""
    return [*completion.prompt_ids, *completion.token_ids[:tokens], CLOSE]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SAMPLED])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_answer_is_that_to_the_closed_reasoning(
    thinker: LLM, tokens: int, params: SamplingParams
) -> None:
    found = thinker.chat(
        CHATS, params, thinking_token_budget=tokens, max_new_tokens=24, ignore_eos=True
    )
    free = thinker.chat(CHATS, params, max_new_tokens=24, ignore_eos=True)
    for each, other in zip(found, free, strict=True):
        assert each.token_ids[:tokens] == other.token_ids[:tokens]
        assert (each.token_ids[tokens], each.logprobs[tokens]) == (CLOSE, 0.0)
        assert each.text.count("</think>") == 1
    if params is not SAMPLED:  # a seed's numbers depend on the position behind the prompt
        answers = thinker.generate(
            [begun(each, tokens) for each in found],
            max_new_tokens=23 - tokens,
            ignore_eos=True,
        )
        for each, answer in zip(found, answers, strict=True):
            assert each.token_ids[tokens + 1 :] == answer.token_ids
            assert each.logprobs[tokens + 1 :] == pytest.approx(answer.logprobs, abs=1e-4)


def test_budgets_hold_in_any_batch(folder: Path) -> None:
    """Of many requests with and without one, under preemption, with samples and a grammar."""
    grammar = {"type": "regex", "value": "[a-z]+"}

    def run(llm: LLM, chats: Sequence[object]) -> list[list[list[int]]]:
        each = []
        for tokens in (None, 0, 5, 20):
            done = llm.chat(
                chats,  # type: ignore[arg-type]
                SAMPLED,
                thinking_token_budget=tokens,
                max_new_tokens=40,
                n=3,
                ignore_eos=True,
            )
            each.append([completion.token_ids for completion in done])
        return each

    with LLM(folder, **LIMITS) as large:
        expected = run(large, CHATS)
        bound = large.generate("x", grammar=grammar, thinking_token_budget=5, max_new_tokens=9)
        assert re.fullmatch("[a-z]+", bound[0].text), "the model has opened no reasoning"
    small = LIMITS | {"max_batch_total_tokens": 160, "max_batch_prefill_tokens": 16}
    with LLM(folder, **small) as llm:
        assert run(llm, CHATS) == expected
    assert len(expected[2]) == 9
    assert all(CLOSE in tokens[:6] for tokens in expected[2])


@pytest.mark.slow
def test_two_shards_force_the_same_tokens(thinker: LLM, folder: Path) -> None:
    def run(llm: LLM, tokens: int) -> list[list[int]]:
        options = {"max_new_tokens": 12, "n": 2, "ignore_eos": True}
        done = llm.chat(CHATS, thinking_token_budget=tokens, **options)  # type: ignore[arg-type]
        return [completion.token_ids for completion in done]

    with LLM(folder, **LIMITS, num_shard=2) as sharded:
        for tokens in (0, 5):
            assert run(sharded, tokens) == run(thinker, tokens)


def test_reasoning_in_a_prompt_of_ids_counts(thinker: LLM) -> None:
    turn = thinker.tokenizer.encode("<|im_start|>", False)[0]
    prompts = [[5, OPEN, 6], [5, OPEN, 6, CLOSE, 7], [OPEN, 6, turn, 7]]
    inside, *outside = thinker.generate(
        prompts, thinking_token_budget=2, max_new_tokens=8, ignore_eos=True
    )
    assert inside.token_ids[2] == CLOSE
    assert all(CLOSE not in completion.token_ids for completion in outside)


def test_a_stream_has_a_budget(thinker: LLM) -> None:
    with thinker.stream_chat(CHATS[0], thinking_token_budget=3, max_new_tokens=8) as stream:
        text = "".join(piece.text for piece in stream)
    assert "</think>" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thinking_token_budget": -1}, "0 or positive"),
        ({"thinking_token_budget": 1, "return_generation_logits": True}, "have no logits"),
    ],
)
def test_invalid_budgets_are_refused(thinker: LLM, options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        thinker.generate("x", **options)  # type: ignore[arg-type]


def test_a_model_without_marked_reasoning_has_no_budgets(llm: LLM) -> None:
    with pytest.raises(ValueError, match="not marked"):
        llm.generate("x", thinking_token_budget=1)
