"""``tgi model-server``: the half of ``tgi serve`` that runs the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tgi_cli.cli import engine_options as e
from tgi_cli.cli import options as o


def model_server(
    context: typer.Context,
    model: o.Model = None,
    model_id: o.ModelId = None,
    model_path: o.ModelPath = None,
    revision: o.Revision = None,
    dtype: o.Dtype = None,
    quantize: e.Quantize = None,
    trust_remote_code: o.TrustRemoteCode = False,
    uds_path: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The unix socket to listen on, in a folder that only you may enter. Left open: "
            "tgi/engine.sock in XDG_RUNTIME_DIR.",
            rich_help_panel="Network",
        ),
    ] = None,
    graceful_termination_timeout: o.GracefulTerminationTimeout = 90,
    max_concurrent_requests: e.MaxConcurrentRequests = 128,
    max_input_tokens: e.MaxInputTokens = None,
    max_input_length: e.MaxInputLength = None,
    max_total_tokens: e.MaxTotalTokens = None,
    max_batch_prefill_tokens: e.MaxBatchPrefillTokens = None,
    max_batch_total_tokens: e.MaxBatchTotalTokens = None,
    max_batch_size: e.MaxBatchSize = None,
    max_queued_requests: e.MaxQueuedRequests = None,
    max_queued_tokens: e.MaxQueuedTokens = None,
    batching: e.Batching = "fused",
    capacity_policy: e.CapacityPolicy = "max_utilization",
    waiting_served_ratio: e.WaitingServedRatio = None,
    max_waiting_tokens: e.MaxWaitingTokens = None,
    prefix_caching: e.PrefixCaching = True,
    disable_grammar_support: e.DisableGrammarSupport = False,
    kv_cache_dtype: e.KvCacheDtype = "auto",
    attention: e.Attention = "auto",
    cuda_graphs: e.CudaGraphs = None,
    load_format: e.LoadFormat = "auto",
    cross_check: e.CrossCheck = False,
    sharded: e.Sharded = None,
    num_shard: e.NumShard = None,
    lora_adapters: e.LoraAdapters = None,
    max_loras: e.MaxLoras = None,
    max_cpu_loras: e.MaxCpuLoras = None,
    max_lora_rank: e.MaxLoraRank = None,
    logger_level: o.LoggerLevel = "INFO",
    json_output: o.JsonOutput = False,
    lifeline_fd: o.LifelineFd = None,
) -> None:
    """Run a model behind a unix socket, for a router to connect to.

    `tgi serve` starts one of these and a `tgi router`; alone it is for trying things out.
    """
    from tgi_cli.config import ServeConfig
    from tgi_cli.launcher import lifeline, serve
    from tgi_cli.launcher.runtime import default_uds_path, remove_folder
    from tgi_cli.rpc.model_server import run_model_server
    from tgi_cli.rpc.socket_path import make_folder

    o.set_up_logs("model-server", logger_level, json_output)
    uds_path = uds_path or default_uds_path()
    if lifeline_fd is None:
        make_folder(uds_path)
    else:
        lifeline.hold(lifeline_fd, cleanup=partial(remove_folder, uds_path.parent))
    config = ServeConfig(
        model_id=o.chosen_model(context, model, model_id),
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        max_concurrent_requests=max_concurrent_requests,
        max_input_tokens=o.input_limit(max_input_tokens, max_input_length),
        max_total_tokens=max_total_tokens,
        max_batch_prefill_tokens=max_batch_prefill_tokens,
        max_batch_total_tokens=max_batch_total_tokens,
        max_batch_size=max_batch_size,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        batching=batching,
        capacity_policy=capacity_policy,
        waiting_served_ratio=waiting_served_ratio,
        max_waiting_tokens=max_waiting_tokens,
        prefix_caching=prefix_caching,
        disable_grammar_support=disable_grammar_support,
        kv_cache_dtype=kv_cache_dtype,
        attention=attention,
        cuda_graphs=cuda_graphs,
        quantize=quantize,
        load_format=load_format,
        cross_check=cross_check,
        sharded=sharded,
        num_shard=num_shard,
        lora_adapters=e.adapter_list(lora_adapters),
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        max_lora_rank=max_lora_rank,
        logger_level=logger_level,
        json_output=json_output,
        graceful_termination_timeout=graceful_termination_timeout,
    )
    config, path = serve.located(config, model_path)
    config = serve.with_adapters(config)
    run_model_server(config, path, uds_path)
