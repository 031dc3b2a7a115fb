"""What commands do with their settings before they act: the log, the address, who may use it."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from pathlib import Path

from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.errors import ConfigError

log = logging.getLogger(__name__)

_TARGETS = {
    "text_generation_launcher": ("launcher",),
    "text_generation_router": ("router", "text"),
    "text_generation_router_v2": ("router", "text"),
    "text_generation_router_v3": ("router", "text"),
    "text_generation_server": ("rpc", "engine", "worker", "models"),
    "text_generation_benchmark": ("bench",),
}
"""What TGI's programs are called in filters of logs, and who does their work here."""


def set_up_logs(role: str, level: str, json_output: bool) -> None:
    """Configure this process's log.

    ``level`` may have more after a comma: ``info,router=debug`` for a room of this package,
    ``info,text_generation_router=debug`` as TGI had it, or any logger's name.

    Raises:
        ConfigError: a level that is none, or a directive that is no ``target=level``.
    """
    from tgi_cli import logging as logs

    if os.environ.get("LOG_COLORIZE") == "1":  # which, in TGI, takes colours away
        os.environ["NO_COLOR"] = "1"
    try:
        directives = logs.parse_directives(level)
        logs.setup(role, level, json_output)
        for target, number in directives.items():
            for name in _loggers(target):
                logging.getLogger(name).setLevel(number)
    except ValueError as error:
        raise ConfigError(f"--logger-level: {error}") from error


def _loggers(target: str) -> list[str]:
    rooms = _TARGETS.get(target, (target.removeprefix("tgi_cli."),))
    here = Path(__file__).parents[1]
    return [f"tgi_cli.{room}" if (here / room.split(".")[0]).exists() else room for room in rooms]


def prepare(given: ParsedSettings, role: str) -> None:
    """Set up the log, say what has no effect, and tell libraries what they read themselves.

    Raises:
        ConfigError: something that cannot be.
    """
    set_up_logs(role, given["logger_level"], given["json_output"])
    given.explain()
    given.export()


def listen_address(given: ParsedSettings) -> str:
    """The address to listen on.

    Shells and containers set HOSTNAME to the machine's name, which nobody means as an address
    to listen on; as in TGI, what is no address there counts as 0.0.0.0.
    """
    hostname: str = given["hostname"]
    if given.origins["hostname"].kind != "variable":
        return hostname
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        level = logging.DEBUG if hostname == socket.gethostname() else logging.WARNING
        log.log(level, "HOSTNAME=%s is not an address: listening on 0.0.0.0", hostname)
        return "0.0.0.0"
    return hostname


def checked_key(given: ParsedSettings) -> str | None:
    """API keys that clients can send, with commas between them; None for none.

    Raises:
        ConfigError: an empty one, which would guard nothing, or one that no header can carry.
    """
    said: list[str] = list(given["api_key"] or ())
    if given.origins["api_key"].kind == "variable" or (not said and "API_KEY" in os.environ):
        said = [os.environ["API_KEY"]]  # whole: what takes lists would part it at spaces
    if not said:
        return None
    keys = [key.strip() for part in said for key in part.split(",")]
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


def check_tls(certfile: Path | None, keyfile: Path | None) -> None:
    """Whether these files can be served with, if there are any. Raises ConfigError."""
    if certfile is not None:
        from tgi_cli.router.http.tls import server_context

        server_context(certfile, keyfile)
    elif keyfile is not None:
        raise ConfigError("--ssl-keyfile has no certificate", "give its --ssl-certfile too")


def check_otlp(endpoint: str | None) -> None:
    """Whether traces can be sent to there, if anywhere. Raises ConfigError."""
    if endpoint:
        from tgi_cli.router.observability.tracing import check

        check(endpoint)


def front(given: ParsedSettings) -> dict[str, object]:
    """What the router is told that wants a check first. Raises ConfigError."""
    check_tls(given["ssl_certfile"], given["ssl_keyfile"])
    check_otlp(given["otlp_endpoint"])
    return {
        "api_key": checked_key(given),
        "cors_allow_origin": checked_origins(given["cors_allow_origin"]),
        "otlp_endpoint": given["otlp_endpoint"] or None,
    }
