"""Whether two models mean the same token by an id, which drafts need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tgi_cli.errors import ModelError
from tgi_cli.files import TOKENIZER_BYTES, decode_json, read_bytes

_SHOWN = 40
"""Characters of a token that an error message repeats."""


def check_vocabulary(target: Path, draft: Path, sizes: tuple[int, int]) -> None:
    """Check that an id of both models is the same token in both.

    Vocabularies may end differently: rows of padding, and tokens that were added to one of them.

    Args:
        target, draft: folders of the models. Without a tokenizer.json in each, only the sizes are
            compared.
        sizes: of their vocabularies, padding included.

    Raises:
        ModelError: an id is another token, or the sizes differ and nothing else is known.
    """
    ours, theirs = tokens_of(target), tokens_of(draft)
    remedy = "use a draft model of the same family"
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"the vocabulary of the draft model {draft} has {sizes[1]} tokens, the model's "
                f"{sizes[0]}, and without a tokenizer.json of each they cannot be compared",
                remedy,
            )
        return
    for token, number in ours.items():
        other = theirs.get(token, number)
        if other != number:
            raise ModelError(
                f"the draft model {draft} has another vocabulary: {token[:_SHOWN]!r} has the id "
                f"{other}, and {number} in the model's",
                remedy,
            )
    named = {number: token for token, number in ours.items()}
    for token, number in theirs.items():
        other_token = named.get(number, token)
        if other_token != token:
            raise ModelError(
                f"the draft model {draft} has another vocabulary: the id {number} is "
                f"{token[:_SHOWN]!r}, and {other_token[:_SHOWN]!r} in the model's",
                remedy,
            )


def tokens_of(folder: Path) -> dict[str, int] | None:
    """The tokens of a folder's tokenizer.json and their ids; None if there is none.

    Raises:
        ModelError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = decode_json(read_bytes(path, TOKENIZER_BYTES), None)
        vocabulary: Any = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # with scores: the place of a token is its id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        found = dict(vocabulary)
        for added in content.get("added_tokens") or ():
            found[added["content"]] = added["id"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error
    return found
