"""The process that compiles grammars: ``python -m tgi_cli.text.grammar_worker``.

See :mod:`tgi_cli.text.worker_process`.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.text.grammar import GrammarError
from tgi_cli.text.grammar_compile import Compiler
from tgi_cli.text.grammar_tokens import SpecialTokens
from tgi_cli.text.worker_process import PeakMemory, Work, serve

_MOST_MEGABYTES = 32
"""Of one grammar here; it takes the engine, whose vocabulary is larger, up to twice as much. 20,000
short choices take 24."""


def _begin(setup: Any) -> Work:
    tokens = SpecialTokens(setup["added"], setup["special"], setup["ends"])
    compiler = Compiler(tokens)
    compiler.compile(b'{"json": {"type": "object"}}')

    memory = PeakMemory()

    def work(form: bytes) -> dict[str, Any]:
        memory.begin()
        try:
            grammar = compiler.compile(form)
        except GrammarError as error:
            return {"error": str(error)}
        if memory.grown > _MOST_MEGABYTES << 20:
            return {"error": f"it takes more than {_MOST_MEGABYTES} MB of memory to follow"}
        return {"grammar": grammar}

    return work


if __name__ == "__main__":
    serve(_begin)
