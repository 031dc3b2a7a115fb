"""The flags of ``tgi serve`` that its model server takes as well: limits, scheduling, cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from tgi_cli.cli.parsers import ratio, sizes, whole

_LIMITS = "Limits"
_SCHEDULING = "Scheduling"
_CACHE = "Cache"
_LOADING = "Loading"
_SHARDING = "Several devices"
_ADAPTERS = "Adapters"

MaxConcurrentRequests = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Requests in flight; more are answered with 429.",
        envvar="MAX_CONCURRENT_REQUESTS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxInputTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Tokens of a prompt. Left open: max-total-tokens less one.",
        envvar="MAX_INPUT_TOKENS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxInputLength = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="The old name of --max-input-tokens.",
        envvar="MAX_INPUT_LENGTH",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxTotalTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(2),
        help="Tokens of a prompt and its answer. Left open: the model's context, or what fits.",
        envvar="MAX_TOTAL_TOKENS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxBatchPrefillTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Prompt tokens computed in one step; longer prompts take several.",
        envvar="MAX_BATCH_PREFILL_TOKENS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxBatchTotalTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Tokens that the KV cache holds. Left open: what fits, measured at the start.",
        envvar="MAX_BATCH_TOTAL_TOKENS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Sequences that run at once. Left open: max-concurrent-requests.",
        envvar="MAX_BATCH_SIZE",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Requests that may wait; more are answered with 429. Left open: no bound.",
        envvar="MAX_QUEUED_REQUESTS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
MaxQueuedTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Prompt tokens that may wait, likewise.",
        envvar="MAX_QUEUED_TOKENS",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
Batching = Annotated[
    Literal["fused", "inflight", "static"],
    typer.Option(
        metavar="RULE",
        help="Who may join the running batch: fused (anyone at any step), inflight (TGI's rule: "
        "prompts run alone and whole), static (nobody until it has ended).",
        envvar="BATCHING",
        show_envvar=False,
        rich_help_panel=_SCHEDULING,
    ),
]
CapacityPolicy = Annotated[
    Literal["max_utilization", "guaranteed_no_evict"],
    typer.Option(
        metavar="POLICY",
        help="KV cache of a request: max_utilization (as it grows; the newest is recomputed when "
        "it runs out) or guaranteed_no_evict (all it may need, at once).",
        envvar="CAPACITY_POLICY",
        show_envvar=False,
        rich_help_panel=_SCHEDULING,
    ),
]
WaitingServedRatio = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=ratio,
        help="With inflight: prompts interrupt the batch once they are this share of it. "
        "Left open: 0.3.",
        envvar="WAITING_SERVED_RATIO",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
MaxWaitingTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(0),
        help="With inflight: decode steps after which they do so anyway. Left open: 20.",
        envvar="MAX_WAITING_TOKENS",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
KvCacheDtype = Annotated[
    Literal["auto", "fp8_e4m3fn", "fp8_e5m2"],
    typer.Option(
        metavar="TYPE",
        help="Of the KV cache: auto (that of the weights), fp8_e4m3fn, fp8_e5m2.",
        envvar="KV_CACHE_DTYPE",
        show_envvar=False,
        rich_help_panel=_CACHE,
    ),
]
Attention = Annotated[
    Literal["auto", "triton", "flashinfer", "native", "cpu", "torch", "paged", "flashdecoding"],
    typer.Option(
        metavar="NAME",
        help="What computes attention: auto, triton or flashinfer (CUDA), native or cpu (CPU), "
        "torch (anywhere, slow). TGI's paged and flashdecoding mean auto.",
        envvar="ATTENTION",
        show_envvar=False,
        rich_help_panel=_CACHE,
    ),
]
CudaGraphs = Annotated[
    Any,
    typer.Option(
        metavar="SIZES",
        parser=sizes,
        help="Batch sizes to record CUDA graphs for, as 1,2,4,8; 0: no graphs. Left open: sizes "
        "up to the largest batch.",
        envvar="CUDA_GRAPHS",
        show_envvar=False,
        rich_help_panel=_CACHE,
    ),
]
"""A tuple of numbers, or None."""
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Compute a beginning that requests share once.",
        envvar="PREFIX_CACHING",
        show_envvar=False,
        rich_help_panel=_CACHE,
    ),
]
LoadFormat = Annotated[
    Literal["auto", "dummy"],
    typer.Option(
        metavar="FORMAT",
        help="auto: the weights of the checkpoint; dummy: random ones of the same shapes, from "
        "config.json alone, for benchmarks.",
        envvar="LOAD_FORMAT",
        show_envvar=False,
        rich_help_panel=_LOADING,
    ),
]
Quantize = Annotated[
    Literal[
        "gptq",
        "awq",
        "compressed-tensors",
        "marlin",
        "fp8",
        "int8",
        "eetq",
        "bitsandbytes",
        "bitsandbytes-nf4",
        "bitsandbytes-fp4",
        "exl2",
    ]
    | None,
    typer.Option(
        metavar="METHOD",
        help="Quantize plain weights as they are loaded: int8, eetq, bitsandbytes (8 bits), "
        "bitsandbytes-nf4, bitsandbytes-fp4, fp8. A quantized checkpoint (gptq, awq, "
        "compressed-tensors, ...) says itself how it is: there it only confirms.",
        envvar="QUANTIZE",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_LOADING,
    ),
]
CrossCheck = Annotated[
    bool,
    typer.Option(
        "--cross-check",
        help="Compare greedy tokens with transformers' own before serving. Takes the memory of "
        "a second copy of the model while it does.",
        envvar="CROSS_CHECK",
        show_envvar=False,
        rich_help_panel=_LOADING,
    ),
]
DisableGrammarSupport = Annotated[
    bool,
    typer.Option(
        "--disable-grammar-support",
        help="Refuse requests that say what form their text must have (grammars, tools, response "
        "formats).",
        envvar="DISABLE_GRAMMAR_SUPPORT",
        show_envvar=False,
        rich_help_panel=_LIMITS,
    ),
]
Sharded = Annotated[
    bool | None,
    typer.Option(
        "--sharded/--no-sharded",
        help="Spread the model over all devices that are there, or over one alone.",
        envvar="SHARDED",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_SHARDING,
    ),
]
NumShard = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Processes that share the model, one device each. Left open: 1, or all devices "
        "with --sharded.",
        envvar="NUM_SHARD",
        show_envvar=False,
        rich_help_panel=_SHARDING,
    ),
]
LoraAdapters = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="LoRA adapters that requests may name: id, id@revision or name=path, with commas "
        "between them.",
        envvar="LORA_ADAPTERS",
        show_envvar=False,
        rich_help_panel=_ADAPTERS,
    ),
]
MaxLoras = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Adapters on the device at once: so many different ones share a batch. Giving it "
        "allows adapters to be loaded over HTTP. Left open: 4 where adapters are named, else 0.",
        envvar="MAX_LORAS",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_ADAPTERS,
    ),
]
MaxCpuLoras = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Adapters kept in the host's memory; others are read again when they are asked "
        "for. Left open: 32.",
        envvar="MAX_CPU_LORAS",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_ADAPTERS,
    ),
]
MaxLoraRank = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="The largest rank an adapter may have. Left open: that of the adapters named, at "
        "least 16; 64 where none is named.",
        envvar="MAX_LORA_RANK",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_ADAPTERS,
    ),
]


def adapter_list(text: str | None) -> tuple[str, ...]:
    """The items of a list with commas between them."""
    return tuple(item for item in (part.strip() for part in (text or "").split(",")) if item)
