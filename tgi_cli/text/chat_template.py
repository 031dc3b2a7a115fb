"""Chat templates: messages to prompt text.

A template is a program of a checkpoint's, of which nothing is known before it is run. So it is
compiled and rendered in processes of bounded time and memory: :mod:`tgi_cli.text.template_process`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tgi_cli.errors import ModelError
from tgi_cli.process.worker_pool import LimitError, Limits, WorkerPool
from tgi_cli.text.template_files import of_holder, sources_of
from tgi_cli.text.tokenizer import Tokenizer, read_json

logger = logging.getLogger(__name__)

LIMITS = Limits(processes=3, seconds=5.0, megabytes=256, bytes_per_byte=64)
"""A conversation of 2 MB in 50,000 messages takes 0.3 s and 60 MB of it."""
MOST_CHARACTERS = 1 << 20
"""Of a prompt; or so many times what the request has, if that is more:"""
MOST_EXPANSION = 8
_INLINE_CHARACTERS = 16 << 10
"""Of a conversation that is encoded on the event loop, 0.1 ms; larger ones in a thread."""
_AT_ONCE = 256
"""Messages encoded in one call, which keeps the interpreter's lock."""
_VALUE_CHARACTERS = 10
"""What a value or a key counts beside its text."""
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "

_OURS = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenizer", "tokenize", "raise_exception", "strftime_now", "namespace", "dict"),
    )
)
"""Names that a template gets from us alone."""
_SWITCHES = frozenset(("enable_thinking", "thinking", "reasoning_effort", "documents"))
"""Variables that clients set whatever the model; a template that has no such switch has it off."""


class ChatTemplateError(Exception):
    """The template refused the conversation, or there is none; the message says why."""


class ChatTemplateLimitError(ChatTemplateError):
    """The template takes more than it may: most likely, for any conversation."""


