"""Answers about the server, for probes and for gateways in front of it.

The gateways' are those of SGLang (https://docs.sglang.ai/basic_usage/native_api.html), which SMG
and others read, and of vLLM's render endpoints.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class ReplicaHealth(msgspec.Struct, kw_only=True):
    """Whether a replica can answer requests."""

    replica: int
    healthy: bool


class Health(msgspec.Struct, kw_only=True):
    """The answer of ``/health`` with several replicas, or while the model server sleeps.

    Otherwise it has no content.
    """

    status: Literal["ok", "degraded", "asleep"]
    replicas: list[ReplicaHealth] | UnsetType = UNSET
    """Unset while they sleep."""


class ServerInfo(msgspec.Struct, kw_only=True):
    """The answer of ``/server_info``, under SGLang's names.

    ``max_total_tokens`` and ``max_running_requests`` are what all replicas hold and run at once;
    ``context_length`` is the limit of a request.
    """

    model_id: str
    model_path: str
    served_model_name: str
    version: str
    dtype: str
    quantization: str | None
    device: str
    tp_size: int
    dp_size: int
    pp_size: int
    context_length: int
    max_total_tokens: int
    max_running_requests: int
    is_embedding: bool


class ModelInfo(msgspec.Struct, kw_only=True):
    """The answer of ``/model_info``, under SGLang's names."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    model_type: str
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool
    max_model_len: int


class ReplicaLoad(msgspec.Struct, kw_only=True):
    """The load of one replica, SGLang's data-parallel rank.

    Shares are between 0 and 1; ``cache_hit_rate`` is that of all prompt tokens so far.
    """

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


class Loads(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/loads``; ``timestamp`` is in UTC, by ISO 8601."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[ReplicaLoad]


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """A prompt as token ids, under the names of vLLM's render endpoints."""

    request_id: str
    model: str
    token_ids: list[int]
