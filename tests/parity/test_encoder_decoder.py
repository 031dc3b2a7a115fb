"""Encoder-decoder models through the engine: transformers' greedy tokens, however it schedules.

Each answer is compared with transformers' ``generate`` of the prompt alone, with the tokens that
the generation config forces.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.seq2seq import (
    CONFIGS,
    LENGTHS,
    NEW,
    NUM_BLOCKS,
    Oracle,
    engine,
    load,
    make,
    prompts,
    request,
    survey,
)
from tgi_cli.config import EngineConfig
from tgi_cli.engine.config import Batching
from tgi_cli.engine.messages import FinishReason
from tgi_cli.errors import TgiError
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.worker import ModelWorker

BART, T5 = "BartForConditionalGeneration", "T5ForConditionalGeneration"


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_each_class_generates_what_transformers_does(name: str, tmp_path: Path) -> None:
    outcome, why = survey(name, tmp_path)
    assert outcome == "runs", why
    assert not why.endswith(" 0 preemptions")


class Served:
    """A loaded miniature, and what transformers generates of it."""

    def __init__(self, name: str, folder: Path, **changes: Any) -> None:
        make(name, folder, **changes)
        self.folder = folder
        self.oracle = Oracle(folder)
        self.worker: ModelWorker
        self.config: EngineConfig
        self.worker, self.config = load(folder)
        self.ends = frozenset(self.worker.info().eos_token_ids)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(BART, tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(T5, tmp_path_factory.mktemp("t5"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_prefill_tokens": 7},
        {"max_batch_prefill_tokens": 16},
        {"depth": 1},
        {"depth": 1, "num_blocks": NUM_BLOCKS, "max_batch_prefill_tokens": 16},
        {"batching": Batching.STATIC},
        {"max_batch_size": 1},
    ],
    ids=str,
)
def test_scheduling_does_not_change_tokens(
    bart: Served, t5: Served, changes: dict[str, Any]
) -> None:
    for served in (bart, t5):
        with engine(served.worker, served.config, **dict(changes)) as client:
            for index, prompt in enumerate(prompts()):
                asked = request(index, prompt, 5 + 4 * index, stop_token_ids=served.ends)
                client.core.inbox.put(asked)
            client.read_until_finished(*range(len(LENGTHS)))
        for index, prompt in enumerate(prompts()):
            assert client.tokens[index] == served.oracle(prompt, 5 + 4 * index)


@pytest.mark.parametrize("length", [4, 15, 16, 33])
def test_samples_of_a_prompt_share_its_encoding(bart: Served, length: int) -> None:
    """Samples at temperature 0 are the greedy answer; each has a seed of its own at 1."""
    prompt = prompts()[3][:length]
    wanted = bart.oracle(prompt)
    with engine(bart.worker, bart.config) as client:
        first = request(1, prompt, stop_token_ids=bart.ends)
        client.core.inbox.put(first)
        for sample in (1, 2):
            client.core.inbox.put(first.fork(1 + sample, sample))
        client.read_until_finished(1, 2, 3)
        greedy = [client.tokens[index] for index in (1, 2, 3)]
        computed = client.core.metrics.load.context_tokens
    assert greedy == [wanted] * 3
    assert computed == length + 3 * 2, "of forks, only what the decoder is given first"


def test_samples_with_seeds_differ_and_repeat(t5: Served) -> None:
    prompt = prompts()[3]
    sampling = SamplingParams(temperature=1.0, seed=5)
    answers = []
    for blocks in (64, NUM_BLOCKS):
        with engine(t5.worker, t5.config, num_blocks=blocks) as client:
            first = request(1, prompt, sampling=sampling, ignore_eos=True)
            client.core.inbox.put(first)
            for sample in (1, 2):
                client.core.inbox.put(first.fork(1 + sample, sample))
            client.read_until_finished(1, 2, 3)
        answers.append([tuple(client.tokens[index]) for index in (1, 2, 3)])
    assert answers[0] == answers[1], "with preemption, too"
    assert len(set(answers[0])) == 3


def test_answers_begin_and_end_with_forced_tokens(bart: Served) -> None:
    prompt = prompts()[0]
    with engine(bart.worker, bart.config) as client:
        client.core.inbox.put(request(1, prompt, 6, stop_token_ids=bart.ends))
        client.core.inbox.put(request(2, prompt, 6, ignore_eos=True))
        client.read_until_finished(1, 2)
    assert client.tokens[1] == bart.oracle(prompt, 6)
    assert client.tokens[1][0] == 7
    assert client.tokens[1][-1] == 2
    assert client.finished[1][0] is FinishReason.EOS_TOKEN
    assert len(client.tokens[2]) == 6
    assert client.finished[2][0] is FinishReason.LENGTH


def test_an_answer_ends_where_the_decoder_has_no_more_positions(tmp_path: Path) -> None:
    make(BART, tmp_path, max_position_embeddings=40, forced_eos_token_id=None)
    worker, config = load(tmp_path, max_total_tokens=None, max_input_tokens=None)
    assert (config.max_input_tokens, config.max_total_tokens) == (40, 80)
    with engine(worker, config) as client:
        client.core.inbox.put(request(1, prompts()[2], 70, ignore_eos=True))
        client.core.inbox.put(request(2, prompts()[5], 20))
        client.read_until_finished(1, 2)
    assert len(client.tokens[1]) == 40
    assert client.finished[1][0] is FinishReason.LENGTH
    assert client.finished[2] == (FinishReason.ERROR, "the encoder takes 40 tokens")


def test_repetition_penalties_leave_out_the_prompt(t5: Served) -> None:
    """transformers penalizes the decoder's tokens alone, the one that it starts with included."""
    prompt = prompts()[3]
    ids = torch.tensor([prompt])
    from transformers import AutoModelForSeq2SeqLM

    model: Any = AutoModelForSeq2SeqLM.from_pretrained(t5.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            repetition_penalty=1.7,
        )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.7)
    with engine(t5.worker, t5.config) as client:
        client.core.inbox.put(request(1, prompt, sampling=sampling, stop_token_ids=t5.ends))
        client.read_until_finished(1)
    assert client.tokens[1] == output[0, 1:].tolist()
    assert client.tokens[1] != t5.oracle(prompt)


