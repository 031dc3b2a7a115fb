"""The configuration of a router process."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from tgi_cli.config.settings import default
from tgi_cli.rpc.tls import TlsFiles
from tgi_cli.vision.limits import ImageLimits

TEXT_PAYLOAD = 2_000_000
"""TGI's limit of a request's body in bytes."""
IMAGE_PAYLOAD = 32_000_000
"""The limit for models that take images: 24 MB of files in base64, as in Anthropic's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router; names, meanings and defaults are those of TGI's router.

    Attributes:
        model_path: folder of the model, for its tokenizer and chat template.
        engine_url: address of the engine; see :meth:`tgi_cli.rpc.endpoint.EngineEndpoint.parse`.
        replica_url: addresses of further engines with the same model.
        engine_tls: TLS files for engines on TCP. Default: no TLS.
        socket_fd: bound TCP socket to serve on. Default: bind ``hostname`` and ``port``.
        parent_fd: pipe that closes when the parent exits. Default: run independently.
        max_input_tokens, max_total_tokens: limits of a request. Default: the engine's.
        validation_workers: threads that tokenize long prompts.
        payload_limit: bytes of a request's body. Default: :data:`TEXT_PAYLOAD`, or
            :data:`IMAGE_PAYLOAD` for models that take images.
        media_fetch, allowed_media_domains, allow_private_media,
        allowed_local_media_path, media_fetch_timeout, max_image_fetch_size, max_image_pixels,
        max_images, image_workers: see :class:`tgi_cli.vision.limits.ImageLimits`.
        response_store_bytes, response_store_seconds: bounds of the responses that later requests
            may continue; 0: none is kept.
        cache_threshold, balance_abs_threshold, balance_rel_threshold: how requests are divided
            among several engines; see :class:`tgi_cli.router.replicas.policy.CacheAwarePolicy`.
        watermark_gamma, watermark_delta: parameters of requested watermarks.
        served_model_name: names of the model on /v1 routes; requests with others are refused.
            Default: its id, and any name is accepted.
        generation_config: ``auto`` for the sampling defaults of the model's
            generation_config.json in /v1 requests, or ``none``.
        chat_template: file of a chat template, or its source. Default: ``tokenizer_config_path``'s.
        tokenizer_config_path: tokenizer_config.json for the chat template. Default: the model's.
        tool_call_parser, reasoning_parser: ``auto``, ``none`` or a format of
            :mod:`tgi_cli.text.formats`.
        disable_grammar_support: refuse requests for structured output.
        api_key: comma-separated keys, one of which clients must send. Default: none is required.
        cors_allow_origin: origins of pages that may use the server. Default: all.
        ssl_certfile, ssl_keyfile: PEM files of the certificate and the key, which may be in the
            same file. Default: no TLS.
        disable_web_ui: serve no page at ``/``.
        otlp_endpoint: OpenTelemetry collector for traces and metrics, over gRPC. Default: none.
        otlp_service_name: name of the server in traces and metrics.
        vllm_metrics: add the metrics that gateways read under vLLM's names.
        graceful_termination_timeout: seconds that requests in flight have after SIGTERM.
        watchdog_timeout: seconds without progress while requests wait, after which the engine
            counts as gone; 0 for no limit.
        control_fd: the channel to the launcher that stops and starts the model server. Default:
            it never sleeps.
        sleep_idle_seconds: time without requests after which it is stopped; 0 for never.
        enable_sleep_mode: clients may stop and start it.
    """

    model_path: Path
    model_id: str
    engine_url: str
    replica_url: tuple[str, ...] = ()
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
    payload_limit: int | None = None
    media_fetch: bool = default("media_fetch")
    allowed_media_domains: tuple[str, ...] = ()
    allow_private_media: bool = default("allow_private_media")
    allowed_local_media_path: Path | None = None
    media_fetch_timeout: float = default("media_fetch_timeout")
    max_image_fetch_size: int = default("max_image_fetch_size")
    max_image_pixels: int = default("max_image_pixels")
    max_images: int = default("max_images")
    image_workers: int = default("image_workers")
    response_store_bytes: int = default("response_store_bytes")
    response_store_seconds: int = default("response_store_seconds")
    cache_threshold: float = default("cache_threshold")
    balance_abs_threshold: int = default("balance_abs_threshold")
    balance_rel_threshold: float = default("balance_rel_threshold")
    watermark_gamma: float = default("watermark_gamma")
    watermark_delta: float = default("watermark_delta")
    served_model_name: tuple[str, ...] = ()
    generation_config: str = default("generation_config")
    chat_template: str | None = None
    tokenizer_config_path: Path | None = None
    tool_call_parser: str = default("tool_call_parser")
    reasoning_parser: str = default("reasoning_parser")
    disable_grammar_support: bool = False
    api_key: str | None = field(default=None, repr=False)
    cors_allow_origin: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    disable_web_ui: bool = False
    otlp_endpoint: str | None = None
    otlp_service_name: str = default("otlp_service_name")
    vllm_metrics: bool = False
    control_fd: int | None = None
    sleep_idle_seconds: float = default("sleep_idle_seconds")
    enable_sleep_mode: bool = False

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model in lists; the first is the one in answers."""
        return self.served_model_name or (self.model_id,)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, separately."""
        return () if self.api_key is None else tuple(self.api_key.split(","))

    @property
    def may_sleep(self) -> bool:
        """Whether the model server may be stopped and started while this router serves."""
        return self.enable_sleep_mode or self.sleep_idle_seconds > 0

    @property
    def image_limits(self) -> ImageLimits:
        """The limits of images."""
        names = [each.name for each in fields(ImageLimits)]
        return ImageLimits(**{name: getattr(self, name) for name in names})
