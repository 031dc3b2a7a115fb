"""What a caller says that a text must be, as the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import GrammarError, response_format
from tgi_cli.text.grammar.tokens import SpecialTokens
from tgi_cli.text.tokenizer import Tokenizer

Grammar = str | Mapping[str, Any]


def read_grammar(
    asked: Grammar | None, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> str | None:
    """A grammar of llguidance in its JSON form; one that is text already is not looked at.

    Compiled in the caller's thread, however long that takes: the grammar is the caller's own.

    Raises:
        ValueError: it is none, or one with a part that is not supported, which is named.
    """
    if asked is None or isinstance(asked, str):
        return asked
    added = tokenizer.backend.get_added_tokens_decoder()
    tokens = SpecialTokens(
        {token.content: index for index, token in added.items()},
        [token.content for token in added.values() if token.special],
        eos_token_ids,
    )
    try:
        grammar = response_format(asked, "grammar")
        return None if grammar is None else Compiler(tokens).compile(grammar.form)
    except GrammarError as error:
        raise ValueError(f"grammar: {error}") from error
