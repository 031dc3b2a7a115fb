"""Compares the loaded model with transformers' model of the same checkpoint.

A few prompts of random tokens are continued greedily in one batch, through the paged cache, in
chunks and then token by token. transformers computes each text with its continuation once, in the
same dtype, and its logits are compared with ours at every token.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention, StateMetadata, create_attention
from tgi_cli.config import BLOCK_SIZE
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.models import CausalLM, ModelConfig
from tgi_cli.models.cpu_program import compile_program
from tgi_cli.worker.sizing.memory import release_unused_memory

log = logging.getLogger(__name__)

PROMPTS = (7, 40, 75)
"""Lengths of the prompts; shorter if less context is served."""

NEW = 16
"""Tokens generated after each prompt."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Tolerance of a token's logits, in standard deviations of all logits. Sums in 16 bits differ by
their order alone."""

OUTLIERS = {torch.float32: 0.0, torch.float16: 0.125, torch.bfloat16: 0.125}
"""Tolerated share of tokens beyond it: in 16 bits a router may choose other experts."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of the comparison. Differences are in standard deviations of the logits."""

    tokens: int
    identical: int
    """Greedy tokens on which both agree."""
    worst: float
    first: tuple[int, int, float] | None
    """Prompt, position and difference of the first token beyond the tolerance."""
    off: float
    """Share of tokens beyond the tolerance."""


def cross_check(
    config: ModelConfig,
    model: CausalLM,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    shard: Shard = ALONE,
) -> None:
    """Compare ``model`` with transformers' model of the same checkpoint.

    Every shard takes part; the first one loads transformers' whole model, and frees it.

    Raises:
        ModelError: they disagree, or transformers cannot load it; the message names the position.
        ConfigError: no prompt fits into the ``max_positions`` that are served.
    """
    longest = max_positions - NEW
    if longest < 2:
        raise ConfigError(
            f"--cross-check needs {NEW + 2} tokens of context, and {max_positions} are served",
            "raise --max-total-tokens",
        )
    choose = random.Random(0)
    prompts = [choose.choices(range(vocab_size), k=min(n, longest)) for n in PROMPTS]
    attention = create_attention(
        None, model.kv_specs, BLOCK_SIZE, dtype, device, states=model.state_specs
    )
    with torch.inference_mode():
        texts, ours = _continue(model, attention, prompts, device)
        del attention
        release_unused_memory(device)
        found, problem = None, ""
        if shard.rank == 0:
            try:
                theirs = _reference(config, texts, dtype, device, max_positions)
                found = _compare(prompts, texts, ours, theirs, dtype)
                problem = _problem(found, dtype)
            except Exception as error:  # any may come out of a model's code; others are waiting
                problem = f"transformers cannot run it ({type(error).__name__}: {error})"
            release_unused_memory(device)
        fine = shard.smallest(int(not problem))
    if not fine:
        raise ModelError(
            f"--cross-check of {config.architecture} in {config.path}: "
            f"{problem or 'the first shard found a difference'}",
            "serve it without --cross-check if you must, and report this",
        )
    if found is not None:
        log.info(
            "cross-check: %d of %d greedy tokens are transformers'; logits differ by "
            "%.1e of their standard deviation at most",
            found.identical,
            found.tokens,
            found.worst,
        )


