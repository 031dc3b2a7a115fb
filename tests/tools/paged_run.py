"""Drives a model over a paged cache as a worker would, for tests of what lies below it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.tools.image_prompts import ImageChunk
from tgi_cli.attention import AttentionMetadata, StateMetadata, create_attention
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.models.base import ImageRows
from tgi_cli.models.cpu_program import compile_program
from tgi_cli.quantization import unquantized

CPU = torch.device("cpu")
SLOTS = 64
"""Of recurrent states: twice as many as sequences at most."""
NOWHERE = 2**31 - 1
"""A block id that is out of range: to follow it is an error."""


def load(path: Path, dtype: torch.dtype = torch.float32, input_bits: int = 16) -> CausalLM:
    """The model of a checkpoint, on the CPU."""
    return load_model(read_config(path), dtype, CPU, input_bits=input_bits)


def expected(path: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' logits of a text, float32 [n, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
        return logits.float()


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of the tiny vocabulary."""
    return random.Random(seed).choices(range(256), k=count)


def kernels_add_up_rows_alike(dtype: torch.dtype) -> bool:
    """Whether this processor's kernels have the property that the code above them keeps."""
    query = torch.randn(1, 2, 64, 16).to(dtype)
    keys, mask = torch.randn(1, 2, 512, 16).to(dtype), torch.zeros(64, 512).to(dtype)
    mask[:, :48] = float("-inf")
    mask[:, 100:] = float("-inf")

    def attend(rows: int, first: int, end: int) -> Tensor:
        seen = keys[:, :, first:end]
        attended = scaled_dot_product_attention(
            query[:, :, :rows], seen, seen, attn_mask=mask[:rows, first:end]
        )
        return attended[:, :, :4]

    x, packed = (
        torch.randn(64, 1536).to(dtype),
        unquantized.pack_onednn(torch.randn(48, 1536).to(dtype)),
    )
    return (
        packed is not None
        and torch.equal(attend(4, 0, 112), attend(64, 0, 512))
        and torch.equal(attend(4, 48, 112), attend(64, 0, 512))
        and torch.equal(
            unquantized.onednn_linear(x[:2], packed, None),
            unquantized.onednn_linear(x, packed, None)[:2],
        )
    )


def make_metadata(
    tables: list[list[int]], query_lens: list[int], kv_lens: list[int], block_size: int
) -> AttentionMetadata:
    """Metadata of a step; unused places of the block table hold an id that is out of range."""
    width = max(map(len, tables)) + 1
    padded = [table + [NOWHERE] * (width - len(table)) for table in tables]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, query_len, kv_len in zip(tables, query_lens, kv_lens, strict=True)
        for position in range(kv_len - query_len, kv_len)
    ]
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] == 1:
        decodes += 1
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=torch.tensor(padded, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        query_lens_host=query_lens,
        kv_lens_host=kv_lens,
        num_decodes=decodes,
    )


