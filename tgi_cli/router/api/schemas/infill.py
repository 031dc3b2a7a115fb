"""Bodies of llama.cpp's ``POST /infill``.

https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgi_cli.router import bounds
from tgi_cli.router.api.schemas.openai import CompletionParameters
from tgi_cli.router.api.schemas.openai_answers import GenerationTimings
from tgi_cli.router.bounds import Name, Names, Signed32, Signed64, Text


class ExtraFile(msgspec.Struct, kw_only=True):
    """A file, or a part of one, that is context for the completion."""

    text: Text
    filename: Name = "file"


ExtraFiles = Annotated[list[ExtraFile], Meta(max_length=bounds.PARTS)]


class InfillRequest(CompletionParameters, kw_only=True):
    """The body of ``/infill``.

    The answer belongs between ``input_prefix``, with ``prompt`` after it, and ``input_suffix``.
    ``n_predict`` 0 only fills the prefix cache. ``samplers`` are those that apply.
    ``response_fields`` selects fields of the answer, ``timings/prompt_n`` one within an object.
    ``n_indent`` ends the answer before a line with less indentation. ``t_max_predict_ms`` ends it
    so long after its first token, once it has a line break.
    """

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: ExtraFiles | None = None
    prompt: Text | None = None
    samplers: Names | None = None
    response_fields: Names | None = None
    n_indent: Signed32 | None = None
    t_max_predict_ms: Signed64 | None = None
    id_slot: Signed32 | None = None


class InfillAnswer(msgspec.Struct, kw_only=True):
    """The answer of ``/infill``, and the last event of a stream.

    Attributes:
        content: the text, empty in a stream's last event.
        stop_type: ``eos``, ``limit`` or ``word``.
        stopping_word: the stop string, or an empty string.
        tokens_predicted: tokens of the answer.
        tokens_evaluated: tokens of the prompt.
        tokens_cached: of them, those in the prefix cache.
        truncated: always false: prompts that are too long are refused.
    """

    index: int = 0
    content: str
    id_slot: int = -1
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    truncated: bool = False
    stop_type: str
    stopping_word: str
    timings: GenerationTimings


class InfillChunk(msgspec.Struct, kw_only=True):
    """An event of a stream but the last."""

    index: int = 0
    content: str
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    timings: GenerationTimings | UnsetType = UNSET
