"""Languages of translation models: the tokens that name them in prompts and answers.

mBART and NLLB spell them as codes (``en_XX``, ``deu_Latn``), M2M100 between underscores
(``__de__``), Marian's models for several target languages between angle brackets (``>>fra<<``).
Of mBART, NLLB and M2M100, the tokenizer adds the source language to each prompt, and an answer
begins with the target language. Of Marian, the prompt begins with the target language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import special_affixes

SOURCE, TARGET = "src_lang", "tgt_lang"
"""What transformers, and requests, call the two languages."""

_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+|__\w+__|>>\S+<<")
_SPELLINGS = ("{}", "__{}__", ">>{}<<")
_IN_PROMPT = ">>"
"""Beginning of tokens that prompts begin with, not answers."""
_SHOWN = 5
"""Languages that an error message names."""


class LanguageError(ValueError):
    """A language that the model does not have, or cannot be told; ``param`` is which of the two."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"`{param}`: {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Translation:
    """Source and target language; None for the model's own."""

    source: str | None = None
    target: str | None = None


class Languages:
    """The language tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder().items()
        self._ids = {
            token.content: index for index, token in added if _CODE.fullmatch(token.content)
        }
        self._default: tuple[int, int] | None = None
        """Where in an encoded prompt the source language is, and that of the tokenizer."""
        known = frozenset(self._ids.values())
        before, behind = special_affixes(tokenizer) if known else ([], [])
        for index, token_id in enumerate((*before, *behind)):
            if token_id in known:
                from_end = index >= len(before)
                at = index - len(before) - len(behind) if from_end else index
                self._default = (at, token_id)

    def prompt(self, ids: Sequence[int], translation: Translation) -> list[int]:
        """An encoded prompt, with its languages in place of the tokenizer's.

        Raises:
            LanguageError: the model has no such language, or takes no source language; the
                prompt was cut off where that belongs.
        """
        made = list(ids)
        if translation.source is not None:
            wanted = self._ids[self._token(SOURCE, translation.source)]
            if self._default is None:
                raise LanguageError(SOURCE, "the model is not told the language of a prompt")
            at, own = self._default
            if not -len(made) <= at < len(made) or made[at] != own:
                raise LanguageError(SOURCE, "the prompt was truncated where its language belongs")
            made[at] = wanted
        if translation.target is not None:
            token = self._token(TARGET, translation.target)
            if token.startswith(_IN_PROMPT):
                made.insert(0, self._ids[token])
        return made

    def first_id(self, translation: Translation, start_ids: Sequence[int]) -> int | None:
        """The token that an answer begins with, or None for the model's own.

        Args:
            start_ids: what the decoder is given before an answer; empty of other models.

        Raises:
            LanguageError: the model has no such language, or is not told it by the first token of
                an answer.
        """
        if translation.target is None:
            return None
        token = self._token(TARGET, translation.target)
        if token.startswith(_IN_PROMPT):
            return None
        if not start_ids or set(start_ids).intersection(self._ids.values()):
            raise LanguageError(TARGET, "the model is not told the language of an answer")
        return self._ids[token]

    def _token(self, param: str, code: str) -> str:
        for spelling in _SPELLINGS:
            if (token := spelling.format(code)) in self._ids:
                return token
        if not self._ids:
            raise LanguageError(param, "the model's tokenizer has no languages")
        some = ", ".join(sorted(self._ids)[:_SHOWN])
        more = ", ..." if len(self._ids) > _SHOWN else ""
        raise LanguageError(param, f"the model has no such language, only {some}{more}")
