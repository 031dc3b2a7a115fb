"""What users say, what checkpoints and devices say, and what an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 16
"""Tokens per KV block: small enough for prefix reuse, whole cache lines for the CPU gather."""

DEFAULT_PREFILL_TOKENS = 4096
"""TGI's default budget of prompt tokens per step, on an accelerator."""

DEFAULT_CPU_PREFILL_TOKENS = 512
"""The same on a CPU: one chunk stays near a quarter of a second for a 0.1B model."""

MOST_SEQUENCES = 4096
"""That run at once, however many a user asks for: each takes a row of the worker's tables."""

MOST_CONTEXT = 1 << 24
"""Tokens of one sequence, whatever context a model states; Llama 4 Scout's is 10,485,760. Each row
of the worker's tables is as long."""

WAITING_SERVED_RATIO = 0.3
MAX_WAITING_TOKENS = 20
"""The defaults of TGI's launcher."""

DEFAULT_LORAS = 4
"""Adapters in one step, where any are named."""

DEFAULT_CPU_LORAS = 32
"""Adapters that are kept on the host."""

DEFAULT_LORA_RANK = 64
"""What slots are made for where no adapter is named; one of rank 16 fills a quarter of it."""

LEAST_LORA_RANK = 16
"""What they are made for at least."""

BATCHINGS = ("fused", "inflight", "static")
CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
LOAD_FORMATS = ("auto", "dummy")
ON_THE_FLY = ("fp8", "int8", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4")
"""What ``--quantize`` makes of plain weights as they are loaded: TGI's names, and int8."""

IN_CHECKPOINTS = ("gptq", "awq", "compressed-tensors", "marlin", "exl2")
"""What else it may name, of a checkpoint that is quantized so."""

ATTENTIONS = {
    "auto": None,
    "triton": "cuda",
    "flashinfer": "cuda",
    "native": "cpu",
    "cpu": "cpu",
    "torch": None,
    "paged": None,
    "flashdecoding": None,
}
"""What computes attention, and the device that it is for; the last two are TGI's names, which
stand for what suits the device."""

KV_CACHE_DTYPES = {"auto": None, "fp8_e4m3fn": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""TGI's names, and the dtypes' own; auto: that of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What the command line and the environment said; ``None`` where they said nothing.

    Names, meanings and defaults are those of TGI's launcher.
    """

    model_id: str
    revision: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    hostname: str = "0.0.0.0"
    port: int = 3000
    max_concurrent_requests: int = 128
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    batching: str = "fused"
    capacity_policy: str = "max_utilization"
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    prefix_caching: bool = True
    disable_grammar_support: bool = False
    kv_cache_dtype: str = "auto"
    attention: str = "auto"
    cuda_graphs: tuple[int, ...] | None = None
    """Batch sizes to record CUDA graphs for; 0 among them: none."""
    quantize: str | None = None
    quantize_head: bool = False
    cuda_memory_fraction: float = 1.0
    rope_scaling: str | None = None
    rope_factor: float | None = None
    disable_custom_kernels: bool = False
    measured_limits: bool = True
    sharded: bool | None = None
    num_shard: int | None = None
    load_format: str = "auto"
    cross_check: bool = False
    lora_adapters: tuple[str, ...] = ()
    """Each ``id``, ``id@revision`` or ``name=path``; for the model server always the last."""
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    shard_uds_path: Path | None = None
    """Where TGI's own clients look for the first shard, less its ``-0``."""
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    max_restarts: int = 5
    watchdog_timeout: float = 60.0
    logger_level: str = "INFO"
    json_output: bool = False
    graceful_termination_timeout: int = 90

    @property
    def rope(self) -> tuple[str, float] | None:
        """Kind and factor of the scaling that was asked for, as TGI fills in the missing one."""
        if self.rope_scaling is None and self.rope_factor is None:
            return None
        return self.rope_scaling or "linear", self.rope_factor or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the checkpoint says of itself."""

    architecture: str
    model_type: str
    dtype: str
    """Of the weights on disk: ``float32``, ``bfloat16`` or ``float16``."""
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    """Both caches, all layers, at one byte per element: multiply by the cache dtype's size."""
    quantization: str | None = None
    """What the weights on disk are quantized with; None: they are plain."""
    num_heads: int | None = None
    """Attention heads, and key-value heads, of the layer that has fewest; None: not known."""
    num_kv_heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the device offers."""

    kind: str
    """``cpu`` or ``cuda``."""
    name: str
    total_memory: int
    """Bytes; on a CPU what the system (or the control group) has."""
    native_bfloat16: bool
    """Whether bf16 matrix products run in hardware; else fp32 is the better default."""
    count: int = 1
    """Devices of this kind that there are."""
    chosen: int | None = None
    """Devices that the environment chose for this program; None: it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A fully specified engine. Counts are tokens unless their name says otherwise."""

    model_path: Path
    model_id: str
    revision: str
    device: str
    dtype: str
    block_size: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    """Prompt tokens computed in one step, over all requests: the size of a prefill chunk."""
    max_batch_total_tokens: int | None
    """KV budget that the user asked for; ``None``: whatever warm-up finds to fit."""
    max_batch_size: int
    """Sequences that run at once: the worker's rows."""
    prefix_caching: bool
    batching: str = "fused"
    """Who may join the running batch, and when: one of :data:`BATCHINGS`."""
    capacity_policy: str = "max_utilization"
    """What a sequence that was let in is promised: one of :data:`CAPACITY_POLICIES`."""
    waiting_served_ratio: float = WAITING_SERVED_RATIO
    max_waiting_tokens: int = MAX_WAITING_TOKENS
    max_queued_requests: int | None = None
    """Requests that may wait; ``None``: no bound."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait; ``None``: no bound."""
    kv_cache_dtype: str = "auto"
    """Of the cache's elements; from :func:`resolve` always a dtype's name."""
    quantize: str | None = None
    """What plain weights are brought into as they are loaded, one of :data:`ON_THE_FLY`."""
    quantize_head: bool = False
    """Whether the output head is brought into 8 bits as it is loaded."""
    max_loras: int = 0
    """LoRA adapters in one step: slots on the device; 0: none can be loaded."""
    max_cpu_loras: int = DEFAULT_CPU_LORAS
    """Adapters that are kept on the host."""
    max_lora_rank: int = DEFAULT_LORA_RANK
    """Of the slots."""
    num_shard: int = 1
    """Processes that share the model's weights and compute every step together."""
    attention: str | None = None
    """What computes it; None: what suits the device."""
    cuda_graphs: tuple[int, ...] | None = None
    """Numbers of rows to capture CUDA graphs of decode steps for; empty: no graphs; ``None``:
    what suits ``max_batch_size``."""
    cuda_memory_fraction: float = 1.0
    """Share of a GPU's memory to use."""
    trust_remote_code: bool = False
    load_format: str = "auto"
    rope: tuple[str, float] | None = None
    """Kind and factor of RoPE scaling, or None to use the checkpoint's."""
    grammars: bool = True
    """Whether requests may constrain their output."""
    cross_check: bool = False
    """Compare greedy tokens with transformers before serving."""
    measured_limits: bool = True
    """Start with the limits that ``tgi warmup`` saved, if they still hold."""
    explicit_limits: tuple[str, ...] = ()
    """Limits that the user set: warm-up does not lower them."""
    json_output: bool = False
