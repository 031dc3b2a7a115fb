"""What commands share before they run: logging, address, access, validation."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from tgi_cli.cli.log_setup import set_up_logs
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ConfigError
from tgi_cli.files import read_text

log = logging.getLogger(__name__)

_KEY_FILE_BYTES = 1 << 20
"""Limit for a file of API keys."""


def prepare(settings: ParsedSettings, role: str, level: str = "") -> None:
    """Configure the log, log settings without effect, and export variables for libraries.

    Raises:
        ConfigError: an invalid log level, or a setting that is rejected.
    """
    set_up_logs(role, level or settings["logger_level"], settings["json_output"])
    settings.log_ignored()
    settings.export()


def serve_config(settings: ParsedSettings, **overrides: Any) -> ServeConfig:
    """The settings as a ServeConfig; without a model, its id is empty."""
    own = {"model_id": settings["model_id"] or "", **overrides}
    return ServeConfig(**settings.fields_of(ServeConfig) | own)


def listen_address(settings: ParsedSettings) -> str:
    """The address to listen on.

    Shells and containers set HOSTNAME to the machine's name. As in TGI, a value of the variable
    that is not an address counts as 0.0.0.0.
    """
    hostname: str = settings["hostname"]
    if settings.origins["hostname"].kind != "variable":
        return hostname
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        level = logging.DEBUG if hostname == socket.gethostname() else logging.WARNING
        log.log(level, "HOSTNAME=%s is not an address: listening on 0.0.0.0", hostname)
        return "0.0.0.0"
    return hostname


def checked_key(settings: ParsedSettings) -> str | None:
    """The API keys of flag or variable and of the file, comma-separated, or None.

    Raises:
        ConfigError: an empty key, one that cannot be sent in a header, or an unreadable file.
    """
    words: list[str] = list(settings["api_key"] or ())
    if settings.origins["api_key"].kind == "variable" or (not words and "API_KEY" in os.environ):
        words = [os.environ["API_KEY"]]  # unsplit: click splits variables of lists at spaces
    if (file := settings.get("api_key_file")) is not None:
        words += _keys_of(file)
    if not words:
        return None
    keys = [key.strip() for word in words for key in word.split(",")]
    for key in keys:
        if not key:
            raise ConfigError(
                "the API key is empty" if len(keys) == 1 else "one of the API keys is empty",
                "set --api-key to a key, or unset API_KEY",
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                "the API key has characters that cannot be sent in a header",
                "use ASCII letters, digits and punctuation",
            )
    return ",".join(keys)


def _keys_of(file: Path) -> list[str]:
    """The lines of a file of API keys. Raises ConfigError."""
    try:
        lines = [line for line in read_text(file, _KEY_FILE_BYTES).splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--api-key-file {file} has no key", "write one key per line")
    return lines


def checked_origins(words: list[str] | None) -> tuple[str, ...]:
    """CORS origins, as browsers send them; empty: all.

    Raises:
        ConfigError: a word that is not an origin.
    """
    origins = [part.strip() for word in words or () for part in word.split(",") if part.strip()]
    for origin in origins:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) and origin not in (
            "*",
            "null",
        ):
            raise ConfigError(
                f"--cors-allow-origin {origin!r} is not an origin",
                "give only scheme, host and port: https://app.example.org",
            )
    return () if "*" in origins else tuple(origins)


def checked_names(words: list[str] | None) -> tuple[str, ...]:
    """The names that a model is served under, without duplicates.

    Raises:
        ConfigError: an empty name.
    """
    names = [part.strip() for word in words or () for part in word.split(",")]
    if not all(names):
        raise ConfigError("--served-model-name is empty", "give the model a name")
    return tuple(dict.fromkeys(names))


def checked_domains(words: list[str] | None) -> tuple[str, ...]:
    """The hosts that images may be fetched from.

    Raises:
        ConfigError: a word that is neither HOST nor HOST:PORT.
    """
    from tgi_cli.vision.limits import parse_domain

    domains = [part.strip() for word in words or () for part in word.split(",") if part.strip()]
    for domain in domains:
        try:
            parse_domain(domain)
        except ValueError as error:
            raise ConfigError(
                f"--allowed-media-domains {domain!r}: {error}",
                "give HOST or HOST:PORT, without scheme and path: images.example.org",
            ) from None
    if words and not domains:
        raise ConfigError("--allowed-media-domains is empty", "name a host, or leave it off")
    return tuple(domains)


def checked_media_folder(folder: Path | None) -> Path | None:
    """The folder below which images may be read.

    Raises:
        ConfigError: it is not a folder.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"--allowed-local-media-path {folder} is not a folder", "give an existing folder"
        )
    return None if folder is None else folder.absolute()


def front(settings: ParsedSettings) -> dict[str, object]:
    """The router's settings that need validation. Raises ConfigError."""
    if settings["ssl_certfile"] is not None:
        from tgi_cli.router.http.tls import server_context

        server_context(settings["ssl_certfile"], settings["ssl_keyfile"])
    elif settings["ssl_keyfile"] is not None:
        raise ConfigError("--ssl-keyfile needs a certificate", "add --ssl-certfile")
    if settings["otlp_endpoint"]:
        from tgi_cli.telemetry.tracer import check_endpoint

        check_endpoint(settings["otlp_endpoint"])
    domains = checked_domains(settings["allowed_media_domains"])
    if settings["allow_private_media"] and not (settings["media_fetch"] or domains):
        raise ConfigError(
            "--allow-private-media has no effect, as no image is fetched",
            "add --media-fetch or --allowed-media-domains",
        )
    return {
        "api_key": checked_key(settings),
        "cors_allow_origin": checked_origins(settings["cors_allow_origin"]),
        "allowed_media_domains": domains,
        "allowed_local_media_path": checked_media_folder(settings["allowed_local_media_path"]),
        "otlp_endpoint": settings["otlp_endpoint"] or None,
        "served_model_name": checked_names(settings["served_model_name"]),
    }
