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

NAME_CHARACTERS = 512
"""Of names: models, adapters, roles, functions, ids."""
BAD_WORDS = 256
"""Words that must not be generated, each tokenized in three ways."""
BAD_WORD_CHARACTERS = 256
TOKEN_IDS = 4096
"""Of a list of token ids that shapes sampling: ``stop_token_ids``, ``allowed_token_ids``."""
LOGIT_BIASES = 4096
"""Entries of ``logit_bias``; OpenAI takes 300, vLLM any number."""

Text = Annotated[str, Meta(extra={"bound": "payload"})]
"""Bounded by the payload alone; long ones are handled off the event loop."""
Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
StopString = Annotated[str, Meta(max_length=STOP_CHARACTERS)]
"""Their number is ``--max-stop-sequences``, and text/stop.py bounds them together."""
BadWord = Annotated[str, Meta(max_length=BAD_WORD_CHARACTERS)]
BadWords = Annotated[list[BadWord], Meta(max_length=BAD_WORDS)]

Unsigned = Annotated[int, Meta(ge=0)]
Unsigned32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Signed32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]

TokenIds = Annotated[list[Signed32], Meta(max_length=TOKEN_IDS)]
LogitBias = Annotated[dict[Name, float], Meta(max_length=LOGIT_BIASES)]

Json = Annotated[Any, Meta(extra={"bound": "values"})]
"""Any JSON: bounded by the number of values that a body may hold."""
JsonObject = Annotated[dict[str, Any], Meta(extra={"bound": "values"})]
