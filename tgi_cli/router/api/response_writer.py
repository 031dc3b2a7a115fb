"""A response as items and events, while it is generated.

The events are those of https://platform.openai.com/docs/api-reference/responses-streaming, in the
order of OpenAI's own streams.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from tgi_cli.router.api.openai_common import chat_logprobs
from tgi_cli.router.api.response_input import sealed
from tgi_cli.router.api.schemas import responses as schemas
from tgi_cli.router.api.schemas.openai_answers import TokenLogprob
from tgi_cli.router.generation.deltas import Delta, Token
from tgi_cli.text.formats.calls import ToolCallArguments, ToolCallStart
from tgi_cli.text.response_parser import Content, Reasoning, ResponsePart
from tgi_cli.text.tokenizer import Tokenizer

Item = TypeVar("Item", bound=schemas.OutputItem)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """What the request wants of its response.

    Attributes:
        events: It is a stream.
        names: Namespace and name of the tools, by their name in the prompt.
        summary: Reasoning is given as its summary; there is no model that shortens it.
        encrypted: Reasoning has its text in ``encrypted_content``, too.
    """

    events: bool = False
    names: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    summary: bool = False
    encrypted: bool = False


class ResponseWriter:
    """Turns the pieces of an answer into output items and, in a stream, into events."""

    def __init__(self, response: schemas.ResponseObject, options: WriterOptions) -> None:
        self.response = response
        self._options = options
        self._pending: list[bytes] = []
        self._number = 0
        self._logprobs: list[bytes] = []

    def take(self) -> bytes:
        """The events since the last call."""
        pending, self._pending = self._pending, []
        return b"".join(pending)

    def begin(self) -> None:
        """Announce the response."""
        self._emit("response.created", response=self.response)
        self._emit("response.in_progress", response=self.response)

    def add(self, piece: ResponsePart, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Append a piece; ``logprobs`` are those of a text's tokens."""
        if isinstance(piece, Content):
            self._add_text(piece.text, logprobs)
        elif isinstance(piece, Reasoning):
            self._add_reasoning(piece.text)
        elif isinstance(piece, ToolCallStart):
            self._open_call(piece)
        elif isinstance(piece, ToolCallArguments):
            call = self.response.output[-1]
            if isinstance(call, schemas.CustomToolCall):
                call.input += piece.text
                self._emit_item("response.custom_tool_call_input.delta", delta=piece.text)
            elif isinstance(call, schemas.FunctionCall):
                call.arguments += piece.text
                self._emit_item("response.function_call_arguments.delta", delta=piece.text)

    def close(self, status: schemas.Status) -> None:
        """End the response without announcing it; its usage or error must be set."""
        response = self.response
        if status in ("failed", "cancelled"):
            item = self._last()
            if item is not None:
                item.status = "incomplete"
                self._complete(item)
        else:
            if not response.output:
                self._add_text("")
            self._close(status)
        response.status = status
        if status == "completed":
            response.completed_at = int(time.time())

    def announce_end(self) -> None:
        """Announce the end, after :meth:`close`."""
        self._emit(f"response.{self.response.status}", response=self.response)

    def _open_call(self, start: ToolCallStart) -> None:
        namespace, name = self._options.names.get(start.name, (None, start.name))
        fields: dict[str, Any] = {"call_id": start.id, "name": name}
        if namespace is not None:
            fields["namespace"] = namespace
        if start.custom:
            self._open(schemas.CustomToolCall, "ctc", **fields, input="")
        else:
            self._open(schemas.FunctionCall, "fc", **fields, arguments="")

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        part = schemas.OutputText(text="", logprobs=[])
        self._part(schemas.OutputMessage, "msg", part).text += text
        encoded = _encode(logprobs)
        if logprobs:
            self._logprobs.append(encoded[1:-1])
        if text:
            logprobs_json = msgspec.Raw(encoded)
            self._emit_item(
                "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs_json
            )

    def _add_reasoning(self, text: str) -> None:
        if not self._options.summary:
            part = schemas.ReasoningText(text="")
            self._part(schemas.ReasoningItem, "rs", part).text += text
            self._emit_item("response.reasoning_text.delta", content_index=0, delta=text)
            return
        item = self._last()
        if not isinstance(item, schemas.ReasoningItem):
            item = self._open(schemas.ReasoningItem, "rs", content=[], summary=[])
            summary = schemas.SummaryText(text="")
            item.summary.append(summary)
            self._emit_item("response.reasoning_summary_part.added", summary_index=0, part=summary)
        item.summary[0].text += text
        self._emit_item("response.reasoning_summary_text.delta", summary_index=0, delta=text)

    def _part(
        self, kind: type[schemas.OutputMessage | schemas.ReasoningItem], prefix: str, first: Any
    ) -> schemas.OutputText | schemas.ReasoningText:
        """The part in progress if its item is of this kind; otherwise open one with ``first``."""
        item = self._last()
        if not isinstance(item, kind):
            item = self._open(kind, prefix, content=[])
            item.content.append(first)
            self._emit_item("response.content_part.added", content_index=0, part=first)
        return item.content[0]

    def _last(self) -> schemas.OutputItem | None:
        """The item in progress, or None."""
        output = self.response.output
        return output[-1] if output and output[-1].status == "in_progress" else None

    def _open(self, kind: type[Item], prefix: str, **fields: Any) -> Item:
        """End the item in progress and start another."""
        self._close("completed")
        item = kind(id=_id(prefix), status="in_progress", **fields)
        self.response.output.append(item)
        index = len(self.response.output) - 1
        self._emit("response.output_item.added", output_index=index, item=item)
        return item

    def _complete(self, item: schemas.OutputItem) -> None:
        """Set the fields that depend on the whole item."""
        if isinstance(item, schemas.OutputMessage):
            # Each was encoded on arrival.
            content = msgspec.Raw(b"[%b]" % b",".join(self._logprobs))
            item.content[0].logprobs = cast("list[TokenLogprob]", content)
            self._logprobs = []
        elif isinstance(item, schemas.ReasoningItem) and self._options.encrypted:
            item.encrypted_content = sealed(_reasoning_of(item))

    def _close(self, status: schemas.Status) -> None:
        """End the item in progress, if there is one."""
        item = self._last()
        if item is None:
            return
        item.status = status
        self._complete(item)
        if isinstance(item, schemas.FunctionCall):
            self._emit_item(
                "response.function_call_arguments.done", name=item.name, arguments=item.arguments
            )
        elif isinstance(item, schemas.CustomToolCall):
            self._emit_item("response.custom_tool_call_input.done", input=item.input)
        elif isinstance(item, schemas.ReasoningItem) and item.summary:
            part, text = item.summary[0], item.summary[0].text
            self._emit_item("response.reasoning_summary_text.done", summary_index=0, text=text)
            self._emit_item("response.reasoning_summary_part.done", summary_index=0, part=part)
        else:
            self._close_content(item)
        index = len(self.response.output) - 1
        self._emit("response.output_item.done", output_index=index, item=item)

    def _close_content(self, item: schemas.OutputMessage | schemas.ReasoningItem) -> None:
        part = item.content[0]
        if isinstance(part, schemas.OutputText):
            done: dict[str, Any] = {"text": part.text, "logprobs": part.logprobs}
            self._emit_item("response.output_text.done", content_index=0, **done)
        else:
            self._emit_item("response.reasoning_text.done", content_index=0, text=part.text)
        self._emit_item("response.content_part.done", content_index=0, part=part)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        """An event about the last item."""
        output = self.response.output
        self._emit(kind, item_id=output[-1].id, output_index=len(output) - 1, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._options.events:
            event = {"type": kind, "sequence_number": self._number, **fields}
            self._pending.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event)))
            self._number += 1


