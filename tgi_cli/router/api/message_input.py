"""Translates a request for a message into a chat request.

Everything becomes text, tools and reasoning of a chat; the chat's template decides on the prompt.
Equal conversations are translated equally, however their text is divided and wherever
``cache_control`` is, so that each turn's prompt begins with that of the turn before.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tgi_cli.router.api.message_images import image_of, joined
from tgi_cli.router.api.schemas.messages import (
    Block,
    InputMessage,
    MessagesInput,
    MessagesRequest,
    MessageTool,
)
from tgi_cli.router.api.schemas.openai import (
    ChatMessage,
    ChatReasoning,
    ChatRequest,
    ContentPart,
    Function,
    Tool,
)
from tgi_cli.router.http import errors
from tgi_cli.router.http.body_errors import wrong_types

HIDDEN_THOUGHT = "thought:"
"""Start of the signature of a thinking block whose text was omitted: it follows, in base64, so
that the model finds its reasoning in the conversation although the client was not shown it."""

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a line that Claude Code puts in front of its instructions. It differs from request to
request, and would make every prompt a new one."""
_TURN_ROLES = ("user", "assistant", "system")
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Levels above those that templates know."""
_SKIPPED = (
    "redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback",
)  # fmt: skip
"""Blocks that only Anthropic's servers can read; so are the results of its tools."""
_SEARCH_TOOL = re.compile(r"tool_?search|search_?tool", re.IGNORECASE)


def chat_request(body: MessagesInput) -> ChatRequest:
    """The equivalent chat request. Raises ApiError."""
    if body.mcp_servers:
        raise errors.unsupported("mcp_servers")
    chat = _Chat()
    chat.add_system(body.system)
    if not body.messages:
        raise errors.validation("`messages` cannot be empty", "messages")
    for index, turn in enumerate(body.messages):
        chat.add(f"messages.{index}", turn)
    choice = body.tool_choice
    named = choice.name if choice is not None and choice.type == "tool" else None
    tools = chat.tools(body.tools or (), named)
    request = ChatRequest(
        model=body.model,
        messages=chat.messages,
        tools=[_tool(index, tool) for index, tool in enumerate(tools)],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_response_format(body),
    )
    _set_thinking(request, body)
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 0:
            raise errors.validation("`max_tokens` must be >= 0", "max_tokens")
        request.max_completion_tokens = max(body.max_tokens, 1)
        request.stop = body.stop_sequences
        request.temperature = body.temperature
        request.top_p = body.top_p
        request.top_k = body.top_k
    return request


