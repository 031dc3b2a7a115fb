"""How requests are sent: route, sampling parameters, time limits; and how tokens are counted.

The workload (``bench/workloads``) defines what is sent and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from tgi_cli.bench.events import BenchTarget
from tgi_cli.config.settings import default
from tgi_cli.config.settings.setting import BENCH
from tgi_cli.errors import ConfigError

Route = Literal["generate_stream", "completions", "chat"]


class BenchSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of requests; None and False are omitted."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_n_tokens: int | None = None
    watermark: bool = False
    do_sample: bool = False


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of all requests of a run.

    Attributes:
        route: Route of the server. ``auto`` uses TGI's if the server has it and it supports the
            settings, and OpenAI's otherwise (:func:`route_of`).
        model: Model in OpenAI's requests. Default: the target's.
        extra_body: Merged into every request last.
        ignore_eos: Generate up to ``max_tokens``. TGI's routes have no such field.
        timeout, connect_timeout: Seconds for a whole request, and for its connection.
        drain: Seconds for requests in flight at the end of a step of limited time; those that take
            longer count as errors of the kind ``unfinished``.
        processes: Load generator processes. Default: one per 256 streams, as far as there are
            cores for them.
    """

    route: Literal["auto", "generate_stream", "completions", "chat"] = "auto"
    model: str = ""
    api_key: str = ""
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    sampling: BenchSampling = BenchSampling()
    ignore_eos: bool = False
    timeout: float = default("timeout", BENCH)
    connect_timeout: float = 10.0
    drain: float = 60.0
    processes: int = 0

    @property
    def all_headers(self) -> dict[str, str]:
        """The headers, with the API key as a bearer token unless they have their own."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | self.headers


class TokenCounter(Protocol):
    """Counts tokens as the target does; see :mod:`tgi_cli.bench.token_counter`.

    Attributes:
        name: Its source, for the record.
        exact: Whether it is exact, not an estimate.
    """

    name: str
    exact: bool

    def count(self, text: str, special: bool = True) -> int:
        """Count the tokens of a text, with the special tokens of a prompt if ``special``."""

    def words(self) -> Sequence[str]:
        """Words for prompts, mostly one token each."""


def route_of(target: BenchTarget, settings: RequestSettings, chat: bool = False) -> Route:
    """The route of requests; ``chat`` if they are messages.

    Raises:
        ConfigError: The route does not support the settings.
    """
    route = settings.route
    sampling = settings.sampling
    if route == "auto":
        if chat:
            route = "chat"
        elif target.kind == "tgi" and not settings.ignore_eos:
            route = "generate_stream"
        else:
            route = "completions"
    if route == "generate_stream" and settings.ignore_eos:
        raise ConfigError(
            "TGI's /generate_stream has no ignore_eos", "use --route completions or chat"
        )
    if chat and route != "chat":
        raise ConfigError(
            f"the route {route} does not take the messages of the workload",
            "use --route chat",
        )
    if route != "generate_stream" and (sampling.watermark or sampling.top_n_tokens):
        raise ConfigError(
            f"the route {route} has neither watermark nor top_n_tokens",
            "use --route tgi",
        )
    return route
