"""Miniatures of transformers' encoder-decoder models, and which of the classes are served.

``python -m tests.tools.seq2seq [CLASS ...]`` makes a miniature of each class of transformers'
mapping from text to text, with random weights, and compares the greedy tokens and their
log-probabilities of the engine, which is given several requests and too few blocks for them, with
those of transformers' ``generate`` for each request alone. It prints a line per class, and the
counts:

    runs      the tokens are the same
    refused   with the reason
    WRONG     they differ: a mistake here

Classes that take sound are not made: their names are listed with the reason. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from tests.unit.engine.test_core import Client
from tgi_cli.config import EngineConfig, ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown, StepOutputs
from tgi_cli.errors import TgiError
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

VOCABULARY = 256
NEW = 24
"""Tokens of an answer."""
LENGTHS = (5, 16, 1, 33, 17, 48)
"""Tokens of the prompts."""
TOLERANCE = 2e-4
"""Of log-probabilities."""
NUM_BLOCKS = 6
"""Of a pool that one request of 73 tokens fits in, and two do not."""

SOUND = (
    "AudioFlamingo3ForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "Nemotron3_5TranscribeForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VoxtralForConditionalGeneration",
    "VoxtralRealtimeForConditionalGeneration",
)
"""Classes of the mapping that take sound and have no text encoder."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_BART = _TOKENS | {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 96,
    "dropout": 0.0,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_SEAMLESS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 3,
}
_GEMMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_EXPERTS = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": _BART | {"forced_bos_token_id": 7, "forced_eos_token_id": 2},
    "BigBirdPegasusForConditionalGeneration": _BART | {"block_size": 2, "num_random_blocks": 1},
    "BlenderbotForConditionalGeneration": _BART,
    "BlenderbotSmallForConditionalGeneration": _BART,
    "EncoderDecoderModel": {
        "encoder": _BERT | {"model_type": "bert"},
        "decoder": _BERT | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 5,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "FSMTForConditionalGeneration": _BART
    | {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": 240},
    "LEDForConditionalGeneration": _BART
    | {
        "max_encoder_position_embeddings": 96,
        "max_decoder_position_embeddings": 64,
        "attention_window": 8,
    },
    "LongT5ForConditionalGeneration": _T5 | {"local_radius": 5},
    "M2M100ForConditionalGeneration": _BART | {"pad_token_id": 1, "forced_bos_token_id": 9},
    "MBartForConditionalGeneration": _BART | {"scale_embedding": True, "forced_bos_token_id": 11},
    "MT5ForConditionalGeneration": _T5 | {"tie_word_embeddings": False},
    "MarianMTModel": _BART | {"decoder_start_token_id": 0, "bad_words_ids": [[0]]},
    "MvpForConditionalGeneration": _BART,
    "NllbMoeForConditionalGeneration": _BART | _EXPERTS | {"pad_token_id": 1},
    "PLBartForConditionalGeneration": _BART,
    "PegasusForConditionalGeneration": _BART | {"decoder_start_token_id": 0},
    "PegasusXForConditionalGeneration": _BART | {"block_size": 8, "num_global_tokens": 4},
    "ProphetNetForConditionalGeneration": _TOKENS
    | {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_encoder_layers": 3,
        "num_decoder_layers": 3,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 96,
        "num_buckets": 8,
        "relative_max_distance": 20,
    },
    "SeamlessM4TForTextToText": _SEAMLESS,
    "SeamlessM4Tv2ForTextToText": _SEAMLESS,
    "SwitchTransformersForConditionalGeneration": _T5
    | {
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 8,
    },
    "T5ForConditionalGeneration": _T5,
    "T5Gemma2ForConditionalGeneration": {
        "encoder": {"text_config": _GEMMA, "vision_config": _TOWER},
        "decoder": _GEMMA,
    },
    "T5GemmaForConditionalGeneration": {
        "encoder": _GEMMA,
        "decoder": _GEMMA | {"cross_attention_hidden_size": 32},
        "vocab_size": VOCABULARY,
    },
    "UMT5ForConditionalGeneration": _T5 | {"feed_forward_proj": "gated-gelu"},
}
"""Sizes of the miniatures; layers and heads of the two parts differ where they may."""


def make(name: str, folder: Path, **changes: Any) -> None:
    """Write a random checkpoint of a class, with its generation config."""
    kind: Any = getattr(transformers, name)
    values = CONFIGS[name] | changes
    config = kind.config_class(**values)
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1 and weight.requires_grad:
                scale = 1.0 if "embed" in path or "shared" in path else 2.5
                weight.normal_(0, scale if "position" in path else scale / weight.shape[-1] ** 0.5)
            elif weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
        bias = getattr(model, "final_logits_bias", None)
        if bias is not None:
            bias.normal_()
    generation = model.generation_config
    for key in ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(generation, key, values.get(key, getattr(generation, key, None)))
    if generation.decoder_start_token_id is None:
        generation.decoder_start_token_id = 2
    for key in ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"):
        setattr(generation, key, values.get(key))
    model.save_pretrained(folder)


class Oracle:
    """transformers' ``generate`` of a checkpoint, for one prompt alone."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
        self._model.eval()

    def __call__(self, prompt: Sequence[int], new: int = NEW, **more: Any) -> list[int]:
        """The answer, without the token that the decoder starts with; ``more`` is for generate."""
        return self.scored(prompt, new, **more)[0]

    def scored(
        self, prompt: Sequence[int], new: int = NEW, **more: Any
    ) -> tuple[list[int], list[float]]:
        """The answer, and the log-probability of each of its tokens that was chosen."""
        ids = torch.tensor([list(prompt)])
        encoder = self._model.get_encoder()
        if hasattr(encoder, "set_attention_type"):  # BigBird's, which a short prompt changes
            encoder.set_attention_type(encoder.config.attention_type)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                num_beams=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                **more,
            )
        answer: list[int] = output.sequences[0, 1:].tolist()
        scores = [step[0].log_softmax(-1) for step in output.scores]
        chosen = answer[len(answer) - len(scores) :]
        return answer, [row[i].item() for row, i in zip(scores, chosen, strict=True)]


def load(folder: Path, **settings: Any) -> tuple[ModelWorker, EngineConfig]:
    """A worker of a checkpoint, warmed up, and its configuration."""
    values: dict[str, Any] = {
        "model_id": "miniature",
        "dtype": "float32",
        "max_total_tokens": 80,
        "max_input_tokens": 56,
        "max_batch_size": 4,
        "disable_grammar_support": True,
    }
    worker, _ = load_worker(ServeConfig(**values | settings), folder)
    capacity = worker.warmup()
    assert isinstance(worker, ModelWorker)
    return worker, capacity.config


class ScoringClient(Client):
    """Also keeps the log-probabilities of tokens."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.logprobs: dict[int, list[float]] = {}

    def read(self) -> StepOutputs | None:
        """See :meth:`Client.read`."""
        outputs = super().read()
        if outputs is not None:
            for request_id, logprob in zip(outputs.request_ids, outputs.logprobs, strict=True):
                self.logprobs.setdefault(request_id, []).append(logprob)
        return outputs


@contextmanager
def engine(
    worker: ModelWorker,
    config: EngineConfig,
    requests: Iterable[GenerationRequest] = (),
    **changes: Any,
) -> Iterator[ScoringClient]:
    """An engine over a loaded model, whose loop finds ``requests`` in its inbox when it starts.

    ``changes`` are of its scheduler's configuration.
    """
    depth = changes.pop("depth", 0)
    scheduler = replace(SchedulerConfig.of(config, changes.pop("num_blocks", 64)), **changes)
    core = EngineCore(worker, scheduler, depth)
    for each in requests:
        core.inbox.put(each)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = ScoringClient(core)
    try:
        yield client
    finally:
        core.inbox.put(Shutdown())
        while client.read() is not None:
            pass
        thread.join(timeout=60)


def request(
    request_id: int, prompt: Sequence[int], new: int = NEW, **more: Any
) -> GenerationRequest:
    """A greedy request; its stop ids are those of the miniatures."""
    values: dict[str, Any] = {
        "sampling": SamplingParams(temperature=0.0),
        "stop_token_ids": frozenset({2}),
    }
    return GenerationRequest(
        request_id=request_id, prompt_ids=tuple(prompt), max_new_tokens=new, **values | more
    )


def prompts() -> list[list[int]]:
    """Token ids without the special ones, of :data:`LENGTHS`."""
    choose = random.Random(0)
    return [choose.choices(range(12, 230), k=length) for length in LENGTHS]


def survey(name: str, folder: Path) -> tuple[str, str]:
    """What became of the class ``name``, and why."""
    if name in SOUND:
        return "refused", "it takes sound, and has no encoder of text"
    make(name, folder)
    try:
        worker, resolved = load(folder)
    except TgiError as error:
        return "refused", str(error)
    ends = frozenset(worker.info().eos_token_ids)
    requests = [
        request(index, prompt, stop_token_ids=ends) for index, prompt in enumerate(prompts())
    ]
    with engine(worker, resolved, requests, num_blocks=NUM_BLOCKS) as client:
        client.read_until_finished(*range(len(LENGTHS)))
        preemptions = client.core.metrics.load.preemptions
    oracle = Oracle(folder)
    kinds, worst = set(), 0.0
    for index, prompt in enumerate(prompts()):
        wanted, scores = oracle.scored(prompt)
        kinds.update(wanted)
        if client.tokens.get(index) != wanted:
            return "WRONG", f"{client.tokens.get(index)} instead of {wanted}"
        apart = zip(client.logprobs[index], scores, strict=True)
        worst = max(worst, *(abs(ours - theirs) for ours, theirs in apart))
    about = f"{worst:.1e} of log-probabilities, {len(kinds)} different tokens"
    return "runs" if worst < TOLERANCE else "WRONG", f"{about}, {preemptions} preemptions"


def main() -> None:
    """Print what became of each class."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.seq2seq", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="default: all of them")
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    counts: Counter[str] = Counter()
    names = sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
    for name in parser.parse_args().classes or names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome, why = survey(name, Path(folder))
            except Exception as error:  # one class more or less shall not end the survey
                outcome, why = "WRONG", f"{type(error).__name__}: {error}"
        counts[outcome] += 1
        print(f"{outcome:8} {name:46} {' '.join(why.split())[:300]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
