"""Settings of the HTTP server: address, request limits, chat, access, logs, metrics."""

from __future__ import annotations

from tgi_cli.config.settings.setting import (
    QUANTIZE,
    ROUTER,
    SERVE,
    SERVER,
    SERVING,
    WARMUP,
    Setting,
    panel,
)
from tgi_cli.config.settings.values import RATIO, SHARE, SWITCH, one_of, path, text, whole, words

_HTTP = (SERVE, ROUTER)
_ALL = (SERVE, SERVER, ROUTER)
_TRACES = "traces are the router's: give it to `tgi router`"

NETWORK_SETTINGS = panel(
    "Network",
    _HTTP,
    Setting("hostname", text("HOST"), "0.0.0.0", "Address to listen on."),
    Setting(
        "port",
        whole(0, 65535),
        3000,
        "HTTP port; 0: any free port.",
        short="p",
        variables=("AIP_HTTP_PORT", "PORT"),
    ),
    Setting(
        "graceful_termination_timeout",
        whole(0),
        90,
        "Seconds to let requests in flight finish after SIGTERM or Ctrl-C.",
        _ALL,
        short="g",
    ),
    Setting(
        "api_key",
        words("KEY"),
        None,
        "API key that clients must send (Authorization: Bearer KEY). Repeat the flag or separate "
        "keys by commas to accept several. Prefer the variable API_KEY: the list of processes "
        "shows flags.",
        (*_HTTP, WARMUP),
        secret=True,
    ),
    Setting(
        "cors_allow_origin",
        words("URL"),
        None,
        "Origin that CORS allows (https://HOST); repeat the flag or separate by commas. Default: "
        "all.",
    ),
    Setting("ssl_certfile", path("PEM"), None, "Serve HTTPS with this certificate chain."),
    Setting(
        "ssl_keyfile",
        path("PEM"),
        None,
        "Private key of the certificate. Default: in the same file.",
    ),
)

ROUTER_SETTINGS = (
    *panel(
        "Requests",
        _HTTP,
        Setting("max_best_of", whole(1, 4096), 2, "Maximum best_of."),
        Setting("max_stop_sequences", whole(0), 4, "Maximum stop sequences per request."),
        Setting("max_top_n_tokens", whole(0), 5, "Maximum top_n_tokens on TGI's routes."),
        Setting(
            "max_client_batch_size",
            whole(1, 65536),
            4,
            "Maximum prompts per request to /v1/completions.",
        ),
        Setting("validation_workers", whole(1, 256), 2, "Tokenizer threads."),
        Setting("payload_limit", whole(1), 2_000_000, "Maximum size of a request body in bytes."),
        Setting(
            "watermark_gamma",
            SHARE,
            0.5,
            "Share of the vocabulary that watermarking favors.",
            _ALL,
        ),
        Setting(
            "watermark_delta", RATIO, 2.0, "Bias that watermarking adds to their logits.", _ALL
        ),
        Setting(
            "generation_config",
            one_of("SOURCE", "auto", "none"),
            "auto",
            "Source of default sampling parameters on /v1 routes: auto (the model's "
            "generation_config.json) or none (OpenAI's defaults).",
        ),
    ),
    *panel(
        "Chat",
        _HTTP,
        Setting(
            "tokenizer_config_path",
            path(),
            None,
            "tokenizer_config.json with a chat template that overrides the model's.",
        ),
        Setting(
            "tool_call_parser",
            one_of(
                "FORMAT",
                "auto",
                "none",
                "deepseek",
                "glm45",
                "harmony",
                "hermes",
                "llama3_json",
                "mistral",
                "mistral_list",
                "qwen3_coder",
            ),
            "auto",
            "Parser for the model's tool calls: auto (detect), none (leave as text), or a format: "
            "hermes, llama3_json, mistral, mistral_list, harmony, qwen3_coder, glm45, deepseek.",
        ),
        Setting(
            "reasoning_parser",
            one_of("FORMAT", "auto", "none", "harmony", "mistral", "seed_oss", "think"),
            "auto",
            "Parser for the model's reasoning: auto (detect), none (leave as text), or a format: "
            "think, harmony, mistral, seed_oss.",
        ),
    ),
    *panel(
        "Logs, traces and metrics",
        SERVING,
        Setting(
            "otlp_endpoint",
            text("URL"),
            None,
            "Export traces to this OpenTelemetry collector (gRPC, http://HOST:4317).",
            _ALL,
            note=_TRACES,
            note_on=(SERVER,),
        ),
        Setting(
            "otlp_service_name",
            text("NAME"),
            "text-generation-inference.router",
            "Service name in traces.",
            _ALL,
            note=_TRACES,
            note_on=(SERVER,),
        ),
        Setting(
            "vllm_metrics",
            SWITCH,
            False,
            "Also export the metrics that gateways read, under vLLM's names.",
            _HTTP,
        ),
        Setting(
            "logger_level",
            text("LEVEL"),
            "INFO",
            "Log level: debug, info, warning or error; info,router=debug overrides it for one "
            "package.",
            (*SERVING, QUANTIZE),
            variables=("LOG_LEVEL", "LOGGER_LEVEL"),
        ),
        Setting(
            "json_output",
            SWITCH,
            False,
            "Write logs and results as JSON.",
            (*SERVING, QUANTIZE),
            negative=True,
        ),
        Setting(
            "env",
            SWITCH,
            False,
            "Log versions and devices before serving.",
            (SERVE,),
            short="e",
            variables=(),
        ),
    ),
)
