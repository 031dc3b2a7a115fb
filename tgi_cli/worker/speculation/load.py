"""From a folder of weights to what drafts for a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tgi_cli.config import EngineConfig, ModelFacts
from tgi_cli.config.speculation import MTP
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.step import MAX_DRAFT_ROWS
from tgi_cli.errors import ConfigError, UnsupportedModelError
from tgi_cli.models import CausalLM, ModelConfig, load_model, model_facts, read_config
from tgi_cli.models.cpu_program import compile_program
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.models.speculators.base import Proposer, TargetStates
from tgi_cli.models.speculators.cache import CacheShape, DraftCache
from tgi_cli.models.speculators.detect import MOST_DRAFTS, SpeculatorConfig, detect, own_layers
from tgi_cli.models.speculators.load import ProposerOptions, load_proposer
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import MAX_LOGITS, MAX_SCORES
from tgi_cli.worker.speculation.draft_model import DraftLimits, DraftModel, DraftWeights
from tgi_cli.worker.speculation.vocabulary import compare

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """Weights that draft, on their device.

    Attributes:
        method: its name in vLLM's configuration.
        needs: the hidden states of the target that it reads.
        make: makes the proposer, for the rows of a worker.
        compiled: whether torch is left with little to compute, as by a compiled target.
    """

    method: str
    needs: TargetStates
    make: Callable[[InputBatch], Proposer]
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, where it runs, and which share of it this process has."""

    model: CausalLM
    config: ModelConfig
    facts: ModelFacts
    dtype: torch.dtype
    device: torch.device
    shard: Shard = ALONE


def load_drafter(config: EngineConfig, target: Target) -> LoadedDrafter | None:
    """Load the weights that ``config`` names; None if it names none, or another shard has them.

    A draft model needs nothing of the target, and is on shard 0, which alone samples. Heads use the
    target's hidden states, and its tables together with the other shards: each has them whole.

    Raises:
        ConfigError: they are of another method than the configuration says.
        ModelError: they do not fit the target, or cannot be read.
        UnsupportedModelError: the combination is not supported.
    """
    found = _find(config, target.config)
    if found is None:
        return None
    if target.model.state_specs:
        raise UnsupportedModelError(
            f"--speculative-model: the recurrent states of {target.facts.architecture} cannot be "
            "rolled back to before a draft token that is rejected",
            "leave it off",
        )
    if found.method == "draft_model":
        return None if target.shard.rank else _load_draft_model(config, target, found)
    # What its checkpoint proposes, unless the user says otherwise.
    asked = "speculate" in config.explicit_limits
    count = config.speculate if asked else min(config.speculate, found.num_drafts)
    num_layers, hidden_size = _sizes(target)
    proposer = load_proposer(
        found,
        target.model,
        ProposerOptions(
            dtype=target.dtype,
            device=target.device,
            num_drafts=count,
            max_positions=config.max_sequence_tokens,
            block_size=config.block_size,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=target.facts.vocab_size,
            quantize=config.quantize,
            attention=config.attention,
            sharded=target.shard.size > 1,
        ),
    )
    if not target.shard.rank:
        log.info("drafts come from the %s weights in %s", found.method, found.config.path)
    return LoadedDrafter(found.method, proposer.needs, lambda rows: proposer, compiled=True)


def _sizes(target: Target) -> tuple[int, int]:
    """Layers of the target, and width of its hidden states."""
    if isinstance(target.model, DecoderForCausalLM):
        return len(target.model.spec.layers), target.model.spec.hidden_size
    text = target.config.raw.get("text_config")
    config = replace(target.config, raw=text) if isinstance(text, dict) else target.config
    return config.positive("num_hidden_layers"), config.positive("hidden_size")


def _find(config: EngineConfig, target: ModelConfig) -> SpeculatorConfig | None:
    """What the configuration names."""
    method = config.speculative_method
    if not config.speculate:
        return None
    if method == MTP:
        return own_layers(target)
    if config.speculative_model is None:
        return None
    found = detect(Path(config.speculative_model))
    if method is not None and method != found.method:
        raise ConfigError(
            f"--speculative-config: method {method}, and {config.speculative_model} is of the "
            f"method {found.method}",
            "leave the method out",
        )
    return found


def _load_draft_model(
    config: EngineConfig, target: Target, found: SpeculatorConfig
) -> LoadedDrafter:
    path, device, dtype = found.config.path, target.device, target.dtype
    own = read_config(path, config.trust_remote_code)
    facts = model_facts(own)
    if facts.decoder is not None:
        raise UnsupportedModelError(
            f"--speculative-model: {facts.architecture} has an encoder, and cannot draft",
            "use a decoder of the model's family",
        )
    vocabulary = target.facts.vocab_size
    tokens = compare(config.model_path, path, (vocabulary, facts.vocab_size))
    served = (config.max_sequence_tokens, facts.max_position_embeddings, facts.dense_positions)
    positions = min(each for each in served if each is not None)
    model = load_model(
        own,
        dtype,
        device,
        load_format=config.load_format,
        max_positions=positions,
        quantize=config.quantize if facts.quantization is None else None,
        head_bits=config.head_bits,
        vision=False,
    )
    if model.state_specs:
        raise UnsupportedModelError(
            f"--speculative-model: the recurrent states of {facts.architecture} cannot be rolled "
            "back to before a draft token that is rejected",
            "use a draft model with attention alone",
        )
    shape = CacheShape(
        block_size=config.block_size,
        num_drafts=min(config.speculate, MOST_DRAFTS),
        max_positions=positions,
    )
    try:
        cache = DraftCache(model.kv_specs, shape, dtype, device, config.attention)
    except ValueError as error:
        raise ConfigError(f"--attention {config.attention}: {error}", "leave it off") from error
    program = compile_program(model, cache.attention)
    wider = max(vocabulary, facts.vocab_size)
    limits = DraftLimits(
        max_tokens=positions,
        step_tokens=config.max_batch_prefill_tokens + config.max_batch_size + MAX_DRAFT_ROWS,
        vocab_size=vocabulary,
        own_vocab_size=facts.vocab_size,
        logits_at_once=max(1, MAX_LOGITS[device.type] // wider),
        scores_at_once=max(1, MAX_SCORES[device.type] // wider),
    )
    weights = DraftWeights(model, program, cache, model.weight_bytes)
    log.info("drafts come from %s in %s", facts.architecture, path)
    if tokens is not None:
        text = "it has another vocabulary, and can draft %d of %d tokens"
        log.info(text, tokens.shared, vocabulary)
    return LoadedDrafter(
        found.method,
        "none",
        lambda rows: DraftModel(weights, rows, limits, tokens),
        program is not None,
    )
