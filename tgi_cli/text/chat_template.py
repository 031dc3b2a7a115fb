"""Chat templates: from messages to prompt text.

A template is an untrusted program of the checkpoint. It is compiled and rendered in processes of
bounded time and memory: :mod:`tgi_cli.text.template_process`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.process.worker_pool import LimitError, Limits, WorkerPool
from tgi_cli.text import long_json
from tgi_cli.text.images import with_image_parts
from tgi_cli.text.template_files import of_holder, sources_of
from tgi_cli.text.template_traits import TemplateTraits, probe, with_parts
from tgi_cli.text.tokenizer import Tokenizer, read_json

logger = logging.getLogger(__name__)

LIMITS = Limits(processes=3, seconds=5.0, megabytes=256, bytes_per_byte=64)
"""A conversation of 2 MB in 50,000 messages takes 0.3 s and 60 MB."""
MOST_CHARACTERS = 1 << 20
"""Longest prompt, unless ``MOST_EXPANSION`` allows more."""
MOST_EXPANSION = 8
"""Longest prompt in relation to the characters of the request."""
_INLINE_CHARACTERS = 16 << 10
"""Longest conversation that is encoded on the event loop: 0.1 ms; larger ones in a thread."""
_AT_ONCE = 256
"""Messages that are encoded in one call, which holds the interpreter lock."""
_VALUE_CHARACTERS = 10
"""Cost of a value or a key beside its text, in characters."""
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "

_OURS = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenizer", "tokenize", "raise_exception", "strftime_now", "namespace", "dict"),
    )
)
"""Variables that only the server sets."""
_SWITCHES = frozenset(("enable_thinking", "thinking", "reasoning_effort", "documents"))
"""Variables that clients may set even if the template does not use them."""


class ChatTemplateError(Exception):
    """The template is invalid or refused the conversation."""


class ChatTemplateLimitError(ChatTemplateError):
    """The template exceeds its limits, most likely for any conversation."""


class ChatTemplate:
    """The chat templates of one model.

    Attributes:
        text: Sources of all templates.
        variables: Names that the templates use and do not set.
        pool: The processes that render them.

    Raises:
        ChatTemplateError: A template is invalid, or compiling it exceeds the limits.
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
        self.pool = WorkerPool(
            "tgi_cli.text.template_process",
            {"sources": dict(sources), "special_tokens": dict(special_tokens)},
            limits,
            what="chat template",
        )
        try:
            answer = self.pool.run(b'{"job": "variables"}')
        except LimitError as error:
            self.pool.close()
            raise ChatTemplateError(
                f"the model's chat template takes {error} to compile"
            ) from error
        if "error" in answer:
            self.pool.close()
            raise ChatTemplateError(f"the model's chat template is invalid: {answer['error']}")
        self.variables: frozenset[str] = frozenset(answer["variables"])
        self._traits = {
            name: self._probe(name, sources[name]) for name in {self._name(False), self._name(True)}
        }

    @classmethod
    def load(
        cls,
        model_path: Path,
        tokenizer: Tokenizer,
        config_path: Path | None = None,
        source: str | None = None,
    ) -> ChatTemplate | None:
        """Load the templates of a model folder. Returns None if it has none.

        Args:
            config_path: A tokenizer_config.json to use instead of the folder's; its template
                takes precedence.
            source: A template to use instead of both.

        Raises:
            ModelError: A template of the model is invalid.
            ConfigError: ``source`` is invalid.
            RouterError: No process can be started.
        """
        config = read_json(config_path or model_path / "tokenizer_config.json")
        if source is not None:
            sources = {"default": source}
        else:
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
            if source is not None:
                raise ConfigError(f"--chat-template: {error}", "fix the template") from error
            raise ModelError(
                str(error), f"fix the template in {config_path or model_path}"
            ) from error

    @property
    def takes_tools(self) -> bool:
        """Whether the templates support tools."""
        return "tools" in self.variables

    def accepts(self, variable: str) -> bool:
        """Whether requests may set this variable."""
        if variable in _OURS or variable.endswith("_token"):
            return False
        return variable in self.variables or variable in _SWITCHES

    def traits(self, tools: bool) -> TemplateTraits:
        """What the template accepts that renders conversations with tools, or without."""
        return self._traits[self._name(tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        image_mark: str | None = None,
    ) -> str:
        """Render a conversation; blocks. Messages, tools and variables are JSON values.

        The messages are what the template accepts: see :func:`tgi_cli.text.conversation.adapt`.
        Their contents are strings, also for templates that expect parts.

        Args:
            continue_final_message: End the prompt within the last message. Default: if it is the
                assistant's and has content, as in TGI.
            add_generation_prompt: Otherwise end it where the assistant's message begins.
            image_mark: What stands for an image in contents, which become parts there.

        Raises:
            ChatTemplateError: The template refuses the conversation, or fails.
            ChatTemplateLimitError: The template exceeds its limits.
            WorkersBusy: Too many renderings wait.
            WorkerError: No process can be started, or processes are killed from outside.
        """
        continued = is_continued(messages, continue_final_message)
        job = self._job(messages, tools, continued, add_generation_prompt, variables, image_mark)
        try:
            answer = self.pool.run(job)
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
        image_mark: str | None = None,
    ) -> str:
        """Render a conversation without blocking the event loop; see :meth:`render`."""
        continued = is_continued(messages, continue_final_message)
        arguments = (messages, tools, continued, add_generation_prompt, variables, image_mark)
        if _is_large((messages, tools, variables)):
            job = await asyncio.to_thread(self._job, *arguments)
        else:
            job = self._job(*arguments)
        try:
            answer = await self.pool.run_async(job)
        except LimitError as error:
            raise self._beyond(f"takes {error} to render") from error
        if "data" in answer:
            return await asyncio.to_thread(self._text_of, answer, continued)
        return self._text_of(answer, continued)

    def close(self) -> None:
        """End the processes, which end with this object, too."""
        self.pool.close()

    def _job(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        continued: bool,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        image_mark: str | None,
    ) -> bytes:
        conversation = [dict(message) for message in messages]
        if continued:
            conversation[-1]["content"] += _CONTINUE
        if image_mark is not None:
            conversation = [with_image_parts(message, image_mark) for message in conversation]
        name = self._name(bool(tools))
        if self._traits[name].parts:
            conversation = [with_parts(message) for message in conversation]
        generate = add_generation_prompt and not continued
        return self._encoded(name, conversation, tools, generate, variables)

    @staticmethod
    def _encoded(
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> bytes:
        dumps = long_json.dumps if _is_large((messages, tools, variables)) else _dumps
        given = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # json, not msgspec: the arguments of a tool call may contain NaN or lone surrogates.
            encoded = [
                dumps(messages[start : start + _AT_ONCE])[1:-1]
                for start in range(0, len(messages), _AT_ONCE)
            ]
            body = (
                f'{{"variables": {dumps(dict(variables or {}))}, "given": '
                f'{dumps(given)[:-1]}, "messages": [{", ".join(encoded)}]}}}}'
            )
        except RecursionError as error:
            raise ChatTemplateError("the conversation is nested too deeply") from error
        except (TypeError, ValueError) as error:
            raise ChatTemplateError(f"the conversation is not valid JSON: {error}") from error
        job = {
            "job": "render",
            "name": name,
            "most": max(MOST_CHARACTERS, MOST_EXPANSION * len(body)),
        }
        return b"%b, %b" % (json.dumps(job)[:-1].encode(), body[1:].encode(errors="surrogatepass"))

    def _name(self, tools: bool) -> str:
        """The template that renders conversations with tools, or without."""
        name = "tool_use" if tools and "tool_use" in self._names else "default"
        return name if name in self._names else self._names[0]

    def _probe(self, name: str, source: str) -> TemplateTraits:
        """What a template accepts; it takes 5 to 25 ms."""

        def render(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
        ) -> str | None:
            text: str | None = self.pool.run(self._encoded(name, messages, tools, False, None)).get(
                "text"
            )
            return text

        try:
            return probe(render, source, self.takes_tools)
        except LimitError:  # requests will hit it, too, and report it
            return TemplateTraits()

    def _text_of(self, answer: Mapping[str, Any], continued: bool) -> str:
        if "exceeded" in answer:
            raise self._beyond(
                f"writes more than {MOST_CHARACTERS} characters, and more than {MOST_EXPANSION} "
                "times what the conversation has"
            )
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        text: str = answer["text"] if "text" in answer else long_json.decode(answer["data"])
        return _cut_at_tag(text) if continued else text

    def _beyond(self, what: str) -> ChatTemplateLimitError:
        cause = f"the model's chat template {what}"
        if not self._warned:
            self._warned = True
            logger.error("%s: the request was refused, and others may be", cause)
        return ChatTemplateLimitError(cause)


def _dumps(value: Any) -> str:
    # Unescaped: escapes take up to six bytes for each byte of UTF-8.
    return json.dumps(value, ensure_ascii=False)


def _is_large(value: Any) -> bool:
    """Whether encoding a JSON value would delay the event loop."""
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


def is_continued(messages: Sequence[Mapping[str, Any]], requested: bool | None = None) -> bool:
    """Whether the response continues the last message.

    Raises:
        ChatTemplateError: It should, and the last message has no text.
    """
    last = messages[-1] if messages else {}
    content = isinstance(last.get("content"), str) and bool(last.get("content"))
    if requested is None:
        return content and last.get("role") == "assistant"
    if requested and not content:
        raise ChatTemplateError("the final message has no text to continue")
    return requested


def _cut_at_tag(text: str) -> str:
    """The text before the tag, without trailing white space if the template trimmed the tag."""
    index = text.rfind(_CONTINUE.strip())
    if index < 0:
        raise ChatTemplateError("the template drops the final message, which should be continued")
    if text.startswith(_CONTINUE, index):
        return text[:index]
    return text[:index].rstrip()
