"""The process that compiles grammars: ``python -m tgi_cli.text.grammar.compile_process``.

See :mod:`tgi_cli.process.pool_worker`.
"""

from __future__ import annotations

from typing import Any

from tgi_cli.process.pool_worker import PeakMemory, Work, serve
from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import GrammarError
from tgi_cli.text.grammar.tokens import SpecialTokens

_MOST_MEGABYTES = 32
"""Most memory of one grammar. The engine, whose vocabulary is larger, takes up to twice as much.
20,000 short choices take 24 MB."""


def _begin(setup: Any) -> Work:
    compiler = Compiler(SpecialTokens(**setup))
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
