"""Configurations: as the user set it, as the model and the device allow, and as resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tgi_cli.config.settings import default


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of the engine that :func:`tgi_cli.config.resolve` passes on unchanged.

    Names, meanings and defaults are those of TGI's launcher; see the table of settings.
    """

    model_id: str
    trust_remote_code: bool = False
    max_batch_total_tokens: int | None = None
    batching: str = default("batching")
    capacity_policy: str = default("capacity_policy")
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    prefix_caching: bool = default("prefix_caching")
    kv_cache_dir: Path | None = None
    """Folder in which KV blocks are kept, or None."""
    kv_cache_dir_size: int | None = None
    """Maximum bytes of its files, or None for the default."""
    kv_offloading_size: int | None = None
    """Bytes of the host's memory for KV blocks that a GPU evicts, of all shards; None for none."""
    disable_grammar_support: bool = False
    quantize_head: bool = False
    quantize_head_bits: int | None = None
    cuda_memory_fraction: float = default("cuda_memory_fraction")
    rope_scaling: str | None = None
    rope_factor: float | None = None
    load_format: str = default("load_format")
    cross_check: bool = False
    measured_limits: bool = default("measured_limits")
    state_prefill: str = default("state_prefill")
    replicas: int = default("replicas")
    pipeline_parallel_size: int = default("pipeline_parallel_size")
    """Stages that the model's layers are divided into."""
    nnodes: int = default("nnodes")
    """Nodes that the processes of the model are divided among."""
    json_output: bool = False

    @property
    def head_bits(self) -> int | None:
        """Bits that the output head is quantized to, or None if it is not."""
        return self.quantize_head_bits or (8 if self.quantize_head else None)

    @property
    def rope(self) -> tuple[str, float] | None:
        """Kind and factor of RoPE scaling, with TGI's defaults, or None to use the model's."""
        if self.rope_scaling is None and self.rope_factor is None:
            return None
        return self.rope_scaling or "linear", self.rope_factor or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineOptions):
    """Settings as the user made them; None where a default depends on model or device."""

    revision: str | None = None
    model_gguf: str | None = None
    """GGUF file with the weights; ``model_id`` then names the tokenizer, if it is given."""
    tokenizer_name: str | None = None
    """Id or folder whose tokenizer replaces that of a GGUF file."""
    dtype: str | None = None
    hostname: str = default("hostname")
    port: int = default("port")
    max_concurrent_requests: int = default("max_concurrent_requests")
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_prefill_delay: int | None = None
    max_batch_size: int | None = None
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    kv_cache_dtype: str = default("kv_cache_dtype")
    attention: str = default("attention")
    cuda_graphs: tuple[int, ...] | None = None
    """Batch sizes to capture CUDA graphs for; with 0 among them, none."""
    quantize: str | None = None
    quantize_activations: bool | None = None
    """None: where there are weights in integers, and kernels for it."""
    disable_custom_kernels: bool = False
    sharded: bool | None = None
    num_shard: int | None = None
    node_rank: int = default("node_rank")
    master_addr: str = default("master_addr")
    master_port: int = default("master_port")
    node_secret_file: Path | None = None
    """File with what the nodes authenticate each other by."""
    lora_adapters: tuple[str, ...] = ()
    """``id``, ``id@revision`` or ``name=path``; for the model server always ``name=path``."""
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    shard_uds_path: Path | None = None
    """Socket on which TGI's clients find the first shard, without its ``-0``."""
    speculate: int | None = None
    speculative_config: str | None = None
    speculative_model: str | None = None
    """Id or folder of weights that draft; for the model server always a folder."""
    watermark_gamma: float = default("watermark_gamma")
    watermark_delta: float = default("watermark_delta")
    max_restarts: int = default("max_restarts")
    watchdog_timeout: float = default("watchdog_timeout")
    otlp_endpoint: str | None = None
    otlp_service_name: str = default("otlp_service_name")
    logger_level: str = default("logger_level")
    graceful_termination_timeout: int = default("graceful_termination_timeout")

    @property
    def asks_for_drafts(self) -> bool:
        """Whether the user has set how much is speculated."""
        return self.speculate is not None or self.speculative_config is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """How an encoder-decoder model answers: the prompt is the encoder's, the answer the decoder's.

    Token ids are those of the generation config, under the names in parentheses.
    """

    start_id: int
    """Token that the decoder is given first, no part of the answer (``decoder_start_token_id``)."""
    first_id: int | None = None
    """Token that every answer begins with (``forced_bos_token_id``), such as a language code."""
    last_id: int | None = None
    """Token that an answer of the full length ends with (``forced_eos_token_id``)."""
    max_input_tokens: int | None = None
    """Positions of the encoder, or None if there is no limit."""
    max_tokens: int | None = None
    """Positions of the decoder, likewise."""
    usual_total_tokens: int | None = None
    """Default of ``max_total_tokens``, or None for the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of a checkpoint."""

    architecture: str
    model_type: str
    dtype: str
    """Data type of the weights on disk: ``float32``, ``bfloat16`` or ``float16``."""
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    """Keys and values of all layers at one byte per element, to be multiplied by the size of the
    cache's data type."""
    quantization: str | None = None
    """Format of quantized weights, or None if they are not quantized."""
    integer_weights: bool = False
    """Whether they are integers of 8 bits or fewer, or some of them are."""
    num_heads: int | None = None
    """Attention heads of the layer with the fewest, or None if unknown."""
    num_kv_heads: int | None = None
    """Key-value heads, likewise."""
    dense_positions: int | None = None
    """Longest text that a model with sparse attention attends to as a whole, or None if attention
    is not sparse. Longer ones are not served."""
    whole_prompts: bool = False
    """Whether all tokens of a prompt see each other, whether they stand for images or not."""
    decoder: DecoderFacts | None = None
    """Of an encoder-decoder model; its ``max_position_embeddings`` are those of both parts."""
    takes_images: bool = False
    """Whether it takes images."""
    torch_products: bool = False
    """Whether torch computes products of the decoder, which on a CPU without instructions for
    bfloat16 take several times as long as in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """The image encoder of a model, as warm-up has measured it."""

    layers: int
    """At which its run over an image may be interrupted; of a tower that encodes the tiles of an
    image one after the other, those of all tiles."""
    row_cost: float
    """Prompt tokens that take as long to compute as it takes to encode an image, for each of the
    image's tokens."""
    cache_rows: int
    """Tokens' worth of encoded images that the worker keeps, at least one of the largest."""
    token_seconds: float = 0.0
    """Time to compute a prompt's token beside others, or 0 if it is unknown."""
    step_seconds: float = 0.0
    """Duration of a step of one token, likewise."""
    interrupts: bool = False
    """Whether a run may also be interrupted within layers, when its time is up: on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Properties of a device."""

    kind: str
    """``cpu`` or ``cuda``."""
    name: str
    total_memory: int
    """Bytes; on a CPU those of the system or of the control group."""
    native_bfloat16: bool
    """Whether the hardware multiplies bfloat16 matrices."""
    kernels: bool = False
    """Whether there are kernels of ours for this CPU, which multiply bfloat16 on any."""
    count: int = 1
    """Number of devices of this kind."""
    chosen: int | None = None
    """Number of devices that environment variables select, or None if none is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """A fully resolved configuration. Counts are tokens unless their name states otherwise."""

    model_path: Path
    revision: str
    device: str
    dtype: str
    block_size: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    """Prompt tokens per step over all requests: the size of a prefill chunk."""
    max_prefill_delay: int = 0
    """Milliseconds by which prompts may lengthen a step beside decodes; 0: no limit."""
    max_batch_size: int
    """Sequences in the running batch: the worker's rows."""
    waiting_served_ratio: float
    max_waiting_tokens: int
    kv_cache_dtype: str
    """PyTorch's name."""
    quantize: str | None
    """Format into which unquantized weights are quantized on load, or None."""
    quantize_activations: bool = False
    """Whether activations are rounded to 8 bits for products with integers."""
    max_loras: int
    """Adapter slots on the device; 0: no adapter can be loaded."""
    max_cpu_loras: int
    max_lora_rank: int
    """Rank that a slot holds."""
    num_shard: int
    attention: str | None
    """Attention backend, or None for the device's default."""
    cuda_graphs: tuple[int, ...] | None
    """Batch sizes to capture CUDA graphs for, or None for sizes up to ``max_batch_size``."""
    speculate: int
    """Maximum draft tokens of a sequence in one step; 0: no speculative decoding."""
    drafts_from_answers: bool
    """Whether drafts may come from recent answers to others with the same salt and adapter."""
    speculative_model: str | None
    """Folder of weights that draft, or None."""
    speculative_method: str | None
    """What they are said to be (one of :data:`tgi_cli.config.speculation.METHODS`), or None."""
    explicit_limits: tuple[str, ...]
    """Limits that the user set: warm-up does not lower them. Those of drafts are among them."""
    decoder: DecoderFacts | None = None
    """Of an encoder-decoder model, or None."""

    @property
    def num_processes(self) -> int:
        """Processes of the model: the shards of all pipeline stages."""
        return self.num_shard * self.pipeline_parallel_size

    @property
    def local_processes(self) -> int:
        """Processes of the model on each node."""
        return self.num_processes // self.nnodes

    def node_of(self, number: int) -> int:
        """The node of a process; node 0 has number 0."""
        return number // self.local_processes

    def device_index(self, number: int) -> int:
        """The device of a process, of those on its node."""
        return number % self.local_processes

    def process_name(self, number: int) -> str:
        """What messages call a process of the model; number 0 has the last stage."""
        stages, size = self.pipeline_parallel_size, self.num_shard
        node = f" on node {self.node_of(number)}" if self.nnodes > 1 else ""
        if stages == 1:
            return f"shard {number}{node}"
        shard = f"shard {number % size} of " if size > 1 else ""
        return f"{shard}stage {stages - 1 - number // size}{node}"

    def stages_on(self, node: int) -> list[str]:
        """The stages of which a node has processes, or its shards if there is one stage."""
        stages, size, own = self.pipeline_parallel_size, self.num_shard, self.local_processes
        numbers = range(node * own, (node + 1) * own)
        if stages == 1:
            return [f"shard {number}" for number in numbers]
        found = sorted({stages - 1 - number // size for number in numbers})
        return [f"stage {stage}" for stage in found]

    @property
    def depth(self) -> int:
        """Steps launched beyond the one whose result is awaited."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size - 1
        return 0 if self.device == "cpu" else 1

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest request, with the one that a decoder starts with."""
        return self.max_total_tokens + (self.decoder is not None)
