"""Settings of the engine: limits, scheduling, cache, devices."""

from __future__ import annotations

from tgi_cli.config.settings.setting import ROUTER, SERVE, SERVER, WARMUP, Setting, panel
from tgi_cli.config.settings.values import (
    FRACTION,
    OPTIONAL_SWITCH,
    RATIO,
    SIZES,
    SWITCH,
    ValueKind,
    memory,
    one_of,
    path,
    text,
    whole,
    whole_or,
)
from tgi_cli.config.speculation import AUTO, DEFAULT_CPU_DRAFTS, checked

DEFAULT_PREFILL_TOKENS = 4096
"""Default prefill tokens per step on an accelerator, as in TGI."""

DEFAULT_CPU_PREFILL_TOKENS = 512
"""The same on a CPU: a chunk of a 0.1B model takes about a quarter of a second."""

DEFAULT_CPU_PREFILL_DELAY = 100
"""Milliseconds by which prompts may delay tokens on a CPU, as long as a person takes to notice."""

WAITING_SERVED_RATIO = 0.3
MAX_WAITING_TOKENS = 20
"""Defaults of TGI's launcher."""

DEFAULT_KV_CACHE_DIR_SIZE = 10 << 30
"""Bytes."""

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

STATE_PREFILLS = ("recurrent", "chunked")
"""Forms of linear attention and Mamba-2 over prompts on CUDA."""

_ENGINE = (SERVE, SERVER, WARMUP)
_ALL = (SERVE, SERVER, ROUTER, WARMUP)
_SCHEDULED = {ROUTER: "the model server decides that: give it to `tgi model-server`"}

