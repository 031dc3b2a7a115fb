"""Amazon SageMaker: ``POST /invocations``, beside ``GET /ping``.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import Response

from tgi_cli.router.api.chat import CHAT, chat_completions
from tgi_cli.router.api.completions import COMPLETIONS, completions
from tgi_cli.router.api.schemas.openai import ChatRequest, CompletionRequest
from tgi_cli.router.api.schemas.tgi import CompatRequest
from tgi_cli.router.api.tgi import COMPAT, compat_generate
from tgi_cli.router.http.bodies import first_key, parse
from tgi_cli.router.http.body_errors import wrong_types
from tgi_cli.router.http.endpoint import Endpoint, RequestContext
from tgi_cli.router.http.sse import EventStream


async def invocations(context: RequestContext[bytes]) -> Response | EventStream:
    """``inputs`` is answered as by ``/``, ``messages`` as a chat, ``prompt`` as a completion."""
    body = context.body
    key = first_key(body, "inputs", "messages", "prompt")
    if key == "inputs":
        return await compat_generate(context.with_body(parse(body, CompatRequest)))
    if key == "messages":
        return await chat_completions(context.with_body(parse(body, ChatRequest)))
    if key == "prompt":
        return await completions(context.with_body(parse(body, CompletionRequest)))
    raise wrong_types("Object misses `inputs`, `messages` and `prompt`; it needs one of them")


_INVOCATIONS = replace(
    CHAT,
    tag="Amazon SageMaker",
    body=(*COMPAT.body, *CHAT.body, *COMPLETIONS.body),
    answer=(*COMPAT.answer, *CHAT.answer, *COMPLETIONS.answer),
    events=(*COMPAT.events, *CHAT.events, *COMPLETIONS.events),
    example=COMPAT.example,
)

ROUTES = [Endpoint("/invocations", invocations, _INVOCATIONS, decode=bytes)]
