"""A message as blocks and events, while it is generated.

The events are those of https://docs.anthropic.com/en/api/messages-streaming. Blocks do not overlap:
one ends before the next begins.
"""

from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

import msgspec

from tgi_cli.router.api.message_input import HIDDEN_THOUGHT
from tgi_cli.router.api.schemas import messages as schemas
from tgi_cli.text.formats.calls import ToolCallArguments, ToolCallStart
from tgi_cli.text.response_parser import Content, Reasoning, ResponsePart

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTA = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_CALL_ID, _TOOL_USE_ID = "call_", "toolu_"

_encode = msgspec.json.Encoder().encode


class MessageWriter:
    """Turns the pieces of an answer into blocks and, if ``events`` is set, into events.

    Args:
        message: The message, without content.
        events: Whether to write events.
        thinking: Whether to show reasoning: ``shown``, ``hidden`` (a block with a signature
            alone) or ``dropped`` (no block).

    Attributes:
        message: The message so far. Its blocks are complete once the next one has begun.
        calls: Number of tool calls.
    """

    def __init__(self, message: schemas.Message, events: bool, thinking: str = "shown") -> None:
        self.message = message
        self.calls = 0
        self._events = events
        self._thinking = thinking
        self._block: schemas.AnswerBlock | None = None
        self._texts: list[str] = []
        """Text of the open block: of text, of reasoning, or of a call's arguments."""
        self._pending: list[bytes] = []

    def take(self) -> bytes:
        """The events since the last call."""
        pending, self._pending = self._pending, []
        return b"".join(pending)

    def begin(self) -> None:
        """Announce the message, whose usage must be set."""
        if self._events:
            self._write("message_start", schemas.MessageStart(message=self.message))

    def add(self, piece: ResponsePart) -> None:
        """Append a piece."""
        if isinstance(piece, Content):
            if not isinstance(self._block, schemas.TextBlock):
                self._open(schemas.TextBlock(text=""))
            self._append(piece.text, b"text_delta", b"text")
        elif isinstance(piece, Reasoning):
            self._add_reasoning(piece.text)
        elif isinstance(piece, ToolCallStart):
            self.calls += 1
            self._open(schemas.ToolUseBlock(id=tool_use_id(piece.id), name=piece.name, input={}))
        elif isinstance(piece, ToolCallArguments):
            self._append(piece.text, b"input_json_delta", b"partial_json")

    def end(self, reason: schemas.StopReason, stop: str | None) -> None:
        """Finish the message, whose usage must be set."""
        message = self.message
        self._close()
        message.stop_reason, message.stop_sequence = reason, stop
        if self._events:
            usage = message.usage
            details = usage.output_tokens_details
            assert details is not msgspec.UNSET
            delta = schemas.MessageDelta(
                delta=schemas.StopDelta(stop_reason=reason, stop_sequence=stop),
                usage=schemas.DeltaUsage(
                    input_tokens=usage.input_tokens,
                    cache_read_input_tokens=usage.cache_read_input_tokens,
                    output_tokens=usage.output_tokens,
                    output_tokens_details=details,
                ),
            )
            self._write("message_delta", delta)
            self._write("message_stop", schemas.MessageStop())

    def _add_reasoning(self, text: str) -> None:
        if self._thinking == "dropped":
            return
        if not isinstance(self._block, schemas.ThinkingBlock):
            self._open(schemas.ThinkingBlock(thinking="", signature=""))
        if self._thinking == "hidden":
            self._texts.append(text)
        else:
            self._append(text, b"thinking_delta", b"thinking")

    def _append(self, text: str, kind: bytes, name: bytes) -> None:
        self._texts.append(text)
        if self._events:
            index = len(self.message.content) - 1
            self._pending.append(_DELTA % (index, kind, name, _encode(text)))

    def _open(self, block: schemas.AnswerBlock) -> None:
        """End the open block and begin another."""
        self._close()
        self._block = block
        self.message.content.append(block)
        if self._events:
            index = len(self.message.content) - 1
            start = schemas.BlockStart(index=index, content_block=block)
            self._write("content_block_start", start)

    def _close(self) -> None:
        """End the open block, if there is one."""
        block, self._block = self._block, None
        text, self._texts = "".join(self._texts), []
        if block is None:
            return
        index = len(self.message.content) - 1
        if isinstance(block, schemas.TextBlock):
            block.text = text
        elif isinstance(block, schemas.ThinkingBlock):
            hidden = self._thinking == "hidden"
            block.signature = _signature(text, hidden)
            block.thinking = "" if hidden else text
            if self._events:
                signature = _encode(block.signature)
                self._pending.append(_DELTA % (index, b"signature_delta", b"signature", signature))
        else:
            block.input = _arguments(text)
        if self._events:
            self._write("content_block_stop", schemas.BlockStop(index=index))

    def _write(self, kind: str, event: schemas.MessageEvent) -> None:
        self._pending.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event)))


def tool_use_id(call_id: str) -> str:
    """A call's id with Anthropic's prefix, unless the model's template prescribes a form."""
    if call_id.startswith(_CALL_ID):
        return _TOOL_USE_ID + call_id.removeprefix(_CALL_ID)
    return call_id


def _signature(thought: str, hidden: bool) -> str:
    """What a client must send back with a thinking block; of hidden ones the text itself."""
    data = thought.encode()
    if hidden:
        return HIDDEN_THOUGHT + base64.b64encode(data).decode()
    return base64.b64encode(sha256(data).digest()).decode()


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; empty if the answer was cut off within them."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
