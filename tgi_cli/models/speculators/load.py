"""Makes a proposer of a checkpoint: builds its module, fills it, gives it a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_cli.device.memory import large_blocks_apart
from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.layers import Build
from tgi_cli.models.base import CausalLM
from tgi_cli.models.checkpoint import merge_quantized
from tgi_cli.models.config import shown_error
from tgi_cli.models.registry import checkpoint_format
from tgi_cli.models.speculators.base import Proposer, TargetStates
from tgi_cli.models.speculators.cache import CacheShape, DraftCache
from tgi_cli.models.speculators.detect import SpeculatorConfig, located_tensors
from tgi_cli.models.speculators.eagle3 import Eagle3
from tgi_cli.models.speculators.eagle3_config import read_eagle3
from tgi_cli.models.speculators.last_state import LastStateProposer
from tgi_cli.models.speculators.medusa import Medusa, read_medusa
from tgi_cli.models.speculators.mlp import MLPSpeculator, read_mlp_speculator
from tgi_cli.models.speculators.mtp import MTPLayer
from tgi_cli.models.speculators.mtp_config import read_mtp
from tgi_cli.models.speculators.pairs import PairProposer
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.models.weight_filling import fill_model
from tgi_cli.quantization import QuantizationMethod, Quantized, Unquantized
from tgi_cli.quantization.detect import quantizer_for

Module = Eagle3 | MTPLayer | Medusa | MLPSpeculator


@dataclass(frozen=True, slots=True)
class ProposerOptions:
    """What a proposer's module and cache are made for.

    Attributes:
        dtype: dtype of weights and hidden states, the target's.
        device: the target's.
        num_drafts: tokens to draft at most.
        max_positions: the context that is served.
        block_size: tokens per block of the target's KV cache.
        num_layers, hidden_size, vocab_size: of the target.
        quantize: how plain weights are quantized as they are loaded. Default: they are not.
        attention: backend of its cache. Default: the fastest one of the device.
        sharded: whether the target is split over several processes, which are not connected yet.
            Each has the whole proposer, and calls it with the same steps, in the same order.
    """

    dtype: torch.dtype
    device: torch.device
    num_drafts: int
    max_positions: int
    block_size: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    quantize: str | None = None
    attention: str | None = None
    sharded: bool = False


def load_proposer(
    speculator: SpeculatorConfig, target: CausalLM, options: ProposerOptions
) -> Proposer:
    """The proposer of a checkpoint of heads or MTP layers, loaded.

    Args:
        speculator: as detected; not of a draft model.
        target: loaded.
        options: what it is made for.

    Raises:
        UnsupportedModelError: an option of the checkpoint, or a target, that is not supported.
        ModelError: values that cannot be, or that are another target's.
        CheckpointError: tensors that are missing, unexpected, of another shape or type.
    """
    config = speculator.config
    if options.num_drafts > speculator.most_drafts:
        raise ModelError(
            f"{config.path} drafts {speculator.most_drafts} tokens, not {options.num_drafts}",
            f"set --speculate to {speculator.most_drafts} at most",
        )
    with torch.inference_mode(), large_blocks_apart():
        layout = checkpoint_format(config)
        method: QuantizationMethod = Unquantized()
        if layout is not None or options.quantize is not None:
            quantizer = None if options.quantize is None else quantizer_for(options.quantize)
            method = Quantized(options.dtype, options.device, quantizer)
        build = Build(options.dtype, method, max_positions=options.max_positions)
        try:
            module = _build(speculator, target, options, build)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(
                f"no draft head can be built of {config.file} ({shown_error(error)})",
                "download it again, or correct it",
            ) from error
        stored = {
            name: StoredTensor(name, file, entry.shape, entry.dtype)
            for file, name, entry in located_tensors(config.path)
            if not isinstance(module, MTPLayer) or name.startswith(f"{module.spec.prefix}.")
        }
        if layout is not None:
            stored = merge_quantized(stored, layout)
        fill_model(module, stored, options.device, unused=() if layout is None else layout.ignored)
        if isinstance(module, Eagle3) and not options.sharded:
            module.share_embedding()
        module.eval()
    if isinstance(module, Medusa | MLPSpeculator):
        return LastStateProposer(speculator.method, module, options.num_drafts)
    needs: TargetStates = module.spec.layers if isinstance(module, Eagle3) else "final"
    shape = CacheShape(options.block_size, options.num_drafts, options.max_positions, first=1)
    try:
        cache = DraftCache(module.kv_specs, shape, options.dtype, options.device, options.attention)
    except ValueError as error:
        raise UnsupportedModelError(
            f"the draft head of {config.path} cannot have a cache: {error}", "leave --attention off"
        ) from error
    return PairProposer(speculator.method, module, cache, needs)


def _build(
    speculator: SpeculatorConfig, target: CausalLM, options: ProposerOptions, build: Build
) -> Module:
    """The module of a checkpoint, without weights."""
    count, hidden_size, vocab_size = options.num_drafts, options.hidden_size, options.vocab_size
    if speculator.method == "medusa":
        heads = read_medusa(speculator, count)
        return Medusa(heads, build, target, hidden_size, vocab_size)
    if speculator.method == "mlp_speculator":
        return MLPSpeculator(read_mlp_speculator(speculator, count, hidden_size, vocab_size), build)
    _require_pairs(target, options, captures=speculator.method == "eagle3")
    context = options.max_positions
    if speculator.method == "eagle3":
        spec = read_eagle3(speculator, options.num_layers, vocab_size, context)
        return Eagle3(spec, build, target, hidden_size, options.device)
    return MTPLayer(read_mtp(speculator.config, context), build, target, options.device)


def _require_pairs(target: CausalLM, options: ProposerOptions, captures: bool) -> None:
    """Raises UnsupportedModelError for a target that does not give what pairs are made of."""
    if captures and not target.captures_states:
        raise UnsupportedModelError(
            "EAGLE-3 heads need hidden states that this model does not give: it is run by "
            "transformers, or its layers have several streams",
            "leave the head off",
        )
    # Vectors of a sharded table are added up by all shards, which are not connected yet.
    if not options.sharded or type(target).token_vectors is CausalLM.token_vectors:
        target.token_vectors(torch.zeros(1, dtype=torch.int64, device=options.device))