def _continue(
    model: CausalLM, attention: PagedAttention, prompts: Sequence[list[int]], device: torch.device
) -> tuple[list[list[int]], list[Tensor]]:
    """Texts of each prompt and its greedy continuation; logits [tokens, vocab] on the host.

    The last token of a text follows from the last logits; it is not computed itself.
    """
    forward = (compile_program(model, attention) or model).forward
    blocks = -(-(max(map(len, prompts)) + NEW) // BLOCK_SIZE)
    attention.allocate(blocks * len(prompts))
    states = attention.states
    if states is not None:
        states.allocate(len(prompts))
    own = list(range(len(prompts)))
    texts = [list(prompt) for prompt in prompts]
    logits: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while min(map(len, texts)) < len(prompts[0]) + NEW:
        chunks = [
            max(1, 2 * len(text) // 3) if not n else len(text) - n
            for text, n in zip(texts, done, strict=True)
        ]
        ends = [n + count for n, count in zip(done, chunks, strict=True)]
        metadata, positions = _metadata(chunks, ends, blocks, device)
        ids = [t for text, n, end in zip(texts, done, ends, strict=True) for t in text[n:end]]
        attention.plan(metadata)
        if states is not None:
            fresh = [slot if n else -1 for slot, n in zip(own, done, strict=True)]
            states.plan(StateMetadata.of(chunks, fresh, own, device))
        hidden = forward(torch.tensor(ids, device=device), positions, attention)
        for i, part in enumerate(torch.split(model.logits(hidden), chunks)):
            logits[i].append(part.cpu())
            if ends[i] == len(texts[i]):
                texts[i].append(int(part[-1].argmax()))
        done = ends
    return texts, [torch.cat(parts) for parts in logits]


def _metadata(
    chunks: list[int], ends: list[int], blocks: int, device: torch.device
) -> tuple[AttentionMetadata, Tensor]:
    """Metadata of a step in which sequence i has the ``blocks`` blocks from i * blocks on."""
    table = torch.arange(len(chunks) * blocks, dtype=torch.int32).view(-1, blocks)
    at = [range(end - count, end) for count, end in zip(chunks, ends, strict=True)]
    positions = torch.tensor([p for own in at for p in own])
    slots = torch.tensor([i * blocks * BLOCK_SIZE + p for i, own in enumerate(at) for p in own])
    starts = torch.tensor([0, *chunks]).cumsum(0)
    metadata = AttentionMetadata(
        query_start_loc=starts.int().to(device),
        kv_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=slots.to(device),
        query_lens_host=chunks,
        kv_lens_host=ends,
        num_decodes=next((i for i, count in enumerate(chunks) if count > 1), len(chunks)),
    )
    return metadata, positions.to(device)


def _reference(
    config: ModelConfig,
    texts: Sequence[list[int]],
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
) -> list[Tensor]:
    """transformers' logits of the texts, float32 on the host."""
    import transformers

    kind: Any = getattr(transformers, config.architecture, transformers.AutoModelForCausalLM)
    trusted = kind is transformers.AutoModelForCausalLM and config.trust_remote_code
    own: Any = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=trusted)
    rope = getattr(own.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = rope.get("original_max_position_embeddings", max_positions)
        if max_positions > limit:  # all texts are served with the factors for long ones
            rope["short_factor"] = rope["long_factor"]
    model = kind.from_pretrained(
        config.path, config=own, dtype=dtype, trust_remote_code=trusted
    ).to(device)
    model.eval()
    return [
        model(input_ids=torch.tensor([text[:-1]], device=device), use_cache=False)
        .logits[0]
        .float()
        .cpu()
        for text in texts
    ]


def _compare(
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    dtype: torch.dtype,
) -> Agreement:
    spread = torch.cat(list(theirs)).std().clamp(min=1e-6)
    tokens = identical = total = off = 0
    worst, first = 0.0, None
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        differences = ((ours[i] - theirs[i]).abs().amax(1) / spread).nan_to_num(float("inf"))
        over = (differences > TOLERANCES[dtype]).nonzero().flatten().tolist()
        if over and first is None:
            first = (i, over[0], differences[over[0]].item())
        off, total = off + len(over), total + len(differences)
        worst = max(worst, differences.max().item())
        expected = theirs[i][len(prompt) - 1 :].argmax(1).tolist()
        tokens += len(expected)
        identical += sum(a == b for a, b in zip(expected, text[len(prompt) :], strict=True))
    return Agreement(tokens, identical, worst, first, off / total)


def _problem(found: Agreement, dtype: torch.dtype) -> str:
    """A description of the difference; empty if it is tolerable."""
    if found.first is None or found.off <= OUTLIERS[dtype]:
        return ""
    prompt, position, difference = found.first
    return (
        f"its logits are not transformers': first at token {position} of prompt {prompt}, by "
        f"{difference:.2g} of their standard deviation (tolerance: {TOLERANCES[dtype]:g} in "
        f"{str(dtype).removeprefix('torch.')}), and at {found.off:.0%} of all tokens; "
        f"{found.identical} of {found.tokens} greedy tokens are the same"
    )