class ChatTemplate:
    """The templates of one model.

    Raises ChatTemplateError when one of them is no valid Jinja, or cannot be compiled within
    :data:`LIMITS`.

    Attributes:
        text: the sources of all of them.
        variables: names that they use and do not set themselves.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: Limits = LIMITS,
    ) -> None:
        self.text = "\n".join(sources.values())
        self._names = tuple(sources)
        self._warned = False
        self._pool = WorkerPool(
            "tgi_cli.text.template_process",
            {"sources": dict(sources), "special_tokens": dict(special_tokens)},
            limits,
            what="chat template",
        )
        try:
            answer = self._pool.run(b'{"job": "variables"}')
        except LimitError as error:
            self._pool.close()
            raise ChatTemplateError(
                f"the model's chat template takes {error} to compile"
            ) from error
        if "error" in answer:
            self._pool.close()
            raise ChatTemplateError(f"the model's chat template is invalid: {answer['error']}")
        self.variables: frozenset[str] = frozenset(answer["variables"])

    @classmethod
    def load(
        cls, model_path: Path, tokenizer: Tokenizer, config_path: Path | None = None
    ) -> ChatTemplate | None:
        """The templates of a model folder; None when it has none.

        ``config_path`` is a tokenizer_config.json in place of the folder's: a template in it is
        the one that counts. Raises ModelError, and RouterError when no process can be started.
        """
        config = read_json(config_path or model_path / "tokenizer_config.json")
        sources = (of_holder(config) if config_path else {}) or sources_of(model_path, config)
        if not sources:
            return None
        special = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token")
        }
        named = {name: token for name, token in special.items() if isinstance(token, str)}
        named["bos_token"] = tokenizer.bos_token
        named["eos_token"] = tokenizer.eos_token
        try:
            return cls(sources, named)
        except ChatTemplateError as error:
            raise ModelError(
                str(error), f"mend the template in {config_path or model_path}"
            ) from error

    @property
    def takes_tools(self) -> bool:
        """Whether it says anything about tools."""
        return "tools" in self.variables

    def accepts(self, variable: str) -> bool:
        """Whether a request may set this variable."""
        if variable in _OURS or variable.endswith("_token"):
            return False
        return variable in self.variables or variable in _SWITCHES

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Blocks.

        ``continue_final_message``: it ends within the last message; None: if that is the
        assistant's and has content, as TGI does. Else ``add_generation_prompt`` says whether it
        ends where the assistant begins to speak. Messages, tools and variables are JSON.

        Raises:
            ChatTemplateError: the template refuses, or fails on, the conversation.
            ChatTemplateLimitError: it takes more than it may.
            WorkersBusy: too many renderings wait.
            WorkerError: no process can be started, or processes are killed from outside.
        """
        continued = is_continued(messages, continue_final_message)
        job = self._job(messages, tools, continued, add_generation_prompt, variables)
        try:
            answer = self._pool.run(job)
        except LimitError as error:
            raise self._beyond(f"takes {error} to render") from error
        return self._text_of(answer, continued)

    async def render_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """As :meth:`render`, without blocking the event loop."""
        continued = is_continued(messages, continue_final_message)
        asked = (messages, tools, continued, add_generation_prompt, variables)
        if _is_large((messages, tools, variables)):
            job = await asyncio.to_thread(self._job, *asked)
        else:
            job = self._job(*asked)
        try:
            answer = await self._pool.run_async(job)
        except LimitError as error:
            raise self._beyond(f"takes {error} to render") from error
        return self._text_of(answer, continued)

    def close(self) -> None:
        """End the processes. They end with this object, too."""
        self._pool.close()

    def _job(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        continued: bool,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> bytes:
        conversation = [dict(message) for message in messages]
        if continued:
            conversation[-1]["content"] += _CONTINUE
        name = "tool_use" if tools and "tool_use" in self._names else "default"
        given = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continued,
        }
        try:
            # Not msgspec: a call's arguments may hold what only this module writes, such as NaN.
            several = [
                _dumps(conversation[place : place + _AT_ONCE])[1:-1]
                for place in range(0, len(conversation), _AT_ONCE)
            ]
            asked = (
                f'{{"variables": {_dumps(dict(variables or {}))}, "given": '
                f'{_dumps(given)[:-1]}, "messages": [{", ".join(several)}]}}}}'
            )
        except RecursionError as error:
            raise ChatTemplateError("the conversation is nested too deeply") from error
        except (TypeError, ValueError) as error:
            raise ChatTemplateError(f"the conversation is no JSON: {error}") from error
        job = {
            "job": "render",
            "name": name if name in self._names else self._names[0],
            "most": max(MOST_CHARACTERS, MOST_EXPANSION * len(asked)),
        }
        return b"%b, %b" % (json.dumps(job)[:-1].encode(), asked[1:].encode(errors="surrogatepass"))

    def _text_of(self, answer: Mapping[str, Any], continued: bool) -> str:
        if "exceeded" in answer:
            raise self._beyond(
                f"writes more than {MOST_CHARACTERS} characters, and more than {MOST_EXPANSION} "
                "times what the conversation has"
            )
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        text: str = answer["text"]
        return _cut_at_tag(text) if continued else text

    def _beyond(self, what: str) -> ChatTemplateLimitError:
        cause = f"the model's chat template {what}"
        if not self._warned:
            self._warned = True
            logger.error("%s: the request was refused, and others may be", cause)
        return ChatTemplateLimitError(cause)


def _dumps(value: Any) -> str:
    # As it is: escapes take up to six bytes for each of UTF-8.
    return json.dumps(value, ensure_ascii=False)


def _is_large(value: Any) -> bool:
    """Whether encoding a JSON value would hold up the event loop."""
    left = _INLINE_CHARACTERS
    waiting = [value]
    while waiting and left > 0:
        value = waiting.pop()
        left -= _VALUE_CHARACTERS
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping):
            left -= _VALUE_CHARACTERS * len(value)
            waiting += value.values() if left > 0 else ()
        elif isinstance(value, Sequence):
            left -= _VALUE_CHARACTERS * len(value)
            waiting += value if left > 0 else ()
    return left <= 0


def is_continued(messages: Sequence[Mapping[str, Any]], asked: bool | None = None) -> bool:
    """Whether the answer goes on where the last message ends.

    Raises ChatTemplateError when that is asked for and there is nothing to go on from.
    """
    last = messages[-1] if messages else {}
    content = isinstance(last.get("content"), str) and bool(last.get("content"))
    if asked is None:
        return content and last.get("role") == "assistant"
    if asked and not content:
        raise ChatTemplateError("the final message has no text to continue")
    return asked


def _cut_at_tag(text: str) -> str:
    """Drop the tag and all behind it; with it the blanks that the template trimmed."""
    place = text.rfind(_CONTINUE.strip())
    if place < 0:
        raise ChatTemplateError("the template drops the final message, which is to be continued")
    if text.startswith(_CONTINUE, place):
        return text[:place]
    return text[:place].rstrip()
