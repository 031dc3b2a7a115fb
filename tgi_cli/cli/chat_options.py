"""The flags about chats: where the template comes from, how answers are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_CHAT = "Chats"

TokenizerConfigPath = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A tokenizer_config.json in place of the model's, for its chat template.",
        envvar="TOKENIZER_CONFIG_PATH",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_CHAT,
    ),
]
ToolCallParser = Annotated[
    Literal[
        "auto",
        "none",
        "deepseek",
        "glm45",
        "harmony",
        "hermes",
        "llama3_json",
        "mistral",
        "mistral_list",
        "qwen3_coder",
    ],
    typer.Option(
        metavar="FORMAT",
        help="How the model writes tool calls: auto (found out), none (as text), or a format: "
        "hermes, llama3_json, mistral, mistral_list, harmony, qwen3_coder, glm45, deepseek.",
        envvar="TOOL_CALL_PARSER",
        show_envvar=False,
        rich_help_panel=_CHAT,
    ),
]
ReasoningParser = Annotated[
    Literal["auto", "none", "harmony", "mistral", "seed_oss", "think"],
    typer.Option(
        metavar="FORMAT",
        help="How the model marks its reasoning: auto (found out), none (as text), or a format: "
        "think, harmony, mistral, seed_oss.",
        envvar="REASONING_PARSER",
        show_envvar=False,
        rich_help_panel=_CHAT,
    ),
]
