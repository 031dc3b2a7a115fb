"""The text side of a model folder: tokenizer, chat template and response format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli.errors import ConfigError
from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError
from tgi_cli.text.conversation import adapt
from tgi_cli.text.fill_in_middle import FillInMiddle
from tgi_cli.text.formats.probe import Render
from tgi_cli.text.response_format import ResponseFormat, choose_response_format
from tgi_cli.text.template_files import given_source
from tgi_cli.text.tokenizer import Tokenizer, read_json


@dataclass(frozen=True, slots=True)
class TextBundle:
    """The tokenizer of a model and, if any, its chat template, response format and tokens that
    mark prefix and suffix."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    response_format: ResponseFormat | None = None
    fill_in_middle: FillInMiddle | None = None

    @classmethod
    def load(
        cls,
        model_path: Path,
        trust_remote_code: bool = False,
        *,
        chat_template: str | None = None,
        tokenizer_config_path: Path | None = None,
        tool_call_parser: str = "none",
        reasoning_parser: str = "none",
    ) -> TextBundle:
        """Load a model folder.

        Args:
            chat_template: File of a chat template, or its source, instead of the folder's.
            tokenizer_config_path: tokenizer_config.json with the chat template, instead of the
                folder's.
            tool_call_parser: ``auto``, ``none`` or the name of a format.
            reasoning_parser: ``auto``, ``none`` or the name of a format.

        Raises:
            ModelError: A file is missing or invalid.
            ConfigError: There is no such parser or path, or the given template is invalid.
        """
        if tokenizer_config_path is not None and not tokenizer_config_path.is_file():
            raise ConfigError(
                f"--tokenizer-config-path {tokenizer_config_path} is not a file",
                "give the path of a tokenizer_config.json",
            )
        source = None if chat_template is None else given_source(chat_template)
        tokenizer = Tokenizer.load(model_path, trust_remote_code)
        template = ChatTemplate.load(model_path, tokenizer, tokenizer_config_path, source)
        fill_in_middle = FillInMiddle.find(tokenizer)
        if template is None:
            return cls(tokenizer, fill_in_middle=fill_in_middle)
        config = read_json(tokenizer_config_path or model_path / "tokenizer_config.json")
        response = choose_response_format(
            tokenizer,
            template.text,
            template.takes_tools,
            config.get("response_template"),
            tool_call_parser,
            reasoning_parser,
            _renderer(template) if template.takes_tools else None,
        )
        return cls(tokenizer, template, response, fill_in_middle)


_TOOL = {
    "name": "probe_tool",
    "description": "Probe.",
    "parameters": {
        "type": "object",
        "properties": {"probe": {"type": "string", "description": "Probe."}},
        "required": ["probe"],
    },
}


def _renderer(template: ChatTemplate) -> Render | None:
    """Renders probes together with a tool; None if the template writes no calls."""
    traits = template.traits(True)
    if not traits.calls:
        return None

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str | None:
        try:
            return template.render(
                adapt(messages, traits),
                [{"type": "function", "function": _TOOL}],
                continue_final_message=False,
                add_generation_prompt=prompt,
            )
        except ChatTemplateError:
            return None

    return render
