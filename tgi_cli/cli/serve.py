"""``tgi serve``: a model over HTTP."""

from __future__ import annotations

import typer

from tgi_cli.cli import chat_options as c
from tgi_cli.cli import engine_options as e
from tgi_cli.cli import network_options as n
from tgi_cli.cli import options as o


def serve(
    context: typer.Context,
    model: o.Model = None,
    model_id: o.ModelId = None,
    revision: o.Revision = None,
    dtype: o.Dtype = None,
    quantize: e.Quantize = None,
    trust_remote_code: o.TrustRemoteCode = False,
    hostname: o.Hostname = "0.0.0.0",
    port: o.Port = 3000,
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
    max_best_of: o.MaxBestOf = 2,
    max_stop_sequences: o.MaxStopSequences = 4,
    max_top_n_tokens: o.MaxTopNTokens = 5,
    max_client_batch_size: o.MaxClientBatchSize = 4,
    validation_workers: o.ValidationWorkers = 2,
    payload_limit: o.PayloadLimit = 2_000_000,
    watermark_gamma: o.WatermarkGamma = 0.5,
    watermark_delta: o.WatermarkDelta = 2.0,
    generation_config: o.GenerationConfig = "auto",
    tokenizer_config_path: c.TokenizerConfigPath = None,
    tool_call_parser: c.ToolCallParser = "auto",
    reasoning_parser: c.ReasoningParser = "auto",
    api_key: n.ApiKey = None,
    cors_allow_origin: n.CorsAllowOrigin = None,
    ssl_certfile: n.SslCertfile = None,
    ssl_keyfile: n.SslKeyfile = None,
    otlp_endpoint: n.OtlpEndpoint = None,
    otlp_service_name: n.OtlpServiceName = "text-generation-inference.router",
    vllm_metrics: n.VllmMetrics = False,
    logger_level: o.LoggerLevel = "INFO",
    json_output: o.JsonOutput = False,
) -> None:
    """Serve a model over HTTP: TGI's API and OpenAI's.

    Downloads the model if it is not here yet. Without one, a bundled miniature is served.
    """
    from tgi_cli.config import ServeConfig
    from tgi_cli.launcher.children import RouterOptions
    from tgi_cli.launcher.serve import serve as run

    o.set_up_logs("launcher", logger_level, json_output)
    config = ServeConfig(
        model_id=o.chosen_model(context, model, model_id),
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        hostname=o.listen_address(context, hostname),
        port=port,
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
    router = RouterOptions(
        max_best_of=max_best_of,
        max_stop_sequences=max_stop_sequences,
        max_top_n_tokens=max_top_n_tokens,
        max_client_batch_size=max_client_batch_size,
        validation_workers=validation_workers,
        payload_limit=payload_limit,
        watermark_gamma=watermark_gamma,
        watermark_delta=watermark_delta,
        generation_config=generation_config,
        tokenizer_config_path=tokenizer_config_path,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        api_key=n.checked_key(context, api_key),
        cors_allow_origin=n.checked_origins(cors_allow_origin),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        otlp_endpoint=otlp_endpoint or None,
        otlp_service_name=otlp_service_name,
        vllm_metrics=vllm_metrics,
    )
    n.checked_tls(ssl_certfile, ssl_keyfile)
    n.checked_otlp(otlp_endpoint)
    raise typer.Exit(run(config, router))
