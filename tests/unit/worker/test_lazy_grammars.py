"""The vocabulary for grammars is read with the first of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import llguidance
import numpy as np
import pytest

from tgi_cli import demo
from tgi_cli.worker.grammar import LLGuidance, load_grammars
from tgi_cli.worker.lazy_grammars import UNUSABLE, LazyGrammars

VOCAB, EOS = 4096, (2, 0)


class Loads:
    """Counts how often the compiler is made."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> LLGuidance | None:
        self.count += 1
        assert self.may_end.wait(60)
        return load_grammars(demo.model_path(), VOCAB, EOS)


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def compiler(loads: Loads) -> Iterator[LazyGrammars]:
    made = LazyGrammars(loads, (7,))
    yield made
    made.close()


def of_text(expression: str) -> str:
    return llguidance.grammar_from("regex", expression)


def test_nothing_is_read_before_the_first_grammar(loads: Loads, compiler: LazyGrammars) -> None:
    assert compiler.eos_token_ids == (7,)
    assert loads.count == 0
    assert compiler.compile(of_text("a+")).result(20).accept(0) is False
    assert compiler.eos_token_ids == EOS
    compiler.compile(of_text("b+")).result(20)
    assert loads.count == 1


def test_grammars_wait_for_the_vocabulary_without_blocking(
    loads: Loads, compiler: LazyGrammars
) -> None:
    loads.may_end.clear()
    matchers = [compiler.compile(of_text(each)) for each in ("a+", "b+")]
    assert not any(matcher.done() for matcher in matchers)
    loads.may_end.set()
    known = [matcher.result(20) for matcher in matchers]
    assert loads.count == 1
    direct = load_grammars(demo.model_path(), VOCAB, EOS)
    assert direct is not None
    wanted = [direct.compile(of_text(each)).result(20) for each in ("a+", "b+")]
    assert np.array_equal(compiler.fill(known), direct.fill(wanted))
    assert np.array_equal(compiler.fill(known, [[], [1]]), direct.fill(wanted, [[], [1]]))
    direct.close()


def test_an_invalid_grammar_is_an_error_of_its_own(compiler: LazyGrammars) -> None:
    broken = json.dumps({"grammars": [{"lark_grammar": "start: ("}]})
    with pytest.raises(ValueError, match=r"."):
        compiler.compile(broken).result(20)
    assert compiler.compile(of_text("a")).result(20) is not None


def test_a_vocabulary_that_cannot_be_read_fails_each_grammar(loads: Loads) -> None:
    compiler = LazyGrammars(lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match=UNUSABLE):
            compiler.compile(of_text("a")).result(20)
    compiler.close()


def test_what_was_never_used_can_be_closed(loads: Loads) -> None:
    LazyGrammars(loads).close()
    assert loads.count == 0
