"""Paged attention by Triton's kernels, for CUDA.

A step's attention is cut into work items on the device (:mod:`tgi_cli.attention.triton_work`). One
launch computes for sequences of few tokens, decodes above all, and one for the others, prompts.
No launch waits for the device. Steps of a fixed size can be planned without their lengths, and then
a CUDA graph can hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from triton.runtime import driver

from tgi_cli.attention import triton_tiles as tiles
from tgi_cli.attention.base import AttentionMetadata, PagedAttention
from tgi_cli.attention.spec import KVScales, KVSpec
from tgi_cli.attention.triton_cache import how_to_read, stage, write_cache
from tgi_cli.attention.triton_latent import LatentRows, attend_latents, latent_rule
from tgi_cli.attention.triton_launch import Launch, LayerKind
from tgi_cli.attention.triton_work import ListSize, Rule, Work, limits_of, make_work, sizes_of

_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What is known of a step whose lengths are on the device alone."""

    rows: int
    max_keys: int
    tokens: int | None = None
    """Tokens of all sequences; None if each has one."""


class _Step:
    """A plan, and the lists of work that layers have asked for."""

    def __init__(self, metadata: AttentionMetadata, limits: _Limits | None = None) -> None:
        self.metadata = metadata
        self._limits = limits
        self.has_padding = limits is not None and limits.tokens is not None
        self._lens: tuple[np.ndarray, np.ndarray] | None = None
        self._work: dict[tuple[Rule, bool], Work] = {}

    def work(self, rule: Rule) -> Work:
        """The lists by this rule, made before the first layer that needs them.

        What makes them is part of a graph, even if the step has run before its capture.
        """
        captured = self._limits is not None and self.metadata.kv_lens.device.type == "cuda"
        captured = captured and torch.cuda.is_current_stream_capturing()
        known = self._work.get((rule, captured))
        if known is None:
            made = make_work(self.metadata, rule, self._sizes(rule))
            known = self._work[rule, captured] = made
        return known

    def _sizes(self, rule: Rule) -> tuple[ListSize, ListSize]:
        limits = self._limits
        if limits is not None:
            return limits_of(rule, limits.rows, limits.max_keys, limits.tokens)
        if self._lens is None:
            self._lens = (
                np.array(self.metadata.query_lens_host, np.int64),
                np.array(self.metadata.kv_lens_host, np.int64),
            )
        return sizes_of(rule, *self._lens)


