"""What the environment says about the hub: where it is, who asks, where files are kept."""

from __future__ import annotations

import email.utils
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tgi_cli.errors import HubError, OfflineError

_TRUE = {"1", "ON", "YES", "TRUE"}


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().upper() in _TRUE


def _first(*names: str) -> str | None:
    for name in names:
        if value := os.environ.get(name, "").strip():
            return value
    return None


@dataclass(frozen=True)
class HubEnvironment:
    """The settings of one download, read when it starts rather than at import.

    ``token`` is None for an anonymous caller. ``cache`` is huggingface_hub's cache, in its
    documented layout, so that other tools find what was downloaded and the other way round.
    Sources: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """

    endpoint: str
    token: str | None
    cache: Path
    offline: bool
    timeout: float
    """Seconds without a byte before a connection counts as lost."""
    prefer_xet: bool
    """Whether the user asked for hf-xet's parallel transfers, which do not resume inside a file."""

    @classmethod
    def read(cls) -> HubEnvironment:
        """The environment variables, TGI's old spellings included; then huggingface_hub's own."""
        from huggingface_hub import constants, get_token

        token = _first("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        cache = _first("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
        if cache is None and (home := _first("HF_HOME")):
            cache = str(Path(home) / "hub")
        return cls(
            endpoint=(_first("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
            token=token or get_token(),
            cache=Path(os.path.expandvars(cache or constants.HF_HUB_CACHE)).expanduser(),
            offline=_is_true("HF_HUB_OFFLINE") or _is_true("TRANSFORMERS_OFFLINE"),
            timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
            prefer_xet=_is_true("HF_XET_HIGH_PERFORMANCE") and not _is_true("HF_HUB_DISABLE_XET"),
        )


logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
INITIAL_DELAY = 1.0
MAX_DELAY = 300.0
"""Seconds; a hub that asks for more patience than that is reported instead of waited for."""
RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

ErrorTranslator = Callable[[int, str, str], HubError | None]
_Result = TypeVar("_Result")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that ``Retry-After`` asks for, as a number or a date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(moment.timestamp() - time.time(), 0.0)


def retry_delay(attempt: int, asked: float | None) -> float:
    """Seconds before try ``attempt`` + 1 (the first is 1): what was asked, else 1, 2, 4 ... s."""
    if asked is not None:
        return asked
    return INITIAL_DELAY * 2.0 ** (attempt - 1) * random.uniform(0.8, 1.2)


def error_fields(status: int, headers: Mapping[str, str]) -> tuple[int, str, str]:
    """What ``ErrorTranslator`` wants to know of a response."""
    return status, headers.get("x-error-code", ""), headers.get("x-error-message", "")


def retries_exhausted(hub: HubEnvironment, status: int, asked: float | None) -> OfflineError:
    """The error after the last try that ended with a transient ``status``."""
    wait = f"; it asks to wait {asked:.0f} s" if asked else ""
    if status == 429:
        remedy = "wait a while" + ("" if hub.token else "; with HF_TOKEN the limits are higher")
        return OfflineError(f"{hub.endpoint} limits the rate of requests (429){wait}", remedy)
    return OfflineError(
        f"{hub.endpoint} keeps answering {status}{wait}",
        "it is overloaded or down: try again later, what was downloaded is kept",
    )


def unreachable_error(hub: HubEnvironment, error: BaseException) -> OfflineError:
    """The error for a hub that does not answer, with the reason in the system's words."""
    reason = str(error).strip() or type(error).__name__
    return OfflineError(
        f"cannot reach {hub.endpoint}: {reason}",
        "check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT",
    )


def transport_errors() -> tuple[type[Exception], ...]:
    """What httpx raises for a lost or refused connection, and the client of huggingface_hub.

    That is httpx too before huggingface_hub 2, and httpx2 since.
    """
    import httpx

    try:
        import httpx2
    except ImportError:
        return (httpx.TransportError,)
    return (httpx.TransportError, httpx2.TransportError)


def call_with_retries(
    ask: Callable[[], _Result],
    hub: HubEnvironment,
    doing: str,
    to_error: ErrorTranslator,
    stop: threading.Event | None = None,
) -> _Result:
    """``ask()``, up to ``MAX_ATTEMPTS`` times, with huggingface_hub's errors translated.

    A connection that is refused, or a name that does not resolve, is tried twice only: that is
    a setting, not a hiccup. Raises what ``to_error`` makes of a status, or OfflineError.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    attempt = 0
    while True:
        attempt += 1
        asked = None
        try:
            return ask()
        except OfflineModeIsEnabled as error:
            raise offline_mode_error() from error
        except HfHubHTTPError as error:
            response: Any = error.response
            if response is None:
                raise unreachable_error(hub, error) from error
            told = to_error(*error_fields(response.status_code, response.headers))
            if told is not None:
                raise told from error
            asked = retry_after(response.headers)
            if attempt >= MAX_ATTEMPTS or (asked or 0) > MAX_DELAY:
                raise retries_exhausted(hub, response.status_code, asked) from error
            why = f"{response.status_code}"
        except transport_errors() as error:
            tries = 2 if type(error).__name__ == "ConnectError" else MAX_ATTEMPTS
            if attempt >= tries:
                raise unreachable_error(hub, error) from error
            why = str(error) or type(error).__name__
        seconds = retry_delay(attempt, asked)
        logger.warning("%s: %s; trying again in %.0f s", doing, why, seconds)
        (stop or threading.Event()).wait(seconds)


def offline_mode_error() -> OfflineError:
    """The error for a request that HF_HUB_OFFLINE forbids."""
    return OfflineError(
        "HF_HUB_OFFLINE is set and the cache does not have the whole model",
        "unset HF_HUB_OFFLINE, or download the model first",
    )