class PagedRun:
    """Token sequences over one model; blocks are handed out in random order.

    A model that compiles to a program runs as one, unless ``eager``.
    Blocks behind the model's window are taken back at once, as an engine may do. A recurrent state
    moves to another slot at each step, and its old slot is spoiled.
    """

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        backend: str | None,
        block_size: int = 16,
        cache_dtype: torch.dtype | None = None,
        eager: bool = False,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.attention = create_attention(
            backend, model.kv_specs, block_size, dtype, CPU, cache_dtype, model.state_specs
        )
        self.program = None if eager else compile_program(model, self.attention)
        self.attention.allocate(512)
        for cache in (*self.attention.key_cache, *self.attention.value_cache):
            cache.fill_(float("nan"))  # nothing that was not written may be read
        self._slots: dict[str, int] = {}
        self._snapshots: dict[str, tuple[int, int]] = {}
        self._free_slots: list[int] = []
        if self.attention.states is not None:
            self.attention.states.allocate(SLOTS)
            self._free_slots = random.Random(1).sample(range(SLOTS), SLOTS)
            for slot in self._free_slots:
                self._spoil(slot)
        self._free = random.Random(0).sample(range(512), 512)
        self._tables: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(
        self,
        tokens: dict[str, list[int]],
        snapshots: Mapping[str, int] | None = None,
        images: Mapping[str, ImageChunk] | None = None,
    ) -> dict[str, Tensor]:
        """Append tokens to sequences in one forward pass; float32 logits [n, vocab] of each.

        ``snapshots``: after how many of its tokens a sequence leaves one, for :meth:`resume`.
        ``images``: what images change for its tokens.
        """
        order = sorted(tokens, key=lambda name: len(tokens[name]) != 1)
        for name in order:
            table = self._tables.setdefault(name, [])
            self._lens[name] = self._lens.get(name, 0) + len(tokens[name])
            while len(table) * self.block_size < self._lens[name]:
                table.append(self._free.pop())
        query_lens = [len(tokens[name]) for name in order]
        kv_lens = [self._lens[name] for name in order]
        ids = torch.tensor([token for name in order for token in tokens[name]])
        positions = torch.tensor(
            [p for q, k in zip(query_lens, kv_lens, strict=True) for p in range(k - q, k)]
        )
        metadata = make_metadata(
            [self._tables[name] for name in order], query_lens, kv_lens, self.block_size
        )
        seen = _joined(order, query_lens, positions, images or {})
        if seen.positions is not None:
            positions = seen.positions
        if seen.until is not None:
            metadata = replace(metadata, visible_until=seen.until)
        with torch.inference_mode():
            placed, rows = self.place(order, query_lens, positions, metadata)
            self.attention.plan(metadata)
            left = self._plan_states(order, query_lens, snapshots or {})
            runs = self.program or self.model
            hidden = runs.forward(ids, placed, self.attention, rows or seen.rows)
            logits = self.model.logits(hidden)
        for name in order:
            self._leave_behind(name)
        for slot in left:
            self._spoil(slot)
            self._free_slots.insert(0, slot)
        return dict(zip(order, torch.split(logits, query_lens), strict=True))

    def place(
        self,
        order: list[str],
        query_lens: list[int],
        positions: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, ImageRows | None]:
        """Positions for the model, and the images of a step; ``metadata`` may be completed."""
        return positions, None

    def resume(self, name: str, source: str) -> None:
        """Begin a sequence with what ``source`` had at its last snapshot, whole blocks."""
        length, slot = self._snapshots.pop(source)
        assert length % self.block_size == 0
        self._tables[name] = self._tables[source][: length // self.block_size]
        self._lens[name], self._slots[name] = length, slot

    def _plan_states(
        self, order: list[str], query_lens: list[int], snapshots: Mapping[str, int]
    ) -> list[int]:
        """Slots of the step; returns those that are read in it for the last time."""
        states = self.attention.states
        if states is None:
            return []
        before = [self._slots.get(name, -1) for name in order]
        after = [self._free_slots.pop() for _ in order]
        self._slots.update(zip(order, after, strict=True))
        made = {}
        for name, tokens in snapshots.items():
            index, slot = order.index(name), self._free_slots.pop()
            made[index] = (tokens, slot)
            self._snapshots[name] = (self._lens[name] - query_lens[index] + tokens, slot)
        states.plan(StateMetadata.of(query_lens, before, after, CPU, made))
        return [slot for slot in before if slot >= 0]

    def _spoil(self, slot: int) -> None:
        """Leave in a slot what no layer may read."""
        assert self.attention.states is not None
        for tensors in self.attention.states.tensors:
            for tensor in tensors.values():
                tensor[slot] = float("nan") if tensor.is_floating_point() else -(10**6)

    def _leave_behind(self, name: str) -> None:
        window, table = self.model.kv_window, self._tables[name]
        if window is None:
            return
        for index in range(max(0, self._lens[name] - window + 1) // self.block_size):
            if table[index] != NOWHERE:
                for cache in (*self.attention.key_cache, *self.attention.value_cache):
                    cache[table[index]].fill_(float("nan"))  # what its next owner may write
                self._free.insert(0, table[index])
                table[index] = NOWHERE


def _joined(
    order: list[str], query_lens: list[int], positions: Tensor, images: Mapping[str, ImageChunk]
) -> ImageChunk:
    """What images change for all tokens of a step, which has the positions int64 [T]."""
    parts = [images.get(name, ImageChunk()) for name in order]
    starts = [0, *accumulate(query_lens)]
    rows = [(start, part.rows) for start, part in zip(starts, parts, strict=False) if part.rows]
    joined = on_axes = until = None
    if rows:
        joined = ImageRows(
            torch.cat([each.indices + start for start, each in rows]),
            torch.cat([each.features for _, each in rows]),
            tuple(map(torch.cat, zip(*(each.deepstack for _, each in rows), strict=True))),
        )
    if any(part.positions is not None for part in parts):
        plain = positions.expand(3, -1).split(query_lens, dim=1)
        on_axes = torch.cat(
            [
                own if part.positions is None else part.positions
                for own, part in zip(plain, parts, strict=True)
            ],
            dim=1,
        )
    if any(part.until is not None and part.until.max() >= 0 for part in parts):
        until = torch.cat(
            [
                torch.full((size,), -1, dtype=torch.int32) if part.until is None else part.until
                for size, part in zip(query_lens, parts, strict=True)
            ]
        )
    return ImageChunk(joined, on_axes, until)