class TritonAttention(PagedAttention):
    """For bfloat16, float16 and float32, and any head_dim: above 256 its tiles become small.

    The cache may be of 8-bit floats on every GPU; those from compute capability 8.9 on read them
    by casts, the others from their bits.

    Attributes:
        hardware: of the device.
        launches: how the kernels are run, for each kind of layer so far.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(specs, block_size, dtype, device, cache_dtype)
        self.hardware = tiles.Hardware()
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            index = torch.cuda.current_device() if device.index is None else device.index
            self.hardware = tiles.Hardware(
                properties.multi_processor_count,
                driver.active.utils.get_device_properties(index)["max_shared_mem"],
                (properties.major, properties.minor),
            )
        self._step: _Step | None = None
        self._buffers: AttentionMetadata | None = None
        self.launches: dict[LayerKind, Launch] = {}

    def use_scales(self, scales: Mapping[int, KVScales]) -> bool:
        self.scales = dict(scales)
        return True

    def plan(self, metadata: AttentionMetadata) -> None:
        self.planned, self._step = metadata, _Step(metadata)

    def decode_buffers(self, max_rows: int, max_blocks: int) -> AttentionMetadata | None:
        if any(spec.index for spec in self.specs):
            return None  # how long sequences are is known on the host, outside of a graph

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        starts = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        slots = zeros(max_rows, dtype=torch.int64).fill_(-1)
        lens, table = zeros(max_rows), zeros(max_rows, max_blocks)
        self._buffers = AttentionMetadata(starts, lens, table, slots, [], [], max_rows)
        return self._buffers

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        if any(spec.index for spec in self.specs):
            raise ValueError("sparse attention has no steps of unknown lengths")
        limits = _Limits(len(metadata.kv_lens), max_context, len(metadata.slot_mapping))
        self.planned, self._step = None, _Step(metadata, limits)

    def plan_padded(self, metadata: AttentionMetadata | None, rows: int) -> None:
        buffers = self._buffers
        self.planned = None
        if buffers is None:
            raise ValueError("decodes of a padded size need decode_buffers first")
        max_rows, max_blocks = buffers.block_table.shape
        source = metadata
        if source is None:
            nothing = slice(0, 0)
            source = AttentionMetadata(
                buffers.query_start_loc[:1],
                buffers.kv_lens[nothing],
                buffers.block_table[nothing],
                buffers.slot_mapping[nothing],
                [],
                [],
                0,
            )
        count, width = source.block_table.shape
        if not count <= rows <= max_rows or width > max_blocks:
            raise ValueError(
                f"{count} rows of {width} blocks as {rows} rows, of {max_rows} x {max_blocks}"
            )
        if not count == source.num_decodes == source.slot_mapping.shape[0]:
            raise ValueError(f"{source.num_decodes} of {count} sequences are decodes")
        stage(
            source.kv_lens,
            source.slot_mapping,
            source.block_table,
            buffers.kv_lens,
            buffers.slot_mapping,
            buffers.block_table,
            rows,
        )
        padded = AttentionMetadata(
            buffers.query_start_loc[: rows + 1],
            buffers.kv_lens[:rows],
            buffers.block_table[:rows],
            buffers.slot_mapping[:rows],
            [1] * rows,
            [],
            rows,
        )
        # That the longest could fill its blocks is all that a launch may depend on.
        self._step = _Step(padded, _Limits(rows, max_blocks * self.block_size))

    @property
    def step_slots(self) -> Tensor:
        return self._planned.metadata.slot_mapping

    @property
    def _planned(self) -> _Step:
        if self._step is None:
            raise ValueError("attention before the first plan")
        return self._step

    def write(self, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        key, value = _rows(key), None if value is None else _rows(value)
        key_cache, value_cache = self.raw(self.key_cache[layer]), self.raw(self.value_cache[layer])
        bits = how_to_read(self.cache_dtype, casts=False)
        factors = self.write_factors(layer)
        write_cache(key, value, key_cache, value_cache, slots, bits, factors)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if key is not None:
            self.write(layer, key, value, self.step_slots)
        return self.attend(layer, query, scale, softcap, sinks, bias)

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        step, spec = self._planned, self.specs[layer]
        query = _rows(query)
        tokens, heads, _ = query.shape
        # Of a fixed size, there may be tokens that belong to no sequence.
        make = torch.zeros if step.has_padding else torch.empty
        output = make((tokens, heads, spec.value_width), dtype=query.dtype, device=query.device)
        if _has_latents(spec) and softcap is None and bias is None:
            self._attend_latents(layer, query, output, scale, sinks)
            return output
        if bias is not None:
            bias = bias.float().contiguous()
        launch = self._launch(
            LayerKind(
                spec,
                heads,
                self.block_size,
                self.dtype,
                self.cache_dtype,
                softcap is not None,
                sinks is not None,
                0 if bias is None else bias.shape[1],
                step.metadata.visible_until is not None and spec.spans != "none",
            )
        )
        scales = self.scales.get(layer, KVScales())
        scale *= scales.key
        arguments = {
            "query": query,
            "key_cache": self.raw(self.key_cache[layer]),
            "value_cache": self.raw(self.value_cache[layer]),
            "sinks": query if sinks is None else sinks,
            "bias": query if bias is None else bias,
            "scale": scale * _LOG2E if softcap is None else 2.0 * scale / softcap,
            "cap": 0.0 if softcap is None else softcap * _LOG2E,
            "value_scale": scales.value,
            "query_stride": query.stride(0),
            "query_head_stride": query.stride(1),
        }
        launch.run(step.metadata, step.work(launch.rule), output, sinks, arguments)
        return output

    def _launch(self, kind: LayerKind) -> Launch:
        known = self.launches.get(kind)
        if known is None:
            known = self.launches[kind] = Launch.of(kind, self.hardware)
        return known

    def _attend_latents(
        self, layer: int, query: Tensor, output: Tensor, scale: float, sinks: Tensor | None
    ) -> None:
        step, spec = self._planned, self.specs[layer]
        bits = how_to_read(self.cache_dtype, self.hardware.casts_fp8)
        rows = LatentRows(self.raw(self.key_cache[layer]), spec.value_width, bits)
        work = step.work(latent_rule(self.hardware, query.shape[1], rows, query.dtype))
        attend_latents(query, output, rows, step.metadata, work, scale, sinks, self.hardware)


def _has_latents(spec: KVSpec) -> bool:
    """Whether all heads share keys that have values within."""
    return spec.values_in_keys and spec.num_kv_heads == 1 and spec.reach is None


def _rows(tensor: Tensor) -> Tensor:
    """With the dimensions of a head side by side, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def probe() -> None:
    """Compile and launch kernels. Raises what Triton raises where it cannot, and RuntimeError for
    GPUs before compute capability 8.0, whose tensor cores it does not know."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("its kernels are for GPUs of compute capability 8.0 and later")
    attention = TritonAttention([KVSpec(1, 16)], 16, torch.float16, device)
    attention.allocate(1)
    attention.decode_buffers(1, 1)
    attention.plan_padded(None, 1)
    tokens = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    attention(0, tokens, tokens, tokens, 1.0)
