"""The process that compiles grammars: ``python -m tgi_cli.text.grammar_worker``.

See :mod:`tgi_cli.text.worker_process`.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.text.grammar import GrammarError
from tgi_cli.text.grammar_compile import Compiler
from tgi_cli.text.grammar_tokens import SpecialTokens
from tgi_cli.text.worker_process import Work, serve


def _begin(setup: Any) -> Work:
    tokens = SpecialTokens(setup["added"], setup["special"], setup["ends"])
    compiler = Compiler(tokens)
    compiler.compile(b'{"json": {"type": "object"}}')

    def work(form: bytes) -> dict[str, Any]:
        try:
            return {"grammar": compiler.compile(form)}
        except GrammarError as error:
            return {"error": str(error)}

    return work


if __name__ == "__main__":
    serve(_begin)
