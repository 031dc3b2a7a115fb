"""Settings of the engine: limits, scheduling, cache, devices."""

from __future__ import annotations

from tgi_cli.config.settings.setting import ROUTER, SERVE, SERVER, WARMUP, Setting, panel
from tgi_cli.config.settings.values import FRACTION, RATIO, SIZES, SWITCH, one_of, path, whole

DEFAULT_PREFILL_TOKENS = 4096
"""Default prefill tokens per step on an accelerator, as in TGI."""

DEFAULT_CPU_PREFILL_TOKENS = 512
"""The same on a CPU: a chunk of a 0.1B model takes about a quarter of a second."""

WAITING_SERVED_RATIO = 0.3
MAX_WAITING_TOKENS = 20
"""Defaults of TGI's launcher."""

BATCHINGS = ("fused", "inflight", "static")
CAPACITY_POLICIES = ("max_utilization", "guaranteed_no_evict")
KV_CACHE_DTYPES = {"auto": None, "fp8_e4m3fn": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""TGI's names for data types of the KV cache, and PyTorch's; auto: that of the weights."""

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
"""Attention backends, and the device that each needs; TGI's last two mean auto."""

_ENGINE = (SERVE, SERVER, WARMUP)
_ALL = (SERVE, SERVER, ROUTER, WARMUP)
_SCHEDULED = "the model server decides that: give it to `tgi model-server`"

ENGINE_SETTINGS = (
    *panel(
        "Limits",
        _ALL,
        Setting(
            "max_concurrent_requests",
            whole(1),
            128,
            "Maximum requests in flight; further ones get status 429.",
        ),
        Setting(
            "max_input_tokens",
            whole(1),
            None,
            "Maximum prompt tokens per request. Default: max-total-tokens - 1.",
        ),
        Setting(
            "max_input_length",
            whole(1),
            None,
            "Deprecated name of --max-input-tokens.",
            alias_of="max_input_tokens",
        ),
        Setting(
            "max_total_tokens",
            whole(2),
            None,
            "Maximum prompt and generated tokens per request. Default: the model's context, or "
            "what fits into memory.",
        ),
        Setting(
            "max_batch_prefill_tokens",
            whole(1),
            None,
            "Prompt tokens per step; longer prompts take several steps. Default: "
            f"{DEFAULT_PREFILL_TOKENS}, on a CPU {DEFAULT_CPU_PREFILL_TOKENS}.",
            note=_SCHEDULED,
            note_on=(ROUTER,),
        ),
        Setting(
            "max_batch_total_tokens",
            whole(1),
            None,
            "KV cache size in tokens. Default: what fits into memory, as measured at startup.",
            note=_SCHEDULED,
            note_on=(ROUTER,),
        ),
        Setting(
            "max_batch_size",
            whole(1),
            None,
            "Maximum sequences in the running batch. Default: max-concurrent-requests.",
            note=_SCHEDULED,
            note_on=(ROUTER,),
        ),
        Setting(
            "max_queued_requests",
            whole(1),
            None,
            "Maximum requests in the queue; further ones get status 429. Default: unlimited.",
            _ENGINE,
        ),
        Setting(
            "max_queued_tokens",
            whole(1),
            None,
            "Maximum prompt tokens in the queue, likewise. Default: unlimited.",
            _ENGINE,
        ),
        Setting(
            "disable_grammar_support",
            SWITCH,
            False,
            "Reject requests with constrained output (grammars, tools, response formats).",
        ),
    ),
    *panel(
        "Scheduling",
        _ENGINE,
        Setting(
            "batching",
            one_of("POLICY", *BATCHINGS),
            "fused",
            "When requests join the running batch: fused (at any step), inflight (TGI's policy: "
            "prefills run alone and unchunked), static (once the batch has finished).",
        ),
        Setting(
            "capacity_policy",
            one_of("POLICY", *CAPACITY_POLICIES),
            "max_utilization",
            "KV cache allocation: max_utilization (on demand; the newest request is preempted and "
            "recomputed) or guaranteed_no_evict (all that a request may need, on admission).",
        ),
        Setting(
            "waiting_served_ratio",
            RATIO,
            None,
            "With inflight: prefills interrupt decoding once queued requests reach this share of "
            f"the batch. Default: {WAITING_SERVED_RATIO}.",
            _ALL,
            note=_SCHEDULED,
            note_on=(ROUTER,),
        ),
        Setting(
            "max_waiting_tokens",
            whole(0),
            None,
            "With inflight: decode steps after which prefills interrupt in any case. Default: "
            f"{MAX_WAITING_TOKENS}.",
            _ALL,
            note=_SCHEDULED,
            note_on=(ROUTER,),
        ),
    ),
    *panel(
        "Cache and kernels",
        _ENGINE,
        Setting(
            "prefix_caching",
            SWITCH,
            True,
            "Reuse the KV cache of shared prompt prefixes.",
            negative=True,
        ),
        Setting(
            "kv_cache_dtype",
            one_of("TYPE", *KV_CACHE_DTYPES),
            "auto",
            "Data type of the KV cache: auto (that of the weights), fp8_e4m3fn, fp8_e5m2.",
        ),
        Setting(
            "attention",
            one_of("NAME", *ATTENTIONS),
            "auto",
            "Attention backend: auto, triton or flashinfer (CUDA), native or cpu (CPU), torch (any "
            "device, slow). TGI's paged and flashdecoding mean auto.",
        ),
        Setting(
            "cuda_graphs",
            SIZES,
            None,
            "Batch sizes to capture CUDA graphs for, as 1,2,4,8; 0: no graphs. Default: sizes up "
            "to the maximum batch size.",
        ),
        Setting(
            "measured_limits",
            SWITCH,
            True,
            "Start with the limits that `tgi warmup` measured for this model, device and settings, "
            "if they still apply.",
            (SERVE, SERVER),
            negative=True,
        ),
    ),
    *panel(
        "Devices",
        _ENGINE,
        Setting(
            "sharded",
            SWITCH,
            None,
            "Shard the model over all available devices, or run it on one.",
            negative=True,
        ),
        Setting(
            "num_shard",
            whole(1, 256),
            None,
            "Number of shards, each a process on its own device. Default: the number of GPUs in "
            "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, else 1; with --sharded, all.",
            variables=("NUM_SHARD", "SM_NUM_GPUS"),
        ),
        Setting(
            "cuda_memory_fraction",
            FRACTION,
            1.0,
            "Share of a GPU's memory to use; the KV cache shrinks accordingly.",
        ),
        Setting(
            "uds_path",
            path(),
            None,
            "Unix socket to listen on, in a folder that only its owner may enter. Default: "
            "tgi/engine.sock in XDG_RUNTIME_DIR.",
            (SERVER,),
            variables=(),
        ),
        Setting(
            "shard_uds_path",
            path("PREFIX"),
            None,
            "Also listen on PREFIX-0, the shard socket of TGI's clients (generate.v2, "
            "generate.v3).",
            (SERVE, SERVER),
        ),
    ),
)
