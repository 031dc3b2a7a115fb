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
from tgi_cli.config.settings.values import (
    RATIO,
    SHARE,
    SWITCH,
    number,
    one_of,
    path,
    text,
    whole,
    words,
)

_TOOL_FORMATS = (
    "apertus",
    "cohere",
    "deepseek",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "functionary",
    "functiongemma",
    "functools",
    "gemma4",
    "gigachat3",
    "gigachat31",
    "glm45",
    "glm47",
    "granite",
    "granite_20b",
    "harmony",
    "hermes",
    "hunyuan_v3",
    "internlm",
    "jamba",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "llama3_json",
    "longcat",
    "longcat_v2",
    "minicpm5",
    "minimax",
    "minimax_m2",
    "mistral",
    "mistral_list",
    "nemotron",
    "olmo3",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "solar",
    "step3",
    "xlam",
)
"""The names in :mod:`tgi_cli.text.formats.tools`; a test compares them."""
_REASONING_FORMATS = (
    "apertus",
    "apriel",
    "cohere",
    "gemma4",
    "granite",
    "harmony",
    "hunyuan_v3",
    "kimi",
    "kimi_k3",
    "longcat",
    "minimax_m3",
    "mistral",
    "seed_oss",
    "solar",
    "think",
    "think_answer",
    "think_response",
)
"""The names in :mod:`tgi_cli.text.formats.reasoning`."""

_HTTP = (SERVE, ROUTER)
_ALL = (SERVE, SERVER, ROUTER)

NETWORK_SETTINGS = panel(
    "Network",
    _HTTP,
    hostname=Setting(
        text("HOST"), "Address to listen on.", "0.0.0.0", brief="Address to listen on."
    ),
    port=Setting(
        whole(0, 65535),
        "HTTP port; 0: any free port.",
        3000,
        short="p",
        variables=("AIP_HTTP_PORT", "PORT"),
        brief="HTTP port; 0: any free port.",
    ),
    graceful_termination_timeout=Setting(
        whole(0),
        "Seconds to let requests in flight finish after SIGTERM or Ctrl-C.",
        90,
        commands=_ALL,
        short="g",
    ),
    api_key=Setting(
        words("KEY"),
        "API key that clients must send (Authorization: Bearer KEY). Repeat the flag or separate "
        "keys by commas to accept several. Prefer the variable API_KEY: the list of processes "
        "shows flags.",
        commands=(*_HTTP, WARMUP),
        secret=True,
        brief="Key that clients must send.",
    ),
    api_key_file=Setting(
        path("FILE"),
        "Read API keys from this file, one per line: for secrets of Docker, Kubernetes and "
        "systemd.",
    ),
    cors_allow_origin=Setting(
        words("URL"),
        "Origin that CORS allows (https://HOST); repeat the flag or separate by commas. Default: "
        "all.",
        brief="Origin that CORS allows. Default: all.",
    ),
    disable_web_ui=Setting(
        SWITCH,
        "Serve no page at /: browsers get what other clients of GET / get.",
        brief="Serve no page for browsers at /.",
    ),
    ssl_certfile=Setting(
        path("PEM"),
        "Serve HTTPS with this certificate chain.",
        brief="Serve HTTPS with this certificate.",
    ),
    ssl_keyfile=Setting(path("PEM"), "Private key of the certificate. Default: in the same file."),
)