def test_what_an_encoder_has_no_answer_to_is_refused(bart: Served) -> None:
    prompt = prompts()[0]
    asked = request(1, prompt)
    with engine(bart.worker, bart.config) as client:
        client.core.inbox.put(replace(asked, prompt_logprobs=0))
        client.core.inbox.put(replace(asked, request_id=2, return_context_logits=True))
        client.core.inbox.put(replace(asked, request_id=3, return_generation_logits=True))
        client.read_until_finished(1, 2, 3)
    for index, cause in ((1, "log-probabilities"), (2, "logits"), (3, "forces tokens")):
        reason, error = client.finished[index]
        assert reason is FinishReason.ERROR
        assert cause in error


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_loras": 2}, "--max-loras"),
        ({"num_shard": 2}, "--num-shard"),
        ({"cross_check": True}, "--cross-check"),
        ({"attention": "cpu"}, "--attention cpu"),
        ({"max_batch_prefill_tokens": 20, "max_input_tokens": 30}, "--max-batch-prefill-tokens"),
        ({"max_input_tokens": 97, "max_total_tokens": 120}, "--max-input-tokens 97"),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    bart: Served, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(TgiError, match=named):
        load(bart.folder, **settings)


@pytest.mark.parametrize("quantize", ["int8", "bitsandbytes-nf4", "fp8"])
def test_plain_weights_are_quantized_as_they_are_loaded(bart: Served, quantize: str) -> None:
    plain, _ = load(bart.folder, dtype="bfloat16")
    worker, config = load(bart.folder, dtype="bfloat16", quantize=quantize)
    with engine(worker, config) as client:
        client.core.inbox.put(request(1, prompts()[0], 8))
        client.read_until_finished(1)
    assert client.tokens[1][0] == 7
    assert worker.model.weight_bytes < plain.model.weight_bytes


