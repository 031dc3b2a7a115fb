"""Bounds on what one request may hold: counts, lengths and ranges, in one table.

A request costs what its text costs. Everything else that a client may send in numbers or at
length has a bound here, far above what clients use and low enough that handling it stays within
the budget of docs/operations.md. Every field of a request's schema is of one of these types, or
of a type that is bounded by itself (bool, float, Literal); a test holds the schemas to that.

msgspec checks the bounds while it decodes: https://jcristharif.com/msgspec/constraints.html
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from tgi_cli.text.stop import STOP_CHARACTERS

CONTAINERS = 50_000
"""Arrays and objects of a body. 2 MB hold 660,000, which take 120 ms and 42 MB to decode, a fifth
of that in the garbage collector; so many take 10 ms. Of structs of our own, so many take 25 ms."""
STRINGS = 100_000
"""Of a body, keys included. 2 MB hold 660,000: 22 ms and 32 MB; objects with keys more."""
DEPTH = 128
"""Of arrays and objects within each other. What walks through values takes up to three frames of
the interpreter's stack a level, of the 1,000 that it has."""

NAME_CHARACTERS = 512
"""Of names: models, adapters, roles, functions, ids."""
STOPS = 1024
"""Of any route's list of stop strings, before that flag is looked at."""
BAD_WORDS = 256
"""Words that must not be generated, each tokenized in three ways."""
BAD_WORD_CHARACTERS = 256
TOKEN_IDS = 4096
"""Of a list of token ids that shapes sampling: ``stop_token_ids``, ``allowed_token_ids``."""
DETOKENIZED_IDS = 1 << 17
"""Of ``/detokenize``; each may stand for a hundred characters."""
LOGIT_BIASES = 4096
"""Entries of ``logit_bias``; OpenAI takes 300, vLLM any number."""
BATCH = 4096
"""Prompts of one call; those that may run at once, ``--max-concurrent-requests``, are fewer."""
DIMENSIONS = 16
"""Of a tensor of KServe's."""

Text = Annotated[str, Meta(extra={"bound": "payload"})]
"""Bounded by the payload alone; long ones are handled off the event loop."""
Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
StopString = Annotated[str, Meta(max_length=STOP_CHARACTERS)]
Stops = Annotated[list[StopString], Meta(max_length=STOPS)]
"""text/stop.py bounds them together."""
BadWord = Annotated[str, Meta(max_length=BAD_WORD_CHARACTERS)]
BadWords = Annotated[list[BadWord], Meta(max_length=BAD_WORDS)]

Unsigned = Annotated[int, Meta(ge=0, extra={"bound": "checked"})]
"""Whose range :mod:`tgi_cli.router.generation.validation` checks, in TGI's words."""
Unsigned32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Signed32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Dimensions = Annotated[list[Unsigned], Meta(max_length=DIMENSIONS)]

TokenIds = Annotated[list[Signed32], Meta(max_length=TOKEN_IDS)]
DetokenizedIds = Annotated[list[Unsigned32], Meta(max_length=DETOKENIZED_IDS)]
LogitBias = Annotated[dict[Name, float], Meta(max_length=LOGIT_BIASES)]

Json = Annotated[Any, Meta(extra={"bound": "values"})]
"""Any JSON: bounded by the number of values that a body may hold."""
JsonObject = Annotated[dict[str, Any], Meta(extra={"bound": "values"})]

TOP_LOGPROBS = 20
"""Of ``top_logprobs`` and ``logprobs`` on /v1: OpenAI's. ``--max-top-n-tokens`` bounds TGI's."""
MESSAGES = 10_000
TOOLS = 1024
PARTS = 4096
"""Parts of one message's content."""
CALLS = 1024
"""Tool calls of one message."""
ITEMS = 20_000
"""Items of a response's input; a message is one to four of them."""
CHOICES = 50_000
"""Texts to choose from; what compiling them may cost has bounds of its own."""
ADDRESS_CHARACTERS = 4096
"""Of a path or a repository's name: Linux's PATH_MAX."""

Signed64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), extra={"bound": "checked"})]
"""msgspec compares with 64-bit signed numbers alone; what takes a seed checks its upper end."""
Choices = Annotated[list[Text], Meta(max_length=CHOICES)]
Biases = Annotated[list[float], Meta(max_length=LOGIT_BIASES)]
Items = Annotated[list[JsonObject], Meta(max_length=ITEMS)]
ToolCalls = Annotated[list[JsonObject], Meta(max_length=CALLS)]
Names = Annotated[list[Name], Meta(max_length=TOOLS)]
Prompts = Annotated[list[Any], Meta(extra={"bound": "values"})]
"""Token ids, or prompts: their number is bounded by the context and the batch size."""
