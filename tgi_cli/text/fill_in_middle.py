"""Prompts that ask a model for the text between a prefix and a suffix.

Models are trained for it with tokens of their own, which are found in the vocabulary by name
(https://arxiv.org/abs/2207.14255). Names and order of the parts are those of the models' cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tgi_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text within a prompt.

    Attributes:
        text: the text.
        continues: encode it as after other text. SentencePiece would put a space in front of it.
    """

    text: str
    continues: bool = False


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt of token ids and texts; each text is encoded by itself, without special tokens."""

    parts: tuple[tuple[int, ...] | TextPart, ...]

    def __len__(self) -> int:
        """Total length of the texts, in characters."""
        return sum(len(part.text) for part in self.parts if isinstance(part, TextPart))


class File(NamedTuple):
    """A file that belongs to the context of a completion."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class _Format:
    """Tokens of one family of models.

    Attributes:
        prefix, suffix: in front of these parts.
        middle: in front of the answer; empty if the prefix comes last and the answer follows it.
        suffix_first: whether the suffix precedes the prefix.
        file: candidates of the token in front of a file's name.
        repository: candidates of the token in front of a repository's name.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    file: tuple[str, ...] = ()
    repository: tuple[str, ...] = ()


_FORMATS = (
    # Qwen 2.5 Coder, Qwen 3 and 3 Coder, Granite 4, CodeGemma
    _Format(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        file=("<|file_sep|>", "<|file_separator|>"),
        repository=("<|repo_name|>",),
    ),
    # StarCoder 1 and 2, StableCode, Granite Code, Refact
    _Format(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        file=("<file_sep>", "<filename>"),
        repository=("<repo_name>", "<reponame>"),
    ),
    # SantaCoder
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek Coder, DeepSeek V2 and V3
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>"),
    # GLM 4.5
    _Format("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Seed-Coder
    _Format("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # Codestral
    _Format("[PREFIX]", "[SUFFIX]", suffix_first=True),
)

_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "▁<EOT>",
    "<|file_separator|>",
)
"""Tokens that end the middle, besides those of the format and the model's own."""

_REPOSITORY = "repository"
"""Placeholder for the repository's name, which requests do not give."""
_CURRENT = "current"
"""Stands for the name of the file that is completed."""


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """How a model is asked for the text between a prefix and a suffix.

    Attributes:
        prefix_id, suffix_id: tokens in front of these parts.
        middle_id: token in front of the answer, or None.
        suffix_first: whether the suffix precedes the prefix.
        start_ids: tokens that begin any prompt.
        file_id, repository_id: tokens in front of these names, or None.
        stop_ids: tokens that end the answer; not part of its text.
    """

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    suffix_first: bool
    start_ids: tuple[int, ...]
    file_id: int | None
    repository_id: int | None
    stop_ids: frozenset[int]

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> FillInMiddle | None:
        """The format whose tokens are in the vocabulary, or None."""
        id_of = tokenizer.backend.token_to_id
        for known in _FORMATS:
            prefix, suffix = id_of(known.prefix), id_of(known.suffix)
            middle = id_of(known.middle) if known.middle else None
            if prefix is None or suffix is None or (known.middle and middle is None):
                continue
            file = _first(tokenizer, known.file)
            repository = _first(tokenizer, known.repository)
            ends = (prefix, suffix, middle, file, repository, *map(id_of, _ENDS))
            return cls(
                prefix,
                suffix,
                middle,
                known.suffix_first,
                tuple(tokenizer.encode("")),
                file,
                repository,
                frozenset(index for index in ends if index is not None),
            )
        return None

    def prompt(
        self,
        prefix: str | tuple[int, ...],
        suffix: str,
        files: Sequence[File] = (),
        *,
        add_special_tokens: bool = True,
    ) -> PromptParts:
        """The prompt whose continuation belongs between ``prefix`` and ``suffix``.

        Args:
            prefix: text or token ids before the cursor.
            suffix: text after the cursor.
            files: other files of the project, the most relevant last.
            add_special_tokens: begin with the tokens that begin any prompt.
        """
        parts: list[tuple[int, ...] | TextPart] = [self.start_ids] if add_special_tokens else []
        before = ""
        if files and self.file_id is not None:
            if self.repository_id is not None:
                parts += [(self.repository_id,), TextPart(f"{_REPOSITORY}\n", True)]
            for file in files:
                parts += [(self.file_id,), TextPart(f"{file.name}\n{file.text}\n", True)]
            parts += [(self.file_id,), TextPart(f"{_CURRENT}\n", True)]
        else:
            before = "".join(f"# {file.name}\n{file.text}\n\n" for file in files)
        leading: list[tuple[int, ...] | TextPart] = [(self.prefix_id,)]
        if isinstance(prefix, str):
            leading.append(TextPart(before + prefix))
        else:
            leading += [TextPart(before), prefix]
        trailing: list[tuple[int, ...] | TextPart] = [(self.suffix_id,), TextPart(suffix, True)]
        parts += [*trailing, *leading] if self.suffix_first else [*leading, *trailing]
        if self.middle_id is not None:
            parts.append((self.middle_id,))
        return PromptParts(tuple(parts))


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    found = (tokenizer.backend.token_to_id(name) for name in names)
    return next((index for index in found if index is not None), None)
