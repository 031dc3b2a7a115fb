"""Chat templates: messages to prompt text.

Rendered as transformers renders them (https://huggingface.co/docs/transformers/chat_templating):
sandboxed Jinja with ``raise_exception``, ``strftime_now``, ``tojson``, loop controls and
``{% generation %}`` blocks. The environment is our own because importing transformers' costs the
router half a second and 18 MB for these few definitions; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tgi_cli.errors import ModelError
from tgi_cli.files import read_text
from tgi_cli.text.tokenizer import Tokenizer, read_json

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


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The constructor alone: the type itself would offer its attributes to the template."""
    return dict(*args, **kwargs)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    return environment


class ChatTemplate:
    """The templates of one model, compiled once.

    Raises ChatTemplateError when one of them is no valid Jinja.

    Attributes:
        text: the sources of all of them.
        variables: names that they use and do not set themselves.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self.text = "\n".join(sources.values())
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
            self.variables = frozenset(
                name
                for source in sources.values()
                for name in jinja2.meta.find_undeclared_variables(environment.parse(source))
            )
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is invalid: {error}") from error

    @classmethod
    def load(
        cls, model_path: Path, tokenizer: Tokenizer, config_path: Path | None = None
    ) -> ChatTemplate | None:
        """The templates of a model folder; None when it has none. Raises ModelError.

        ``config_path`` is a tokenizer_config.json in place of the folder's: a template in it is
        the one that counts.
        """
        config = read_json(config_path or model_path / "tokenizer_config.json")
        sources = (_of_holder(config) if config_path else {}) or _sources(model_path, config)
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
        """The prompt text.

        ``continue_final_message``: it ends within the last message; None: if that is the
        assistant's and has content, as TGI does. Else ``add_generation_prompt`` says whether it
        ends where the assistant begins to speak.

        Raises ChatTemplateError when the template refuses, or fails on, the conversation.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        conversation = [dict(message) for message in messages]
        continued = is_continued(messages, continue_final_message)
        if continued:
            conversation[-1]["content"] += _CONTINUE
        try:
            text = template.render(
                **{
                    "documents": None,
                    **(variables or {}),
                    **self._special_tokens,
                    "messages": conversation,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt and not continued,
                }
            )
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except Exception as error:  # whatever an expression of a foreign template raises
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return _cut_at_tag(text) if continued else text


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


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error


def _sources(model_path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name, from the newest to the oldest place that models keep them in."""
    sources: dict[str, str] = {}
    main = model_path / "chat_template.jinja"
    extra = model_path / "additional_chat_templates"
    if main.is_file():
        sources["default"] = _text(main)
    if extra.is_dir():
        for path in sorted(extra.glob("*.jinja")):
            sources[path.stem] = _text(path)
    if sources:
        return sources
    for holder in (
        read_json(model_path / "chat_template.json"),
        config,
        read_json(model_path / "processor_config.json"),
    ):
        sources = _of_holder(holder)
        if sources:
            return sources
    return {}


def _of_holder(holder: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name of a file's ``chat_template``."""
    value = holder.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): str(source) for name, source in value.items()}
    if isinstance(value, list):
        return {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict) and {"name", "template"} <= set(entry)
        }
    return {}