def blocks_of(body: MessagesInput) -> int:
    """How many blocks, messages and tools there are: what translating the request costs."""
    contents = [body.system, *(turn.content for turn in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    parts = sum(len(block.content) for block in blocks if isinstance(block.content, list))
    return len(blocks) + parts + len(body.messages) + len(body.tools or ())


def _tool_choice(body: MessagesInput) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise errors.validation("`tool_choice` of type `tool` needs a `name`", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(body: MessagesInput) -> dict[str, Any] | None:
    form = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
    if form is None:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise errors.validation(
            "`response_format` must be of type `json_schema`, with a `schema`", "response_format"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


def _set_thinking(request: ChatRequest, body: MessagesInput) -> None:
    """Set the parameters of thinking for the template and the engine. Raises ApiError."""
    effort = body.output_config.effort if body.output_config else None
    if effort is not None:
        request.reasoning_effort = _EFFORTS.get(effort, effort)
    thinking = body.thinking
    if thinking is None:
        return
    if thinking.type not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise errors.validation(
            "`thinking.type` must be enabled, disabled, adaptive or between_tools", "thinking"
        )
    if thinking.display not in (None, "summarized", "omitted"):
        raise errors.validation("`thinking.display` must be summarized or omitted", "thinking")
    if thinking.type == "enabled":
        request.reasoning = ChatReasoning(enabled=True, max_tokens=thinking.budget_tokens)
    elif thinking.type == "disabled":
        request.reasoning_effort, request.reasoning = None, ChatReasoning(enabled=False)


def _tool(index: int, tool: MessageTool) -> Tool:
    if not tool.name:
        raise errors.validation(f"tools.{index} has no `name`", "tools")
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(msgspec.json.encode(each).decode() for each in tool.input_examples)
        description = "\n\n".join(filter(None, [description, f"Examples of input:\n{examples}"]))
    return Tool(
        function=Function(
            name=tool.name,
            description=description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


@dataclass(slots=True)
class _Chat:
    """The messages of a chat, and the changes of its tools that they hold.

    Attributes:
        found: Names of tools that a result or a call has named.
        removed: Names of tools that were withdrawn.
        defined: Tools that were defined within the conversation.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    found: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    defined: list[MessageTool] = field(default_factory=list)

    def add_system(self, content: str | list[Block] | None) -> None:
        """Add the instructions, if there are any besides Claude Code's header."""
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        texts = []
        for index, block in enumerate(blocks or ()):
            text = _text(f"system.{index}", block)
            if text.startswith(_BILLING_HEADER):
                text = text.partition("\n")[2]
            if text:
                texts.append(text)
        if texts:
            self.messages.append(ChatMessage(role="system", content="\n".join(texts)))

    def add(self, place: str, turn: InputMessage) -> None:
        """Add a turn: one message, and one for each result of a tool. Raises ApiError."""
        if turn.role not in _TURN_ROLES:
            raise errors.validation(
                f"{place}.role must be one of {', '.join(_TURN_ROLES)}. Given: {turn.role}",
                "messages",
            )
        if isinstance(turn.content, str):
            self.messages.append(ChatMessage(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            self._add_answer(place, turn.content)
        else:
            self._add_input(place, turn.role, turn.content)

    def tools(self, declared: Sequence[MessageTool], named: str | None) -> list[MessageTool]:
        """The tools to offer: those of the client that are not deferred, or were found.

        Deferred tools are found by a tool that searches them. Where the client has none, nothing
        could ever find them, and all are offered.
        """
        own = [tool for tool in (*declared, *self.defined) if tool.type in (None, "custom")]
        searched = any(
            not tool.defer_loading and _SEARCH_TOOL.search(tool.name or "") for tool in own
        )
        found = self.found | {named}
        offered = {
            tool.name: tool
            for tool in own
            if not (searched and tool.defer_loading and tool.name not in found)
            and tool.name not in self.removed
        }
        return list(offered.values())

    def _add_answer(self, place: str, blocks: Sequence[Block]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            where = f"{place}.content.{index}"
            if block.type == "thinking":
                thoughts.append(block.thinking or hidden_thought(block.signature))
            elif block.type == "tool_use":
                calls.append(_call(where, block))
                self.found.add(block.name or "")
            elif not _is_skipped(block):
                texts.append(_text(where, block))
        self.messages.append(
            ChatMessage(
                role="assistant",
                content="\n".join(filter(None, texts)) or (None if calls else ""),
                reasoning_content="\n".join(filter(None, thoughts)) or None,
                tool_calls=calls or None,
            )
        )

    def _add_input(self, place: str, role: str, blocks: Sequence[Block]) -> None:
        before = len(self.messages)
        pieces: list[str | ContentPart] = []
        for index, block in enumerate(blocks):
            where = f"{place}.content.{index}"
            if block.type == "tool_result":
                self._flush(role, pieces)
                self._add_result(where, block)
            elif block.type == "mid_conv_system":
                self._flush(role, pieces)
                self._flush("system", [_content(where, block)])
            elif block.type in ("tool_addition", "tool_removal"):
                self._change_tool(where, block)
            elif block.type == "image":
                pieces.append(image_of(where, block))
            elif not _is_skipped(block):
                pieces.append(_text(where, block))
        self._flush(role, pieces)
        if len(self.messages) == before:
            self.messages.append(ChatMessage(role=role, content=""))

    def _flush(self, role: str, pieces: list[str | ContentPart]) -> None:
        """Make a message of the texts and images so far, if there are any."""
        if any(pieces):
            self.messages.append(ChatMessage(role=role, content=joined(pieces)))
        pieces.clear()

    def _add_result(self, place: str, block: Block) -> None:
        if block.tool_use_id is None:
            raise errors.validation(f"{place} needs a `tool_use_id`", "messages")
        if isinstance(block.content, list):
            for part in block.content:
                if part.type == "tool_reference" and part.tool_name:
                    self._restore(part.tool_name)
        content = _result(place, block)
        if block.is_error:
            if isinstance(content, str):
                content = f"Error: {content}" if content else "Error"
            else:
                content = [ContentPart(type="text", text="Error: "), *content]
        self.messages.append(
            ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)
        )

    def _change_tool(self, place: str, block: Block) -> None:
        """Add or remove a tool from here on. Raises ApiError."""
        change = block.tool if isinstance(block.tool, dict) else {}
        definition, name = change.get("definition"), change.get("name")
        if block.type == "tool_addition" and isinstance(definition, dict):
            try:
                tool = msgspec.convert(definition, MessageTool)
            except msgspec.ValidationError as error:
                raise wrong_types(str(error)) from error
            self.defined.append(tool)
            name = tool.name
        if not isinstance(name, str):
            raise errors.validation(f"{place} names no tool", "messages")
        if block.type == "tool_addition":
            self._restore(name)
        else:
            self.removed.add(name)

    def _restore(self, name: str) -> None:
        self.found.add(name)
        self.removed.discard(name)


def hidden_thought(signature: str | None) -> str:
    """The reasoning that a signature holds; empty if it is of another server."""
    if signature is None or not signature.startswith(HIDDEN_THOUGHT):
        return ""
    try:
        return base64.b64decode(signature[len(HIDDEN_THOUGHT) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _is_skipped(block: Block) -> bool:
    return block.type in _SKIPPED or block.type.endswith("_tool_result")


def _call(place: str, block: Block) -> dict[str, Any]:
    if not block.name or block.id is None:
        raise errors.validation(f"{place} needs an `id` and a `name`", "messages")
    function = {"name": block.name, "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _content(place: str, block: Block) -> str:
    """The text of what a block contains. Raises ApiError."""
    content = block.content
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise errors.validation(f"{place}.content must be text or a list of blocks", "messages")
    return _joined(_text(f"{place}.content.{index}", part) for index, part in enumerate(content))


def _result(place: str, block: Block) -> str | list[ContentPart]:
    """The content of a tool's result. Raises ApiError."""
    if not isinstance(block.content, list):
        return _content(place, block)
    return joined(
        [
            image_of(f"{place}.content.{index}", part)
            if part.type == "image"
            else _text(f"{place}.content.{index}", part)
            for index, part in enumerate(block.content)
        ]
    )


def _text(place: str, block: Block) -> str:
    """The text of a block. Raises ApiError for blocks that are not text."""
    kind, source = block.type, block.source
    if kind == "text" and block.text is not None:
        return block.text
    if kind == "tool_reference" and block.tool_name:
        return f"Tool {block.tool_name} is available from now on."
    if kind == "search_result" and isinstance(source, str):
        return _joined((block.title or "", source, _content(place, block)))
    if kind == "compaction":
        return _content(place, block)
    if kind == "document" and isinstance(source, dict):
        data = source.get("data" if source.get("type") == "text" else "content")
        if source.get("type") in ("text", "content") and isinstance(data, str | list):
            found = data if isinstance(data, str) else _joined(map(_part_text, data))
            return _joined((block.title or "", block.context or "", found))
        raise errors.validation(
            f"{place}: a document's source must be text. Given: {source.get('type')!r}", "messages"
        )
    raise errors.validation(
        f"{place}: a block of type `{kind}` is not supported by this model, or incomplete",
        "messages",
    )


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise errors.validation("a document may contain text only", "messages")
    return text


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(filter(None, texts))
