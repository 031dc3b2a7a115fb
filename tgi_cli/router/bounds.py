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

NAME_CHARACTERS = 512
"""Of names: models, adapters, roles, functions, ids."""
STOP_CHARACTERS = 1024
"""Of one stop string. Their number is ``--max-stop-sequences``."""
BAD_WORDS = 256
"""Words that must not be generated, each tokenized in three ways."""
BAD_WORD_CHARACTERS = 256
TOKEN_IDS = 4096
"""Of a list of token ids that shapes sampling: ``stop_token_ids``, ``allowed_token_ids``."""
DETOKENIZED_IDS = 1 << 17
"""Of ``/detokenize``; each may stand for a hundred characters."""
LOGIT_BIASES = 4096
"""Entries of ``logit_bias``; OpenAI takes 300, vLLM any number."""

Text = Annotated[str, Meta(extra={"bound": "payload"})]
"""Bounded by the payload alone; long ones are handled off the event loop."""
Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
StopString = Annotated[str, Meta(max_length=STOP_CHARACTERS)]
BadWord = Annotated[str, Meta(max_length=BAD_WORD_CHARACTERS)]
BadWords = Annotated[list[BadWord], Meta(max_length=BAD_WORDS)]

Unsigned = Annotated[int, Meta(ge=0)]
Unsigned32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Signed32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]

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
CHOICES = 10_000
"""Texts to choose from; what compiling them may cost has bounds of its own."""
ADDRESS_CHARACTERS = 4096
"""Of a path or a repository's name: Linux's PATH_MAX."""
STOPS = 1024
"""Above any useful ``--max-stop-sequences``."""

Signed64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), extra={"bound": "64 bits"})]
"""msgspec compares with 64-bit signed numbers alone; what takes a seed checks its upper end."""
StopStrings = Annotated[list[StopString], Meta(max_length=STOPS)]
Choices = Annotated[list[Text], Meta(max_length=CHOICES)]
Biases = Annotated[list[float], Meta(max_length=LOGIT_BIASES)]
Items = Annotated[list[JsonObject], Meta(max_length=ITEMS)]
ToolCalls = Annotated[list[JsonObject], Meta(max_length=CALLS)]
Names = Annotated[list[Name], Meta(max_length=TOOLS)]
Prompts = Annotated[list[Any], Meta(extra={"bound": "values"})]
"""Token ids, or prompts: their number is bounded by the context and the batch size."""
