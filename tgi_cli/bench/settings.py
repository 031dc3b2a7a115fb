"""How requests are sent: the route, what bodies say, limits of time; and how tokens are counted.

A workload says what is sent and when (``bench/workloads``); these settings hold for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from tgi_cli.bench.events import BenchTarget
from tgi_cli.config.settings import BENCH, default
from tgi_cli.errors import ConfigError

Route = Literal["generate_stream", "completions", "chat"]


class BenchSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What bodies say of the choice of tokens; what is None or False is left out of them."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_n_tokens: int | None = None
    seed: int | None = None
    watermark: bool = False
    do_sample: bool = False


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all requests of a run have in common.

    Attributes:
        route: of the server's; ``auto`` takes TGI's own where the server has it and nothing asked
            for is beyond it, and OpenAI's otherwise (:func:`route_of`).
        model: what OpenAI's bodies name; empty: the target's.
        extra_body: merged into every body, last.
        ignore_eos: generate to the very last token asked for. TGI's own routes have no such field.
        include_usage: ask OpenAI's streams for their token counts; servers that refuse the
            question are asked without it.
        timeout, connect_timeout: seconds for a whole request, and for its connection.
        drain: seconds that requests in flight get at the end of a step that is bounded in time;
            those that need longer count as errors of the kind ``unfinished``.
        insecure: take any certificate; ``ca_file`` names one to trust.
        processes: of the load generator; 0: one, and one more for every 256 streams where the
            machine has the cores for it.
    """

    route: Literal["auto", "generate_stream", "completions", "chat"] = "auto"
    model: str = ""
    api_key: str = ""
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    sampling: BenchSampling = BenchSampling()
    ignore_eos: bool = False
    include_usage: bool = True
    timeout: float = default("timeout", BENCH)
    connect_timeout: float = 10.0
    drain: float = 60.0
    insecure: bool = False
    ca_file: str = ""
    processes: int = 0

    @property
    def all_headers(self) -> dict[str, str]:
        """The headers, with the API key as a bearer token unless they have their own."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | self.headers


class TokenCounter(Protocol):
    """Counts tokens as the target does; see :mod:`tgi_cli.bench.token_counter`.

    Attributes:
        name: for the record: where it is from.
        exact: False where it can only guess.
    """

    name: str
    exact: bool

    def count(self, text: str, special: bool = True) -> int:
        """Tokens of the text; ``special``: with those that begin or end a prompt."""

    def words(self) -> Sequence[str]:
        """Words that are mostly one token each, to build prompts of."""


def route_of(target: BenchTarget, settings: RequestSettings, chat: bool = False) -> Route:
    """The route that requests take; ``chat``: they are messages.

    Raises:
        ConfigError: the route cannot carry what the settings ask for.
    """
    route = settings.route
    said = settings.sampling
    if route == "auto":
        if chat:
            route = "chat"
        elif target.kind == "tgi" and not settings.ignore_eos:
            route = "generate_stream"
        else:
            route = "completions"
    if route == "generate_stream" and settings.ignore_eos:
        raise ConfigError(
            "TGI's /generate_stream has no ignore_eos", "use the route completions or chat for it"
        )
    if chat and route != "chat":
        raise ConfigError(
            f"the workload is of messages, which the route {route} does not take",
            "use the route chat",
        )
    if route != "generate_stream" and (said.watermark or said.top_n_tokens):
        raise ConfigError(
            f"the route {route} knows neither watermark nor top_n_tokens",
            "use the route generate_stream for them",
        )
    return route
