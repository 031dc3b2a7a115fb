"""Bounds of what one request may contain: counts, lengths and ranges, in one table.

The cost of a request should be that of its text. Everything else that clients can send in large
numbers or lengths has a bound here, far above actual use and low enough that handling it stays
within the budget of docs/operations.md. Every field of a request's schema has one of these types,
or a type that is bounded by itself (bool, float, Literal); a test enforces it.

msgspec checks the bounds while decoding: https://jcristharif.com/msgspec/constraints.html
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from tgi_cli.text.stop import STOP_CHARACTERS

CONTAINERS = 50_000
"""Arrays and objects of a body, decoded in 10 ms, or 25 ms as structs. 2 MB can contain 660,000,
which take 120 ms and 42 MB, a fifth of that in the garbage collector."""
VALUES = 600_000
"""Commas between the values of a body: the bytes of a text in KServe's form. 2 MB can contain a
million, which take 50 ms and more as floats, and 20 to 30 ms with this bound."""
STRINGS = 100_000
"""Strings of a body, keys included. 2 MB can contain 660,000, which take 22 ms and 32 MB."""
LARGE_BODY = 2_000_000
"""Size from which a body is one with images: it may hold no more commas and backslashes than one of
this size can. 32 MB are decoded in 11 ms as base64, in 48 ms with as many escapes as allowed; as
numbers it would be 212 ms."""
DEPTH = 128
"""Nested arrays and objects. Recursion through values takes up to three frames a level of the 1,000
that the interpreter allows."""

NAME_CHARACTERS = 512
"""Length of names: models, adapters, roles, functions, ids."""
STOPS = 1024
"""Stop strings, before ``--max-stop-sequences`` is checked."""
BAD_WORDS = 256
"""Words that must not be generated, each of which is tokenized in three ways."""
BAD_WORD_CHARACTERS = 256
TOKEN_IDS = 4096
"""Token ids of sampling parameters: ``stop_token_ids``, ``allowed_token_ids``."""
DETOKENIZED_IDS = 1 << 17
"""Token ids of ``/detokenize``, each of which may be a hundred characters."""
LOGIT_BIASES = 4096
"""Entries of ``logit_bias``; OpenAI allows 300, vLLM any number."""
BATCH = 4096
"""Prompts of one request, before ``--max-concurrent-requests`` is checked."""
DIMENSIONS = 16
"""Dimensions of a KServe tensor."""

Text = Annotated[str, Meta(extra={"bound": "payload"})]
"""Bounded by the payload only; long ones are handled off the event loop."""
Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
StopString = Annotated[str, Meta(max_length=STOP_CHARACTERS)]
Stops = Annotated[list[StopString], Meta(max_length=STOPS)]
"""Their total length is bounded by text/stop.py."""
BadWord = Annotated[str, Meta(max_length=BAD_WORD_CHARACTERS)]
BadWords = Annotated[list[BadWord], Meta(max_length=BAD_WORDS)]

Unsigned = Annotated[int, Meta(ge=0, extra={"bound": "checked"})]
"""Range checked in TGI's words by :mod:`tgi_cli.router.generation.validation`."""
Unsigned32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Signed32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Dimensions = Annotated[list[Unsigned], Meta(max_length=DIMENSIONS)]

TokenIds = Annotated[list[Signed32], Meta(max_length=TOKEN_IDS)]
DetokenizedIds = Annotated[list[Unsigned32], Meta(max_length=DETOKENIZED_IDS)]
LogitBias = Annotated[dict[Name, float], Meta(max_length=LOGIT_BIASES)]

Json = Annotated[Any, Meta(extra={"bound": "values"})]
"""Any JSON, bounded by the number of values in a body."""
JsonObject = Annotated[dict[str, Any], Meta(extra={"bound": "values"})]

TOP_LOGPROBS = 20
"""OpenAI's bound of ``top_logprobs`` and ``logprobs``."""
MESSAGES = 10_000
TOOLS = 1024
PARTS = 4096
"""Parts of one message's content."""
CALLS = 1024
"""Tool calls of one message."""
ITEMS = 20_000
"""Items of a response's input, one to four for each message."""
CHOICES = 50_000
"""Texts of a choice, whose compilation has bounds of its own."""
ADDRESS_CHARACTERS = 4096
"""Length of a path or repository: Linux's PATH_MAX."""

Signed64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), extra={"bound": "checked"})]
"""Upper end checked by validation, as msgspec compares with signed 64-bit numbers only."""
Choices = Annotated[list[Text], Meta(max_length=CHOICES)]
LogitBiasPairs = Annotated[list[tuple[Signed32, float | bool]], Meta(max_length=LOGIT_BIASES)]
"""llama.cpp's form of ``logit_bias``."""
Items = Annotated[list[JsonObject], Meta(max_length=ITEMS)]
ToolCalls = Annotated[list[JsonObject], Meta(max_length=CALLS)]
Names = Annotated[list[Name], Meta(max_length=TOOLS)]
Prompts = Annotated[list[Any], Meta(extra={"bound": "values"})]
"""Token ids or prompts, bounded by the context length and the batch size."""