ROUTER_SETTINGS = (
    *panel(
        "Requests",
        _HTTP,
        served_model_name=Setting(
            words("NAME..."),
            "Names of the model on /v1 routes: the first is reported, all are accepted, requests "
            "with others get 404. Default: the model's id, and any name is accepted.",
            brief="Names of the model on /v1 routes.",
        ),
        max_best_of=Setting(whole(1, 4096), "Maximum best_of.", 2),
        max_stop_sequences=Setting(whole(0), "Maximum stop sequences per request.", 4),
        max_top_n_tokens=Setting(whole(0), "Maximum top_n_tokens on TGI's routes.", 5),
        max_client_batch_size=Setting(
            whole(1, 65536), "Maximum prompts per request to /v1/completions.", 4
        ),
        validation_workers=Setting(whole(1, 256), "Tokenizer threads.", 2),
        payload_limit=Setting(
            whole(1),
            "Maximum size of a request body in bytes. Default: 2,000,000; 32,000,000 for models "
            "that take images.",
        ),
        response_store_bytes=Setting(
            whole(0),
            "Memory for stored responses of /v1/responses, in bytes; the oldest are dropped. 0: "
            "store none.",
            64 << 20,
        ),
        response_store_seconds=Setting(
            whole(0), "Seconds for which responses are stored. 0: store none.", 3600
        ),
        watermark_gamma=Setting(
            SHARE, "Share of the vocabulary that watermarking favors.", 0.5, commands=_ALL
        ),
        watermark_delta=Setting(
            RATIO, "Bias that watermarking adds to their logits.", 2.0, commands=_ALL
        ),
        generation_config=Setting(
            one_of("SOURCE", "auto", "none"),
            "Source of default sampling parameters on /v1 routes: auto (the model's "
            "generation_config.json) or none (OpenAI's defaults).",
            "auto",
        ),
    ),
    *panel(
        "Replicas",
        _HTTP,
        cache_threshold=Setting(
            number(0, 1),
            "Share of a prompt that a replica must have served before, as a prefix, to be sent the "
            "request because of it.",
            0.25,
        ),
        balance_abs_threshold=Setting(
            whole(0),
            "A replica is too busy for prefixes if it has more requests in flight than the least "
            "busy one: by more than this number, and by more than the factor "
            "--balance-rel-threshold.",
            4,
        ),
        balance_rel_threshold=Setting(number(1), "See --balance-abs-threshold.", 1.5),
    ),
    *panel(
        "Images",
        _HTTP,
        media_fetch=Setting(
            SWITCH,
            "Fetch images from http and https URLs of public addresses. Without it, and without "
            "--allowed-media-domains, images must be in the request (data: URLs).",
            brief="Fetch images from public URLs.",
        ),
        allowed_media_domains=Setting(
            words("HOST"),
            "Fetch images from these hosts only: HOST (ports 80 and 443) or HOST:PORT. Repeat the "
            "flag or separate by commas.",
        ),
        allow_private_media=Setting(
            SWITCH,
            "Also fetch images from addresses of private networks and of this machine.",
        ),
        allowed_local_media_path=Setting(
            path("FOLDER"),
            "Read images below this folder for clients that send file: URLs.",
        ),
        media_fetch_timeout=Setting(
            number(0.1, 3600, "SECONDS"), "Time to fetch an image, redirects included.", 5.0
        ),
        max_image_fetch_size=Setting(
            whole(1), "Maximum size of an image's file in bytes, fetched or not.", 32 << 20
        ),
        max_image_pixels=Setting(
            whole(1, 1_000_000_000),
            "Maximum width times height of an image. The processes that decode images may take 32 "
            "bytes of memory for each.",
            20_000_000,
        ),
        max_images=Setting(whole(1, 1024), "Maximum images of a prompt.", 16),
        image_workers=Setting(
            whole(1, 64), "Processes that decode and preprocess images, for models that do.", 2
        ),
    ),
    *panel(
        "Chat",
        _HTTP,
        chat_template=Setting(
            text("FILE"),
            "Chat template that overrides the model's: a Jinja file, or the template itself.",
        ),
        tokenizer_config_path=Setting(
            path(), "tokenizer_config.json with a chat template that overrides the model's."
        ),
        tool_call_parser=Setting(
            one_of("FORMAT", "auto", "none", *_TOOL_FORMATS),
            "Parser for the model's tool calls: auto (detect), none (leave as text), or the name "
            "of a format.",
            "auto",
        ),
        reasoning_parser=Setting(
            one_of("FORMAT", "auto", "none", *_REASONING_FORMATS),
            "Parser for the model's reasoning: auto (detect), none (leave as text), or the name "
            "of a format.",
            "auto",
        ),
    ),
    *panel(
        "Logs, traces and metrics",
        SERVING,
        otlp_endpoint=Setting(
            text("URL"),
            "Export traces and metrics to this OpenTelemetry collector (gRPC, http://HOST:4317).",
            commands=_ALL,
        ),
        otlp_service_name=Setting(
            text("NAME"),
            "Service name in traces and metrics. The default is the router's: that of model "
            "servers ends with `.server`.",
            "text-generation-inference.router",
            commands=_ALL,
        ),
        vllm_metrics=Setting(
            SWITCH,
            "Also export the metrics that gateways read, under vLLM's names.",
            commands=_HTTP,
        ),
        logger_level=Setting(
            text("LEVEL"),
            "Log level: debug, info, warning or error; info,router=debug overrides it for one "
            "package.",
            "INFO",
            commands=(*SERVING, QUANTIZE),
            variables=("LOG_LEVEL", "LOGGER_LEVEL"),
            brief="debug, info, warning or error.",
        ),
        json_output=Setting(
            SWITCH,
            "Write logs and results as JSON.",
            commands=(*SERVING, QUANTIZE),
            negative=True,
            brief="Write logs and results as JSON.",
        ),
        env=Setting(
            SWITCH,
            "Log versions and devices before serving.",
            commands=(SERVE,),
            short="e",
            variables=(),
        ),
    ),
)
