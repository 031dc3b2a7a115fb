"""All that a model's folder says about text, loaded together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tgi_cli.text.chat import ChatTemplate
from tgi_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextBundle:
    """The tokenizer of a model and, where it has one, its chat template."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None

    @classmethod
    def load(cls, model_path: Path, trust_remote_code: bool = False) -> TextBundle:
        """Read both from a folder. Raises ModelError."""
        tokenizer = Tokenizer.load(model_path, trust_remote_code)
        return cls(tokenizer, ChatTemplate.load(model_path, tokenizer))
