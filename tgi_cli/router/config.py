"""What the router is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tgi_cli.config.settings import default
from tgi_cli.rpc.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router's settings; names, meanings and defaults are those of TGI's.

    Attributes:
        model_path: the model's folder, for its tokenizer and chat template.
        engine_url: where the engine listens; see :meth:`tgi_cli.rpc.endpoint.EngineEndpoint.parse`.
        engine_tls: how it is spoken to on TCP; None: in the clear.
        socket_fd: a bound TCP socket to serve on; ``hostname`` and ``port`` are used without it.
        parent_fd: a pipe that closes when the parent is gone; None: run alone.
        max_input_tokens, max_total_tokens: limits of a request below the engine's; None: the
            engine's.
        validation_workers: threads for tokenizing long prompts off the event loop.
        payload_limit: bytes of a request body.
        watermark_gamma, watermark_delta: of requests that ask for a watermark.
        generation_config: whether the model's generation_config.json says what a /v1 request means
            that does not say how to sample: ``auto`` or ``none``.
        tokenizer_config_path: a tokenizer_config.json in place of the model's, for chats.
        tool_call_parser, reasoning_parser: how the model writes both: ``auto``, ``none`` or a
            format of :mod:`tgi_cli.text.known_formats`.
        disable_grammar_support: refuse requests that say what the answer must be.
        api_key: what clients have to bring, any of several with commas between them; None:
            nothing.
        cors_allow_origin: origins of the pages that may use the server; none: all.
        ssl_certfile, ssl_keyfile: PEM files; with them the server speaks TLS. The key may stand in
            the file of the certificates.
        otlp_endpoint: the OpenTelemetry collector that gets traces, over gRPC; None: none.
        otlp_service_name: what the traces call this server.
        vllm_metrics: show what gateways read under vLLM's names too.
        graceful_termination_timeout: seconds that requests in flight get after SIGTERM.
        watchdog_timeout: seconds for which the engine may stand still while requests wait, before
            it counts as gone; 0: for ever.
    """

    model_path: Path
    model_id: str
    engine_url: str
    engine_tls: TlsFiles | None = None
    revision: str = ""
    socket_fd: int | None = None
    parent_fd: int | None = None
    hostname: str = default("hostname")
    port: int = default("port")
    max_concurrent_requests: int = default("max_concurrent_requests")
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_best_of: int = default("max_best_of")
    max_stop_sequences: int = default("max_stop_sequences")
    max_top_n_tokens: int = default("max_top_n_tokens")
    max_client_batch_size: int = default("max_client_batch_size")
    validation_workers: int = default("validation_workers")
    trust_remote_code: bool = False
    json_output: bool = False
    logger_level: str = default("logger_level")
    graceful_termination_timeout: int = default("graceful_termination_timeout")
    watchdog_timeout: float = default("watchdog_timeout")
    payload_limit: int = default("payload_limit")
    watermark_gamma: float = default("watermark_gamma")
    watermark_delta: float = default("watermark_delta")
    generation_config: str = default("generation_config")
    tokenizer_config_path: Path | None = None
    tool_call_parser: str = default("tool_call_parser")
    reasoning_parser: str = default("reasoning_parser")
    disable_grammar_support: bool = False
    api_key: str | None = field(default=None, repr=False)
    cors_allow_origin: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    otlp_endpoint: str | None = None
    otlp_service_name: str = default("otlp_service_name")
    vllm_metrics: bool = False

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Each of the keys."""
        return () if self.api_key is None else tuple(self.api_key.split(","))
