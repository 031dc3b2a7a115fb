"""Requests to the hub: settings from the environment, retries, and errors."""

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

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
INITIAL_DELAY = 1.0
"""Seconds before the second attempt; doubled before each further one."""
MAX_DELAY = 300.0
"""Seconds. A longer ``Retry-After`` is reported as an error at once."""
RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

ErrorTranslator = Callable[[int, str, str], HubError | None]
"""Maps a status, ``X-Error-Code`` and ``X-Error-Message`` to an error, or to None to retry."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HubEnvironment:
    """Settings of one download, read when it starts rather than at import.

    Sources: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables

    Attributes:
        endpoint: URL of the hub or a mirror.
        token: access token, or None for anonymous access.
        cache: huggingface_hub's cache folder, shared with other tools.
        offline: whether the hub must not be contacted.
        timeout: seconds without a byte before a connection counts as lost.
        prefer_xet: whether to use hf-xet's parallel transfers, which cannot resume inside a file.
    """

    endpoint: str
    token: str | None
    cache: Path
    offline: bool
    timeout: float
    prefer_xet: bool

    @classmethod
    def read(cls) -> HubEnvironment:
        """Read the environment variables, TGI's old spellings included."""
        from huggingface_hub import constants, get_token

        token = _first_set("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        return cls(
            endpoint=(_first_set("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
            token=token or get_token(),
            cache=cache_folder(),
            offline=_is_true("HF_HUB_OFFLINE") or _is_true("TRANSFORMERS_OFFLINE"),
            timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
            prefer_xet=_is_true("HF_XET_HIGH_PERFORMANCE") and not _is_true("HF_HUB_DISABLE_XET"),
        )


def cache_folder() -> Path:
    """huggingface_hub's cache folder. Reading the other settings imports its HTTP client."""
    from huggingface_hub import constants

    cache = _first_set("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    if cache is None and (home := _first_set("HF_HOME")):
        cache = str(Path(home) / "hub")
    return Path(os.path.expandvars(cache or constants.HF_HUB_CACHE)).expanduser()


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _first_set(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Parse ``Retry-After``, a number of seconds or a date (RFC 9110, 10.2.3), into seconds."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(moment.timestamp() - time.time(), 0.0)


def retry_delay(attempt: int, requested: float | None) -> float:
    """Seconds to wait after ``attempt``, counted from 1: ``requested``, else 1, 2, 4 ... s."""
    if requested is not None:
        return requested
    return INITIAL_DELAY * 2.0 ** (attempt - 1) * random.uniform(0.8, 1.2)


class RetryableStatus(Exception):
    """The hub answered with a status that is worth another attempt."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"the hub answered {status}")
        self.status = status
        self.retry_after = retry_after(headers)


def status_error(
    to_error: ErrorTranslator, status: int, headers: Mapping[str, str]
) -> HubError | RetryableStatus:
    """Translate an error status of the hub."""
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    return to_error(status, code, message) or RetryableStatus(status, headers)


def unreachable_error(hub: HubEnvironment, error: BaseException) -> OfflineError:
    """Build the error for a failed connection, with the system's reason."""
    reason = str(error).strip() or type(error).__name__
    return OfflineError(
        f"cannot reach {hub.endpoint}: {reason}",
        "check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT",
    )


def offline_mode_error() -> OfflineError:
    """Build the error for a request that HF_HUB_OFFLINE forbids."""
    return OfflineError(
        "HF_HUB_OFFLINE is set and the cache does not have the whole model",
        "unset HF_HUB_OFFLINE, or download the model first",
    )


def transport_errors() -> tuple[type[Exception], ...]:
    """Exception classes for lost or refused connections, in our client and huggingface_hub's.

    huggingface_hub uses httpx before version 2, and httpx2 since.
    """
    import httpx

    try:
        import httpx2
    except ImportError:
        return (httpx.TransportError,)
    return (httpx.TransportError, httpx2.TransportError)


def call_with_retries(
    request: Callable[[], _Result],
    hub: HubEnvironment,
    description: str,
    to_error: ErrorTranslator,
    stop: threading.Event | None = None,
) -> _Result:
    """Call ``request`` up to ``MAX_ATTEMPTS`` times, and translate huggingface_hub's errors.

    A refused connection or an unknown host is tried only twice: that is a wrong setting rather
    than a passing failure.

    Raises:
        HubError: the error of ``to_error``, or OfflineError after the last attempt.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    attempt = 0
    while True:
        attempt += 1
        failure: Exception
        try:
            return request()
        except OfflineModeIsEnabled as error:
            raise offline_mode_error() from error
        except HfHubHTTPError as error:
            response: Any = error.response
            if response is None:
                raise unreachable_error(hub, error) from error
            failure = status_error(to_error, response.status_code, response.headers)
            if isinstance(failure, HubError):
                raise failure from error
        except transport_errors() as error:
            failure = error
        attempts = 2 if type(failure).__name__ == "ConnectError" else MAX_ATTEMPTS
        wait_to_retry(hub, description, failure, attempt, attempts, stop)


def wait_to_retry(
    hub: HubEnvironment,
    description: str,
    failure: Exception,
    attempt: int,
    attempts: int = MAX_ATTEMPTS,
    stop: threading.Event | None = None,
) -> bool:
    """Sleep before the next attempt; return whether ``stop`` was set meanwhile.

    Raises:
        OfflineError: ``attempt`` was the last, or the hub requests too long a delay.
    """
    refused = failure if isinstance(failure, RetryableStatus) else None
    requested = refused.retry_after if refused else None
    if attempt >= attempts or (requested or 0) > MAX_DELAY:
        if refused is None:
            raise unreachable_error(hub, failure) from failure
        wait = f"; it asks to wait {requested:.0f} s" if requested else ""
        if refused.status == 429:
            remedy = "wait a while" + ("" if hub.token else "; with HF_TOKEN the limits are higher")
            raise OfflineError(f"{hub.endpoint} limits the rate of requests (429){wait}", remedy)
        raise OfflineError(
            f"{hub.endpoint} keeps answering {refused.status}{wait}",
            "it is overloaded or down: try again later, the download will resume",
        )
    seconds = retry_delay(attempt, requested)
    reason = str(failure) or type(failure).__name__
    logger.warning("%s: %s; trying again in %.0f s", description, reason, seconds)
    return (stop or threading.Event()).wait(seconds)