class TextLogprobs:
    """Assigns log-probabilities of an answer's tokens to the pieces of text that they spell.

    Markers, reasoning and tool calls have none.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Collection[int], as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._as_ids = as_ids
        self._tokens: list[Token] = []
        self._tops: list[list[Token]] = []

    def push(self, delta: Delta) -> None:
        """Take tokens, whose text may come later."""
        for index, token in enumerate(delta.tokens):
            if not token.special and token.id not in self._markers:
                self._tokens.append(token)
                self._tops.append(delta.top_tokens[index] if delta.top_tokens else [])

    def of(self, piece: ResponsePart) -> list[TokenLogprob]:
        """The log-probabilities of a piece; drops its tokens and all before them."""
        if not isinstance(piece, Content):
            self._drop(len(self._tokens))
            return []
        start = max("".join(token.text for token in self._tokens).find(piece.text), 0)
        end = start + len(piece.text)
        first = last = offset = 0
        for index, token in enumerate(self._tokens):
            if offset >= end:
                break
            offset += len(token.text)
            first = index + 1 if token.text and offset <= start else first
            last = index + 1
        found = chat_logprobs(
            self._tokenizer, self._tokens[first:last], self._tops[first:last], self._as_ids
        )
        self._drop(last)
        return found

    def _drop(self, count: int) -> None:
        del self._tokens[:count], self._tops[:count]


def _reasoning_of(item: schemas.ReasoningItem) -> str:
    return "".join([*(part.text for part in item.summary), *(part.text for part in item.content)])


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
