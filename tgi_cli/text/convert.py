"""Converts a tokenizer to tokenizer.json: ``python -m tgi_cli.text.convert FOLDER FILE``.

A process of its own, because transformers' tokenizers import torch, which would stay in the
router's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def main(arguments: list[str]) -> int:
    """Convert the tokenizer in folder ``arguments[0]`` to file ``arguments[1]``."""
    from transformers import AutoTokenizer

    source, target = arguments[:2]
    trust = "--trust-remote-code" in arguments[2:]
    # It reads SentencePiece models with protobuf alone, and yet checks for SentencePiece.
    if not find_spec("sentencepiece"):
        converters: Any = import_module("transformers.convert_slow_tokenizer")
        converters.requires_backends = _required_but_sentencepiece
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust, local_files_only=True
        )
    except Exception as error:  # code of the model may raise anything; the parent shows this line
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        print(f"{type(tokenizer).__name__} cannot be converted to tokenizer.json", file=sys.stderr)
        return 1
    backend.save(target)
    return 0


def _required_but_sentencepiece(owner: object, backends: str | Sequence[str]) -> None:
    from transformers.utils import import_utils

    listed = [backends] if isinstance(backends, str) else backends
    if wanted := [name for name in listed if name != "sentencepiece"]:
        required: Any = import_utils.requires_backends
        required(owner, wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
