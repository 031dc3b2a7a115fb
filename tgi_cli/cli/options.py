"""The flags that several commands share: TGI's names, its environment variables, its defaults."""

from __future__ import annotations

import ipaddress
import logging
import socket
from pathlib import Path
from typing import Annotated, Literal

import typer

from tgi_cli.cli.parsers import ratio, share, whole
from tgi_cli.errors import ConfigError

log = logging.getLogger(__name__)

_MODEL = "Model"
_NETWORK = "Network"
_API = "Limits of a request"
_LOGS = "Logs"

ENVIRONMENT = "Every flag has an environment variable: MAX_INPUT_TOKENS is --max-input-tokens, \
and so on. A flag beats its variable."
"""What the help of a command says once instead of at every flag."""


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model of the hub, or a folder.",
        envvar="MODEL_ID",
        show_envvar=False,
        show_default=False,
    ),
]
ModelId = Annotated[
    str | None,
    typer.Option(
        "--model-id", help="The same, as a flag.", show_default=False, rich_help_panel=_MODEL
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="A branch, a tag, a commit or refs/pr/N.",
        envvar="REVISION",
        show_envvar=False,
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    Literal["auto", "float16", "half", "bfloat16", "float32", "float"] | None,
    typer.Option(
        metavar="TYPE",
        help="Of weights, computation and cache: auto, bfloat16, float16, float32.",
        envvar="DTYPE",
        show_envvar=False,
        rich_help_panel=_MODEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model.",
        envvar="TRUST_REMOTE_CODE",
        show_envvar=False,
        rich_help_panel=_MODEL,
    ),
]
Hostname = Annotated[
    str,
    typer.Option(
        help="The address to listen on.",
        envvar="HOSTNAME",
        show_envvar=False,
        rich_help_panel=_NETWORK,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        "-p",
        metavar="N",
        parser=whole(0, 65535),
        help="The HTTP port; 0 takes a free one.",
        envvar="PORT",
        show_envvar=False,
        rich_help_panel=_NETWORK,
    ),
]
GracefulTerminationTimeout = Annotated[
    int,
    typer.Option(
        "--graceful-termination-timeout",
        "-g",
        metavar="N",
        parser=whole(0),
        help="Seconds that requests in flight get to finish after SIGTERM or Ctrl-C.",
        envvar="GRACEFUL_TERMINATION_TIMEOUT",
        show_envvar=False,
        rich_help_panel=_NETWORK,
    ),
]
MaxBestOf = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Upper limit of best_of.",
        envvar="MAX_BEST_OF",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
MaxStopSequences = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(0),
        help="Upper limit of a request's stop sequences.",
        envvar="MAX_STOP_SEQUENCES",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
MaxTopNTokens = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(0),
        help="Upper limit of top_n_tokens and top_logprobs.",
        envvar="MAX_TOP_N_TOKENS",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
MaxClientBatchSize = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Prompts in one call of /v1/completions.",
        envvar="MAX_CLIENT_BATCH_SIZE",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
ValidationWorkers = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Threads that tokenize prompts.",
        envvar="VALIDATION_WORKERS",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
PayloadLimit = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Bytes of a request's body.",
        envvar="PAYLOAD_LIMIT",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
WatermarkGamma = Annotated[
    float,
    typer.Option(
        metavar="X",
        parser=share,
        help="Share of the vocabulary that a watermark favours.",
        envvar="WATERMARK_GAMMA",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
WatermarkDelta = Annotated[
    float,
    typer.Option(
        metavar="X",
        parser=ratio,
        help="What a watermark adds to the logits of that share.",
        envvar="WATERMARK_DELTA",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
GenerationConfig = Annotated[
    Literal["auto", "none"],
    typer.Option(
        metavar="SOURCE",
        help="What /v1 requests mean that do not say how to sample: auto (the model's "
        "generation_config.json) or none (OpenAI's defaults).",
        envvar="GENERATION_CONFIG",
        show_envvar=False,
        rich_help_panel=_API,
    ),
]
LoggerLevel = Annotated[
    str,
    typer.Option(help="debug, info, warning or error.", envvar="LOG_LEVEL", rich_help_panel=_LOGS),
]
JsonOutput = Annotated[
    bool,
    typer.Option(
        "--json-output",
        help="Log lines as JSON.",
        envvar="JSON_OUTPUT",
        show_envvar=False,
        rich_help_panel=_LOGS,
    ),
]
ModelPath = Annotated[
    Path | None, typer.Option(help="The model's folder, when it is known already.", hidden=True)
]
LifelineFd = Annotated[
    int | None, typer.Option(help="A pipe that closes when the parent is gone.", hidden=True)
]


def set_up_logs(role: str, level: str, json_output: bool) -> None:
    """Configure this process's log. Raises ConfigError for a level that is none."""
    from tgi_cli import logging as logs

    try:
        logs.setup(role, level, json_output)
    except ValueError as error:
        raise ConfigError(f"--logger-level: {error}") from error


def from_environment(context: typer.Context, name: str) -> bool:
    """Whether a parameter's value came from its environment variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def chosen_model(context: typer.Context, model: str | None, model_id: str | None) -> str:
    """The model that the argument, the flag or MODEL_ID names, in this order; "" for none.

    Raises:
        ConfigError: the argument and the flag name different models.
    """
    if model_id is None or model == model_id:
        return model or ""
    if model is not None and not from_environment(context, "model"):
        raise ConfigError(
            f"both {model!r} and --model-id {model_id!r} name a model", "give one of them"
        )
    return model_id


def input_limit(max_input_tokens: int | None, max_input_length: int | None) -> int | None:
    """The limit under either of its names. Raises ConfigError if it is given under both."""
    if max_input_tokens is not None and max_input_length is not None:
        raise ConfigError(
            "--max-input-tokens and --max-input-length are two names of one limit",
            "give the first only (or unset MAX_INPUT_LENGTH)",
        )
    return max_input_length if max_input_tokens is None else max_input_tokens


def listen_address(context: typer.Context, hostname: str) -> str:
    """The address to listen on.

    Shells and containers set HOSTNAME to the machine's name, which nobody means as an address
    to listen on; as in TGI, what is no address there counts as 0.0.0.0.
    """
    if not from_environment(context, "hostname"):
        return hostname
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        level = logging.DEBUG if hostname == socket.gethostname() else logging.WARNING
        log.log(level, "HOSTNAME=%s is not an address: listening on 0.0.0.0", hostname)
        return "0.0.0.0"
    return hostname