ENGINE_SETTINGS = (
    *panel(
        "Limits",
        _ALL,
        max_concurrent_requests=Setting(
            whole(1),
            "Maximum requests in flight; further ones get status 429.",
            128,
            brief="Requests in flight (else 429).",
        ),
        max_input_tokens=Setting(
            whole(1),
            "Maximum prompt tokens per request. Default: max-total-tokens - 1.",
            brief="Prompt tokens per request.",
        ),
        max_input_length=Setting(
            whole(1), "Deprecated name of --max-input-tokens.", alias_of="max_input_tokens"
        ),
        max_total_tokens=Setting(
            whole(2),
            "Maximum prompt and generated tokens per request. Default: the model's context, or "
            "what fits into memory.",
            brief="Prompt and new tokens per request.",
        ),
        max_batch_prefill_tokens=Setting(
            whole(1),
            "Prompt tokens per step; longer prompts take several steps. Default: "
            f"{DEFAULT_PREFILL_TOKENS}, on a CPU {DEFAULT_CPU_PREFILL_TOKENS}.",
            note=_SCHEDULED,
        ),
        max_batch_total_tokens=Setting(
            whole(2),
            "KV cache size in tokens. Default: what fits into memory, as measured at startup.",
            note=_SCHEDULED,
            brief="KV cache size. Default: what fits.",
        ),
        max_batch_size=Setting(
            whole(1),
            "Maximum sequences in the running batch. Default: max-concurrent-requests.",
            note=_SCHEDULED,
        ),
        max_queued_requests=Setting(
            whole(1),
            "Maximum requests in the queue; further ones get status 429. Default: unlimited.",
            commands=_ENGINE,
        ),
        max_queued_tokens=Setting(
            whole(1),
            "Maximum prompt tokens in the queue, likewise. Default: unlimited.",
            commands=_ENGINE,
        ),
        disable_grammar_support=Setting(
            SWITCH, "Reject requests with constrained output (grammars, tools, response formats)."
        ),
    ),
    *panel(
        "Scheduling",
        _ENGINE,
        batching=Setting(
            one_of("POLICY", *BATCHINGS),
            "When requests join the running batch: fused (at any step), inflight (TGI's policy: "
            "prefills run alone and unchunked), static (once the batch has finished).",
            "fused",
        ),
        capacity_policy=Setting(
            one_of("POLICY", *CAPACITY_POLICIES),
            "KV cache allocation: max_utilization (on demand; the newest request is preempted and "
            "recomputed) or guaranteed_no_evict (all that a request may need, on admission).",
            "max_utilization",
        ),
        max_prefill_delay=Setting(
            whole(0),
            "Milliseconds by which prompts may lengthen a step that running requests wait for, or "
            "as long as these take alone, if that is more; 0: no limit but the number of tokens. "
            f"Default: {DEFAULT_CPU_PREFILL_DELAY} on a CPU, 0 on a GPU.",
        ),
        waiting_served_ratio=Setting(
            RATIO,
            "With inflight: prefills interrupt decoding once queued requests reach this share of "
            f"the batch. Default: {WAITING_SERVED_RATIO}.",
            commands=_ALL,
            note=_SCHEDULED,
        ),
        max_waiting_tokens=Setting(
            whole(0),
            "With inflight: decode steps after which prefills interrupt in any case. Default: "
            f"{MAX_WAITING_TOKENS}.",
            commands=_ALL,
            note=_SCHEDULED,
        ),
    ),
    *panel(
        "Cache and kernels",
        _ENGINE,
        prefix_caching=Setting(
            SWITCH, "Reuse the KV cache of shared prompt prefixes.", True, negative=True
        ),
        kv_cache_dir=Setting(
            path("FOLDER"),
            "Keep KV blocks of prompts and answers in this folder, too: their prefixes are found "
            "again after a restart. On CPUs, with one shard. Prompts can be inferred from them.",
        ),
        kv_cache_dir_size=Setting(
            memory(),
            "Maximum size of the files in --kv-cache-dir; the least recently used ones are "
            "removed. Default: 10GiB.",
        ),
        kv_offloading_size=Setting(
            memory(),
            "Memory of the host for KV blocks that are evicted from a GPU's cache, which prompts "
            "find again there; of all shards together. Default: none.",
        ),
        kv_cache_dtype=Setting(
            one_of("TYPE", *KV_CACHE_DTYPES),
            "Data type of the KV cache: auto (that of the weights), fp8_e4m3fn, fp8_e5m2.",
            "auto",
        ),
        attention=Setting(
            one_of("NAME", *ATTENTIONS),
            "Attention backend: auto, triton or flashinfer (CUDA), native or cpu (CPU), torch (any "
            "device, slow). With FlashInfer installed, auto measures which is faster on this GPU. "
            "TGI's paged and flashdecoding mean auto.",
            "auto",
        ),
        cuda_graphs=Setting(
            SIZES,
            "Batch sizes to capture CUDA graphs for, as 1,2,4,8; 0: no graphs. Default: sizes up "
            "to the maximum batch size.",
        ),
        state_prefill=Setting(
            one_of("FORM", *STATE_PREFILLS),
            "How linear attention and Mamba-2 compute prompts on CUDA: recurrent (token by token) "
            "or chunked (64 tokens at once, by the kernels of the extra fla). Chunked costs "
            "determinism: where a prompt is cut into steps, by other requests, prefix reuse or "
            "preemption, changes the last bits of a result, and so may change its tokens.",
            "recurrent",
        ),
        measured_limits=Setting(
            SWITCH,
            "Start with the limits that `tgi warmup` measured for this model, device and settings, "
            "if they still apply.",
            True,
            commands=(SERVE, SERVER),
            negative=True,
        ),
    ),
    *panel(
        "Speculative decoding",
        _ENGINE,
        speculate=Setting(
            whole_or(AUTO, 0),
            "Maximum draft tokens that a step verifies per sequence; 0: none. Drafts are looked up "
            "in the prompt, the answer and recent answers; as many are verified as make the step "
            "worth it, and the output does not change. Default: auto, "
            f"{DEFAULT_CPU_DRAFTS} on a CPU and 0 on a GPU.",
            brief="Draft tokens per sequence; 0: none.",
        ),
        speculative_model=Setting(
            text("MODEL"),
            "Weights that draft tokens: a smaller model, best of the same vocabulary, or heads "
            "made for the model (EAGLE-3, Medusa, MLP speculator), as a repository id or a folder.",
        ),
        speculative_config=Setting(
            ValueKind(str, "JSON", checked),
            "The same as vLLM's JSON object, with the keys method (ngram: drafts from the request "
            "itself; suffix: from recent answers, too; draft_model, eagle3, medusa, "
            "mlp_speculator: from weights; mtp: from layers of the model), model, revision and "
            "num_speculative_tokens.",
        ),
    ),
    *panel(
        "Devices",
        _ENGINE,
        sharded=Setting(
            OPTIONAL_SWITCH,
            "Shard the model over all available devices, or run it on one.",
            negative=True,
        ),
        num_shard=Setting(
            whole(1, 256),
            "Number of shards, each a process on its own device. Default: the number of GPUs in "
            "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, else 1; with --sharded, all.",
            variables=("NUM_SHARD", "SM_NUM_GPUS"),
            brief="Devices to shard the model over.",
        ),
        pipeline_parallel_size=Setting(
            whole(1, 64),
            "Number of pipeline stages, each with some of the model's layers, in --num-shard "
            "processes of its own. As many steps are in flight as there are stages.",
            1,
            brief="Stages that the model's layers are divided into.",
        ),
        nnodes=Setting(
            whole(1, 64),
            "Number of nodes (machines) that a model is served on, each with an equal part of its "
            "processes. `tgi serve` is started on each of them, with the same flags but for "
            "--node-rank.",
            1,
        ),
        node_rank=Setting(
            whole(0, 63),
            "Number of this node. Node 0 serves HTTP and has the last stage; the others only run "
            "their processes of the model.",
            0,
        ),
        master_addr=Setting(
            text("ADDRESS"),
            "Address of node 0 for the other nodes, with --nnodes; it listens on no other.",
            "localhost",
        ),
        master_port=Setting(
            whole(0, 65535), "Port of node 0 for the other nodes, with --nnodes.", 29500
        ),
        node_secret_file=Setting(
            path("FILE"),
            "File with the secret by which nodes authenticate each other, with --nnodes: at least "
            "16 characters, the same on each node.",
        ),
        replicas=Setting(
            whole(1, 64),
            "Number of replicas of the model behind the HTTP port, each a model server on its own "
            "GPUs (--num-shard each), or on its part of the cores.",
            1,
            commands=(SERVE,),
        ),
        cuda_memory_fraction=Setting(
            FRACTION,
            "Share of a GPU's memory to use; the KV cache shrinks accordingly.",
            1.0,
            brief="Share of a GPU's memory to use.",
        ),
        uds_path=Setting(
            path(),
            "Unix socket to listen on, in a folder that only its owner may enter. Default: "
            "tgi/engine.sock in XDG_RUNTIME_DIR.",
            commands=(SERVER,),
            variables=(),
            brief="Unix socket to listen on.",
        ),
        shard_uds_path=Setting(
            path("PREFIX"),
            "Also listen on PREFIX-0, the shard socket of TGI's clients (generate.v2, "
            "generate.v3).",
            commands=(SERVE, SERVER),
        ),
    ),
)
