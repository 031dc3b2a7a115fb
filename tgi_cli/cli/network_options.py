"""The flags about who may use a server, over what, and who watches it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from tgi_cli.cli.options import from_environment
from tgi_cli.errors import ConfigError

_NETWORK = "Network"
_LOGS = "Logs"

ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Clients must send it (Authorization: Bearer KEY). Several: any one of them; repeat "
        "the flag, or put commas between. Better given as the variable API_KEY: flags show in "
        "the list of processes.",
        envvar="API_KEY",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_NETWORK,
    ),
]
CorsAllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Pages of this origin (https://HOST) may use the server. Repeat the flag, or put "
        "commas between. Left open: all pages may.",
        envvar="CORS_ALLOW_ORIGIN",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_NETWORK,
    ),
]
SslCertfile = Annotated[
    Path | None,
    typer.Option(
        metavar="PEM",
        help="Speak HTTPS: the certificate and its chain.",
        envvar="SSL_CERTFILE",
        show_envvar=False,
        rich_help_panel=_NETWORK,
    ),
]
SslKeyfile = Annotated[
    Path | None,
    typer.Option(
        metavar="PEM",
        help="The key of that certificate, unless it is in the same file.",
        envvar="SSL_KEYFILE",
        show_envvar=False,
        rich_help_panel=_NETWORK,
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send traces to this OpenTelemetry collector (gRPC, http://HOST:4317).",
        envvar="OTLP_ENDPOINT",
        show_envvar=False,
        rich_help_panel=_LOGS,
    ),
]
OtlpServiceName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What the traces call this server.",
        envvar="OTLP_SERVICE_NAME",
        show_envvar=False,
        rich_help_panel=_LOGS,
    ),
]
VllmMetrics = Annotated[
    bool,
    typer.Option(
        "--vllm-metrics",
        help="Show what gateways read under vLLM's names too.",
        envvar="VLLM_METRICS",
        show_envvar=False,
        rich_help_panel=_LOGS,
    ),
]


def checked_key(context: typer.Context, api_key: list[str] | None) -> str | None:
    """API keys that clients can send, with commas between them; None for none.

    Raises:
        ConfigError: an empty one, which would guard nothing, or one that no header can carry.
    """
    given = list(api_key or ())
    if not given or from_environment(context, "api_key"):
        if "API_KEY" not in os.environ:
            return None
        given = [os.environ["API_KEY"]]  # whole: what takes lists would part it at spaces
    keys = [key.strip() for part in given for key in part.split(",")]
    for key in keys:
        if not key:
            raise ConfigError(
                "the API key is empty" if len(keys) == 1 else "one of the API keys is empty",
                "set --api-key to a key, or unset API_KEY",
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                "the API key has characters that no header can carry",
                "use letters, digits and signs of ASCII",
            )
    return ",".join(keys)


def checked_origins(given: list[str] | None) -> tuple[str, ...]:
    """Origins of pages, as browsers send them; none, or ``*``: all.

    Raises:
        ConfigError: one that no browser would send.
    """
    origins = [part.strip() for text in given or () for part in text.split(",") if part.strip()]
    for origin in origins:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) and origin not in (
            "*",
            "null",
        ):
            raise ConfigError(
                f"--cors-allow-origin {origin!r} is not an origin",
                "give scheme, host and port alone: https://app.example.org",
            )
    return () if "*" in origins else tuple(origins)


def checked_tls(certfile: Path | None, keyfile: Path | None) -> None:
    """Whether these files can be served with, if there are any. Raises ConfigError."""
    if certfile is not None:
        from tgi_cli.router.tls import server_context

        server_context(certfile, keyfile)
    elif keyfile is not None:
        raise ConfigError("--ssl-keyfile has no certificate", "give its --ssl-certfile too")


def checked_otlp(endpoint: str | None) -> None:
    """Whether traces can be sent to there, if anywhere. Raises ConfigError."""
    if endpoint:
        from tgi_cli.router.tracing import check

        check(endpoint)
