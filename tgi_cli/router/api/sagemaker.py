"""Amazon SageMaker: ``POST /invocations``, beside ``GET /ping``.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.api.chat import chat_completions
from tgi_cli.router.api.completions import completions
from tgi_cli.router.api.tgi import compat_generate
from tgi_cli.router.http.bodies import parse, read_body, with_body, wrong_types
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import state_of


class _Keys(msgspec.Struct):
    inputs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


_KEYS = msgspec.json.Decoder(_Keys)


async def invocations(request: Request) -> Response | EventStream:
    """``inputs`` is answered as by ``/``, ``messages`` as a chat, ``prompt`` as a completion."""
    body = await read_body(request, state_of(request).config.payload_limit)
    keys = parse(body, _KEYS)
    again = with_body(request, body)
    if keys.inputs is not UNSET:
        return await compat_generate(again)
    if keys.messages is not UNSET:
        return await chat_completions(again)
    if keys.prompt is not UNSET:
        return await completions(again)
    raise wrong_types("Object misses `inputs`, `messages` and `prompt`; it needs one of them")


ROUTES = [Route("/invocations", invocations, methods=["POST"])]
