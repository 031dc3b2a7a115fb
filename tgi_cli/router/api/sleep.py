"""The engine's sleep: ``POST /sleep``, ``POST /wake_up`` and ``GET /is_sleeping``.

Paths, parameters and answers are vLLM's: https://docs.vllm.ai/en/latest/features/sleep_mode/.
"""

from __future__ import annotations

from starlette.responses import Response

from tgi_cli.router.api.schemas.tgi import Sleeping
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.state import RouterState

_LEVELS = ("1", "2")
_MODES = ("abort", "wait")
_TAGS = ("weights", "kv_cache")


async def sleep(context: RequestContext[None]) -> Response:
    """Stop the model server, which returns all of its memory; answers when it has ended.

    Both levels do the same. With mode `abort`, requests in flight end with an error; with `wait`,
    they may finish within `--graceful-termination-timeout`. New ones wait and wake it again.
    """
    _query(context, "level", _LEVELS)
    mode = _query(context, "mode", _MODES) or "abort"
    state = context.state
    grace = state.config.graceful_termination_timeout if mode == "wait" else 0
    await state.sleep.sleep(grace, state.generator.abort_running)
    return Response(status_code=200)


async def wake_up(context: RequestContext[None]) -> Response:
    """Start the model server if it sleeps; answers when it serves. Tags do not divide this."""
    _query(context, "tags", _TAGS)
    await context.state.sleep.wake()
    return Response(status_code=200)


async def is_sleeping(context: RequestContext[None]) -> Response:
    """Whether the model server sleeps, or is about to sleep or to wake."""
    return json_response(Sleeping(is_sleeping=not context.state.sleep.awake))


def _query(context: RequestContext[None], name: str, known: tuple[str, ...]) -> str | None:
    """The last value of a parameter of the query. Raises ApiError."""
    values = context.request.query_params.getlist(name)
    for value in values:
        if value not in known:
            raise errors.bad_request(f"`{name}` must be {' or '.join(known)}")
    return values[-1] if values else None


def _require_sleep(state: RouterState) -> None:
    """Raise ApiError, 403, unless the server was started to allow it."""
    if state.config.control_fd is None or not state.config.may_sleep:
        raise errors.forbidden(
            "this server does not sleep: start it by `tgi serve` with --enable-sleep-mode, or "
            "--sleep-idle-seconds"
        )


def _require_stop(state: RouterState) -> None:
    """The same, for a request that ends those of other clients and costs the time of a start."""
    _require_sleep(state)
    config = state.config
    if not config.enable_sleep_mode and config.api_key is None:
        raise errors.forbidden(
            "this server sleeps when it is idle, and anyone could stop it, as it has no API key: "
            "start it with --enable-sleep-mode to allow that, or with API_KEY set (or --api-key)"
        )


def _operation(**query: tuple[str, ...]) -> Operation:
    parameters = {name: {"type": "string", "enum": list(words)} for name, words in query.items()}
    return Operation(tag="Service", query=parameters, errors=(400, 403, 503))


ROUTES = [
    Endpoint("/sleep", sleep, _operation(level=_LEVELS, mode=_MODES), require=_require_stop),
    Endpoint("/wake_up", wake_up, _operation(tags=_TAGS), require=_require_sleep),
    Endpoint(
        "/is_sleeping", is_sleeping, Operation(tag="Service", answer=(Sleeping,)), method="GET"
    ),
]
