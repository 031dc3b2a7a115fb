"""The Python API against transformers, in fp32: greedy with forks, and beam search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tools.checkpoints import make_llama
from tgi_cli import LLM, demo
from tgi_cli.llm.beam import EarlyStopping

NEW = 14


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_llama(
        path,
        seed=5,
        dtype=torch.float32,
        max_position_embeddings=256,
        tokenizer=demo.model_path(),
    )


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        checkpoint,
        dtype="float32",
        max_total_tokens=160,
        max_batch_prefill_tokens=48,
        max_batch_total_tokens=4096,
        max_batch_size=16,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    model: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random_ = random.Random(2)
    return [[random_.randrange(3, 250) for _ in range(length)] for length in (1, 16, 61)]


def transformers_generate(model: Any, prompt: list[int], **options: Any) -> Any:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )


def test_greedy_and_its_forks(llm: LLM, model: Any, prompts: list[list[int]]) -> None:
    completions = llm.generate(prompts, n=3, max_new_tokens=NEW)
    assert len(completions) == 3 * len(prompts)
    for place, prompt in enumerate(prompts):
        out = transformers_generate(model, prompt, output_logits=True)
        expected = out.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(out.logits)
        logprobs = torch.log_softmax(logits, -1)[range(len(expected)), expected]
        for index, completion in enumerate(completions[3 * place : 3 * place + 3]):
            assert (completion.prompt_index, completion.index) == (place, index)
            assert completion.token_ids == expected
            assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)


# Likely stop ids, so that hypotheses end at different lengths.
@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty", "ends"),
    [
        (4, False, 1.0, ()),
        (3, "never", -1.0, ()),
        (2, False, 1.0, (17,)),
        (4, "never", 1.0, (17,)),
        (1, False, 1.0, (17, 101)),
        (2, False, 1.0, (17, 101)),
        (4, False, 1.0, (17, 101)),
        (8, False, 1.0, (17, 101)),
        (4, True, 1.0, (17, 101)),
        (4, "never", 1.0, (17, 101)),
        (4, False, 0.0, (17, 101)),
        (4, "never", 2.0, (17, 101)),
        (3, "never", -1.0, (17, 101)),
    ],
)
def test_beam_search(
    llm: LLM,
    model: Any,
    prompts: list[list[int]],
    width: int,
    early_stopping: EarlyStopping,
    length_penalty: float,
    ends: tuple[int, ...],
) -> None:
    found = llm.beam_search(
        prompts,
        width,
        NEW,
        early_stopping=early_stopping,
        length_penalty=length_penalty,
        stop_token_ids=ends,
        ignore_eos=True,
    )
    for prompt, hypotheses in zip(prompts, found, strict=True):
        options: dict[str, Any] = {"num_beams": width, "num_return_sequences": width}
        if width > 1:
            options |= {"early_stopping": early_stopping, "length_penalty": length_penalty}
        out = transformers_generate(model, prompt, eos_token_id=list(ends) or None, **options)
        assert len(hypotheses) == width
        for place, hypothesis in enumerate(hypotheses):
            expected = out.sequences[place, len(prompt) :].tolist()
            length = len(hypothesis.token_ids)
            assert hypothesis.token_ids == expected[:length]
            assert not any(expected[length:]), "what follows is padding"
            ended = hypothesis.token_ids[-1] in ends
            assert hypothesis.finish_reason == ("eos_token" if ended else "length")
            total = hypothesis.cumulative_logprob
            assert hypothesis.score == pytest.approx(total / length**length_penalty)
            if width > 1:
                assert hypothesis.score == pytest.approx(
                    float(out.sequences_scores[place]), rel=1e-6, abs=1e-4
                )


def test_hypotheses_of_the_test_above_end_at_stop_ids(llm: LLM, prompts: list[list[int]]) -> None:
    found = llm.beam_search(prompts, 4, NEW, stop_token_ids=(17, 101))
    reasons = [hypothesis.finish_reason for search in found for hypothesis in search]
    assert set(reasons) == {"eos_token", "length"}
