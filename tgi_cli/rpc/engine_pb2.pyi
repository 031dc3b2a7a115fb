from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("model_id", "revision", "model_type", "dtype", "device", "vocab_size", "eos_token_ids", "max_input_tokens", "max_total_tokens", "max_batch_prefill_tokens", "max_batch_total_tokens", "max_batch_size", "block_size", "weight_bytes", "load_seconds", "adapters", "grammar", "quantize", "num_shard", "step_seconds", "instance", "speculate", "decoder_start_ids", "vision", "max_image_rows", "kernels", "pipeline_parallel_size", "nodes")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARD_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_IDS_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_ROWS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    model_type: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    block_size: int
    weight_bytes: int
    load_seconds: float
    adapters: Adapters
    grammar: bool
    quantize: str
    num_shard: int
    step_seconds: float
    instance: str
    speculate: int
    decoder_start_ids: _containers.RepeatedScalarFieldContainer[int]
    vision: bool
    max_image_rows: int
    kernels: str
    pipeline_parallel_size: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_prefill_tokens: _Optional[int] = ..., max_batch_total_tokens: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., block_size: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., grammar: bool = ..., quantize: _Optional[str] = ..., num_shard: _Optional[int] = ..., step_seconds: _Optional[float] = ..., instance: _Optional[str] = ..., speculate: _Optional[int] = ..., decoder_start_ids: _Optional[_Iterable[int]] = ..., vision: bool = ..., max_image_rows: _Optional[int] = ..., kernels: _Optional[str] = ..., pipeline_parallel_size: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("max_loras", "loaded")
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    max_loras: int
    loaded: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, max_loras: _Optional[int] = ..., loaded: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source", "in_place")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    in_place: bool
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., in_place: bool = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("steps", "live_requests")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    live_requests: int
    def __init__(self, steps: _Optional[int] = ..., live_requests: _Optional[int] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsResponse(_message.Message):
    __slots__ = ("histograms", "counts", "queue_seconds", "load")
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    histograms: _containers.RepeatedCompositeFieldContainer[Histogram]
    counts: _containers.RepeatedCompositeFieldContainer[Count]
    queue_seconds: float
    load: EngineLoad
    def __init__(self, histograms: _Optional[_Iterable[_Union[Histogram, _Mapping]]] = ..., counts: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., queue_seconds: _Optional[float] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("queued", "running", "used_blocks", "preemptions", "reused_tokens", "prompt_tokens", "cached_blocks", "steps", "context_tokens", "used_state_slots", "cached_states", "drafted_tokens", "accepted_tokens", "encoded_images", "reused_images", "stored_bytes")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_STATES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    REUSED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    queued: int
    running: int
    used_blocks: int
    preemptions: int
    reused_tokens: int
    prompt_tokens: int
    cached_blocks: int
    steps: int
    context_tokens: int
    used_state_slots: int
    cached_states: int
    drafted_tokens: int
    accepted_tokens: int
    encoded_images: int
    reused_images: int
    stored_bytes: int
    def __init__(self, queued: _Optional[int] = ..., running: _Optional[int] = ..., used_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., context_tokens: _Optional[int] = ..., used_state_slots: _Optional[int] = ..., cached_states: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., encoded_images: _Optional[int] = ..., reused_images: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("name", "label", "bounds", "counts", "sum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    label: str
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, name: _Optional[str] = ..., label: _Optional[str] = ..., bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("name", "label", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    label: str
    count: int
    def __init__(self, name: _Optional[str] = ..., label: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("submit", "cancel", "tensors")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: int
    tensors: ImageTensors
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[int] = ..., tensors: _Optional[_Union[ImageTensors, _Mapping]] = ...) -> None: ...

class ImageTensors(_message.Message):
    __slots__ = ("digest", "tensors")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, digest: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "sampling", "max_new_tokens", "stop_token_ids", "ignore_eos", "cache_salt", "priority", "timeout_seconds", "fork_of", "prompt_logprobs", "client_id", "adapter", "grammar", "thinking", "prediction", "tenant", "first_id", "images", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    cache_salt: bytes
    priority: int
    timeout_seconds: float
    fork_of: int
    prompt_logprobs: int
    client_id: int
    adapter: str
    grammar: str
    thinking: ThinkingBudget
    prediction: _containers.RepeatedScalarFieldContainer[int]
    tenant: bytes
    first_id: int
    images: _containers.RepeatedCompositeFieldContainer[Image]
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., cache_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., fork_of: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., client_id: _Optional[int] = ..., adapter: _Optional[str] = ..., grammar: _Optional[str] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., prediction: _Optional[_Iterable[int]] = ..., tenant: _Optional[bytes] = ..., first_id: _Optional[int] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "span_starts", "span_counts", "grid_height", "grid_width", "bidirectional")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPAN_STARTS_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GRID_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_WIDTH_FIELD_NUMBER: _ClassVar[int]
    BIDIRECTIONAL_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    span_starts: _containers.RepeatedScalarFieldContainer[int]
    span_counts: _containers.RepeatedScalarFieldContainer[int]
    grid_height: int
    grid_width: int
    bidirectional: bool
    def __init__(self, digest: _Optional[bytes] = ..., span_starts: _Optional[_Iterable[int]] = ..., span_counts: _Optional[_Iterable[int]] = ..., grid_height: _Optional[int] = ..., grid_width: _Optional[int] = ..., bidirectional: bool = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("tokens", "open", "close", "then", "answer", "inside")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    open: _containers.RepeatedScalarFieldContainer[int]
    close: _containers.RepeatedScalarFieldContainer[int]
    then: _containers.RepeatedScalarFieldContainer[int]
    answer: _containers.RepeatedScalarFieldContainer[int]
    inside: bool
    def __init__(self, tokens: _Optional[int] = ..., open: _Optional[_Iterable[int]] = ..., close: _Optional[_Iterable[int]] = ..., then: _Optional[_Iterable[int]] = ..., answer: _Optional[_Iterable[int]] = ..., inside: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "top_logprobs", "relative_frequency_penalty", "bias_ids", "biases", "bad_word_ids", "bad_word_lengths", "min_new_tokens", "watermark", "watermark_gamma", "watermark_delta", "allowed_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_GAMMA_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_DELTA_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    top_logprobs: int
    relative_frequency_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    bad_word_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_lengths: _containers.RepeatedScalarFieldContainer[int]
    min_new_tokens: int
    watermark: bool
    watermark_gamma: float
    watermark_delta: float
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., relative_frequency_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., bad_word_ids: _Optional[_Iterable[int]] = ..., bad_word_lengths: _Optional[_Iterable[int]] = ..., min_new_tokens: _Optional[int] = ..., watermark: bool = ..., watermark_gamma: _Optional[float] = ..., watermark_delta: _Optional[float] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepMessage(_message.Message):
    __slots__ = ("request_ids", "token_ids", "logprobs", "top_counts", "top_ids", "top_logprobs", "started", "finished", "prompt_logprobs", "drafts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    started: _containers.RepeatedCompositeFieldContainer[Started]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    drafts: _containers.RepeatedCompositeFieldContainer[VerifiedDrafts]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[VerifiedDrafts, _Mapping]]] = ...) -> None: ...

class VerifiedDrafts(_message.Message):
    __slots__ = ("request_id", "drafted", "accepted", "source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    drafted: int
    accepted: int
    source: str
    def __init__(self, request_id: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "start", "logprobs", "top_counts", "top_ids", "top_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    start: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "queue_ns", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    queue_ns: int
    cached_tokens: int
    def __init__(self, request_id: _Optional[int] = ..., queue_ns: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "reason", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reason: int
    error: str
    def __init__(self, request_id: _Optional[int] = ..., reason: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
