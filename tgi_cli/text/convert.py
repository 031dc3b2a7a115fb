"""Write the tokenizer.json of a folder that has none: ``python -m tgi_cli.text.convert``.

A process of its own, because transformers' tokenizers import torch, which the router must not
carry for the rest of its life.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Convert ``arguments[0]`` (a folder) into ``arguments[1]`` (a file). The exit status."""
    from transformers import AutoTokenizer

    source, target = arguments[:2]
    trust = "--trust-remote-code" in arguments[2:]
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust, local_files_only=True
        )
    except Exception as error:  # foreign code: anything may come; the parent shows this line
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        print(f"{type(tokenizer).__name__} has no tokenizers form", file=sys.stderr)
        return 1
    backend.save(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
