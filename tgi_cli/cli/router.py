"""``tgi router``: the half of ``tgi serve`` that speaks HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from tgi_cli.cli import chat_options as c
from tgi_cli.cli import engine_options as e
from tgi_cli.cli import network_options as n
from tgi_cli.cli import options as o


def router(
    context: typer.Context,
    model: o.Model = None,
    model_id: o.ModelId = None,
    model_path: o.ModelPath = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    engine_url: Annotated[
        str | None,
        typer.Option(
            help="Where the model server listens: unix:/PATH. Left open: where a model server "
            "of yours listens by itself.",
            envvar="ENGINE_URL",
            rich_help_panel="Network",
        ),
    ] = None,
    hostname: o.Hostname = "0.0.0.0",
    port: o.Port = 3000,
    graceful_termination_timeout: o.GracefulTerminationTimeout = 90,
    max_concurrent_requests: e.MaxConcurrentRequests = 128,
    max_best_of: o.MaxBestOf = 2,
    max_stop_sequences: o.MaxStopSequences = 4,
    max_top_n_tokens: o.MaxTopNTokens = 5,
    max_client_batch_size: o.MaxClientBatchSize = 4,
    validation_workers: o.ValidationWorkers = 2,
    payload_limit: o.PayloadLimit = 2_000_000,
    watermark_gamma: o.WatermarkGamma = 0.5,
    watermark_delta: o.WatermarkDelta = 2.0,
    generation_config: o.GenerationConfig = "auto",
    disable_grammar_support: e.DisableGrammarSupport = False,
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
    socket_fd: Annotated[
        int | None, typer.Option(help="A bound TCP socket to listen on.", hidden=True)
    ] = None,
    lifeline_fd: o.LifelineFd = None,
) -> None:
    """Serve HTTP in front of a model server.

    MODEL is for its tokenizer and chat template. `tgi serve` starts one of these and a
    `tgi model-server`.
    """
    from tgi_cli.config import ServeConfig
    from tgi_cli.launcher import lifeline, listener, serve
    from tgi_cli.launcher.runtime import default_uds_path
    from tgi_cli.router.config import RouterConfig
    from tgi_cli.router.server import run_router

    o.set_up_logs("router", logger_level, json_output)
    if lifeline_fd is not None:
        lifeline.hold(lifeline_fd)
    n.checked_tls(ssl_certfile, ssl_keyfile)
    n.checked_otlp(otlp_endpoint)
    hostname = o.listen_address(context, hostname)
    if socket_fd is None:
        socket_fd = listener.bind(hostname, port).detach()
    config, path = serve.located(
        ServeConfig(
            model_id=o.chosen_model(context, model, model_id),
            revision=revision,
            trust_remote_code=trust_remote_code,
            json_output=json_output,
        ),
        model_path,
    )
    run_router(
        RouterConfig(
            model_path=path,
            model_id=config.model_id,
            revision=config.revision or "",
            engine_url=engine_url or f"unix:{default_uds_path()}",
            socket_fd=socket_fd,
            hostname=hostname,
            port=port,
            max_concurrent_requests=max_concurrent_requests,
            max_best_of=max_best_of,
            max_stop_sequences=max_stop_sequences,
            max_top_n_tokens=max_top_n_tokens,
            max_client_batch_size=max_client_batch_size,
            validation_workers=validation_workers,
            trust_remote_code=trust_remote_code,
            json_output=json_output,
            logger_level=logger_level,
            graceful_termination_timeout=graceful_termination_timeout,
            payload_limit=payload_limit,
            watermark_gamma=watermark_gamma,
            watermark_delta=watermark_delta,
            generation_config=generation_config,
            disable_grammar_support=disable_grammar_support,
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
    )
