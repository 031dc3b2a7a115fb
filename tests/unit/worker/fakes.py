"""A model whose next token depends on every earlier token and position, read through the blocks.

Its KV cache holds a token id and its position per slot, so a wrong row, block table, slot,
position or stale block changes what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, StateCache
from tgi_cli.engine.step import NewRow, Step
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

VOCAB = 211
GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def next_token(tokens: Sequence[int]) -> int:
    """What follows ``tokens``."""
    digest = 7
    for position, token in enumerate(tokens):
        digest = (digest * 31 + (token + 1) * (position + 1)) % 1_000_003
    return digest % VOCAB


class FakeAttention:
    """The cache: int64 [blocks, block_size, 2], and the metadata of the step."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = torch.full((num_blocks, block_size, 2), -(10**6))
        self.states: StateCache | None = None
        self.metadata: AttentionMetadata

    def plan(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.cache[[d for _, d in pairs]] = self.cache[[s for s, _ in pairs]]


class FakeModel:
    """Hidden states are the next tokens; logits have their peak there."""

    def __init__(self) -> None:
        self.poisoned: set[int] = set()
        self.failure: Exception | None = None
        self.hidden_rows: list[int] = []

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        assert input_ids.dtype == positions.dtype == torch.int64
        meta: AttentionMetadata = attention.metadata
        check(meta, len(input_ids), attention.block_size)
        attention.cache.view(-1, 2)[meta.slot_mapping] = torch.stack([input_ids, positions], 1)
        hidden = torch.zeros(len(input_ids), 1)
        for index, kv_len in enumerate(meta.kv_lens.tolist()):
            blocks = meta.block_table[index, : -(-kv_len // attention.block_size)]
            held = attention.cache[blocks].view(-1, 2)[:kv_len]
            assert held[:, 1].tolist() == list(range(kv_len)), "KV is at wrong positions"
            first, end = meta.query_start_loc[index : index + 2].tolist()
            for token in range(first, end):
                known = kv_len - (end - 1 - token)
                hidden[token] = next_token(held[:known, 0].tolist())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.hidden_rows.append(len(hidden))
        logits = torch.zeros(len(hidden), VOCAB)
        for row, token in enumerate(hidden[:, 0].long().tolist()):
            logits[row, token] = 50.0
            if token in self.poisoned:
                logits[row, 3] = torch.nan
        return logits


def check(meta: AttentionMetadata, num_tokens: int, block_size: int) -> None:
    """The promises that attention backends rely on."""
    lengths = meta.query_start_loc.diff().tolist()
    assert meta.query_start_loc.dtype == meta.kv_lens.dtype == torch.int32
    assert meta.block_table.dtype == torch.int32
    assert meta.slot_mapping.dtype == torch.int64
    assert meta.query_start_loc[0] == 0
    assert lengths == meta.query_lens_host
    assert sum(lengths) == num_tokens == len(meta.slot_mapping)
    assert meta.kv_lens.tolist() == meta.kv_lens_host
    assert lengths[: meta.num_decodes] == [1] * meta.num_decodes
    longest = max(meta.kv_lens_host)
    assert meta.block_table.shape == (len(lengths), -(-longest // block_size))


def make_runner(
    *,
    max_rows: int = 6,
    max_tokens: int = 64,
    num_blocks: int = 40,
    block_size: int = 4,
    like_a_device: bool = False,
) -> tuple[ModelRunner, FakeModel, FakeAttention]:
    """``like_a_device``: arrays are packed and copied, the block table is a second memory."""
    upload = Uploader(CPU, packed=like_a_device)
    rows = InputBatch(max_rows, max_tokens, block_size, upload)
    model, attention = FakeModel(), FakeAttention(num_blocks, block_size)
    runner = ModelRunner(model, attention, rows, VOCAB)  # type: ignore[arg-type]
    return runner, model, attention


def new_row(
    row: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    sampling: SamplingParams = GREEDY,
    prompt: int | None = None,
) -> NewRow:
    count = len(tokens) if prompt is None else prompt
    return NewRow(row, row, list(tokens), count, list(blocks), sampling)


def step_of(*entries: tuple[int, int, int, bool], **changes: Any) -> Step:
    """Entries are (row, start, count, samples), decodes first."""
    step = Step(0, **changes)
    for row, start, count, samples in entries:
        step.rows.append(row)
        step.starts.append(start)
        step.counts.append(count)
        step.samples.append(int(samples))
    uniform = [count == 1 and samples for _, _, count, samples in entries]
    step.num_decodes = uniform.index(False) if False in uniform else len(uniform)
    return step


def run(runner: ModelRunner, step: Step) -> Any:
    return runner.sample(runner.launch(step)).wait()