@pytest.mark.parametrize("name", [BART, T5])
def test_bfloat16_and_an_8_bit_cache_run(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    worker, config = load(tmp_path, dtype="bfloat16", kv_cache_dtype="fp8_e4m3fn")
    with engine(worker, config, num_blocks=NUM_BLOCKS) as client:
        for index, prompt in enumerate(prompts()):
            client.core.inbox.put(request(index, prompt, ignore_eos=True))
        client.read_until_finished(*range(len(LENGTHS)))
    alone = []
    for prompt in prompts():
        with engine(worker, config) as lone:
            lone.core.inbox.put(request(0, prompt, ignore_eos=True))
            lone.read_until_finished(0)
        alone.append(lone.tokens[0])
    assert [client.tokens[index] for index in range(len(LENGTHS))] == alone


def test_a_checkpoint_that_stores_a_table_under_any_tied_name_is_read(
    bart: Served, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(bart.folder / "model.safetensors")
    names = [name for name in tensors if name.endswith(("shared.weight", "embed_tokens.weight"))]
    table = tensors.pop(names[0])
    tensors["model.decoder.embed_tokens.weight"] = table
    tensors["model.encoder.embed_tokens.weight"] = table.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((bart.folder / file).read_text())
    worker, config = load(tmp_path)
    with engine(worker, config) as client:
        client.core.inbox.put(request(1, prompts()[0], stop_token_ids=bart.ends))
        client.read_until_finished(1)
    assert client.tokens[1] == bart.oracle(prompts()[0])


def test_without_a_generation_config_that_of_the_model_holds(bart: Served, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((bart.folder / "model.safetensors").read_bytes())
    raw = json.loads((bart.folder / "config.json").read_text())
    raw |= {"forced_bos_token_id": 21, "decoder_start_token_id": 4, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    worker, config = load(tmp_path)
    assert worker.info().decoder_start_ids == (4,)
    with engine(worker, config) as client:
        client.core.inbox.put(request(1, prompts()[0], 4))
        client.read_until_finished(1)
    assert client.tokens[1][0] == 21


def test_memory_per_token_is_that_of_one_layer_stack(bart: Served) -> None:
    """Cross-attention and self-attention share a sequence's blocks, at positions of their own."""
    keys_and_values, layers, width, float32 = 2, 3, 32, 4
    capacity = bart.worker.capacity
    assert capacity is not None
    per_token = keys_and_values * layers * width * float32
    assert capacity.cache_bytes == capacity.num_blocks * capacity.config.block_size * per_token


LANGUAGES = {
    "M2M100ForConditionalGeneration": {"forced_bos_token_id": None},
    "MBartForConditionalGeneration": {},
    "SeamlessM4TForTextToText": {},
}
"""Models that are told the language of an answer, and changes of their miniatures."""


@pytest.mark.parametrize("name", LANGUAGES)
def test_each_request_names_the_token_that_its_answer_begins_with(
    name: str, tmp_path: Path
) -> None:
    served = Served(name, tmp_path, **LANGUAGES[name])
    tokens = (40, 41, None)
    with engine(served.worker, served.config, num_blocks=NUM_BLOCKS) as client:
        for index, token in enumerate(tokens):
            asked = request(index, prompts()[3], 12, first_id=token, stop_token_ids=served.ends)
            client.core.inbox.put(asked)
        client.read_until_finished(*range(len(tokens)))
    for index, token in enumerate(tokens):
        more: dict[str, Any] = {} if token is None else {"forced_bos_token_id": token}
        if token is not None and name.startswith("Seamless"):
            # Its generate, told a language, gives the decoder that beside the usual start.
            more = {"decoder_input_ids": torch.tensor([[token]])}
        new = 12 - ("decoder_input_ids" in more)
        assert client.tokens[index] == served.oracle(prompts()[3], new, **more)


def test_the_text_part_of_a_model_of_speech_is_loaded(tmp_path: Path) -> None:
    """SeamlessM4T is published whole, and its class for text to text lacks the other parts."""
    from safetensors.torch import load_file, save_file

    name = "SeamlessM4TForTextToText"
    make(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{part}.weight": torch.zeros(1) for part in ("speech_encoder", "vocoder")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["SeamlessM4TModel"]}))
    worker, config = load(tmp_path)
    with engine(worker, config) as client:
        client.core.inbox.put(request(1, prompts()[0], stop_token_ids=frozenset({3})))
        client.read_until_finished(1)
    assert client.tokens[1] == Oracle(tmp_path)(prompts()[0])
