"""The training data of the bundled model, on a tiny standard library and documentation."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.tools.demo import corpus, dialogs
from tests.tools.demo import tokenizer as tokens
from tests.tools.demo.windows import ChatWindows, TextWindows, encode_stream

MODULE = '''#!/usr/bin/env python3
# Copyright 1999 Somebody.  All rights reserved.
# Permission to use this module is hereby granted.

# Kept: an ordinary comment.
"""Tools that count things, one after the other, and remember them."""

TABLE = [
    ("row", 1),
    ("row", 2),
    ("row", 3),
    ("row", 4),
    ("row", 5),
    ("row", 6),
    ("row", 7),
    ("row", 8),
]

def count(items):
    """Return the number of *items* that were seen.

    More words that no answer contains.
    """
    total = 0
    for _ in items:
        total += 1
    return total

def _hidden():
    """Return something that nobody should ask about."""
'''

PAGE = """\
:mod:`counting` --- Count things
================================

.. module:: counting
   :synopsis: Count things.
.. sectionauthor:: Somebody <somebody@example.org>
.. _counting-label:

**Source code:** :source:`Lib/counting.py`

--------------

This module counts things; see :term:`iterable` and :pep:`8`.

.. index::
   pair: counting; things

.. class:: Tally(start=0)

   A tally that starts at *start*, for :func:`~counting.count` users.

   .. method:: add(item)

      Add *item* to the tally::

         tally.add("x")

   .. method:: total()

      Return the total as an :class:`int`. Equivalent to ``len(self)``.

+------+------+
| cell | cell |
+------+------+
"""


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Return a standard library folder and a documentation folder."""
    stdlib, docs = tmp_path / "lib", tmp_path / "docs"
    (stdlib / "test").mkdir(parents=True)
    (docs / "library").mkdir(parents=True)
    (stdlib / "counting.py").write_text(MODULE)
    (stdlib / "queue.py").write_text(MODULE)
    (stdlib / "test" / "counting_test.py").write_text(MODULE)
    (docs / "library" / "counting.rst.txt").write_text(PAGE)
    (docs / "library" / "queue.rst.txt").write_text(PAGE)
    return stdlib, docs


def _documents(sources: tuple[Path, Path]) -> list[corpus.Document]:
    stdlib, docs = sources
    return [*corpus.read_modules(stdlib), *corpus.read_pages(docs)]


def test_tests_are_skipped_and_heldout_documents_are_recognised(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    documents = _documents(sources)
    assert [document.name for document in documents] == [
        *("counting", "queue", "library/counting", "library/queue")
    ]
    assert [corpus.is_heldout(document) for document in documents] == [False, True, False, True]
    corpus.write_heldout(documents, tmp_path)
    assert (tmp_path / "source.txt").read_text() == documents[1].text
    assert (tmp_path / "documentation.txt").read_text() == documents[3].text


def test_source_loses_banners_and_the_middle_of_tables_only() -> None:
    text = corpus.clean_source(MODULE)
    assert "Copyright" not in text
    assert "Permission" not in text
    assert "# Kept: an ordinary comment." in text
    assert '("row", 6)' in text
    assert '("row", 7)' not in text
    assert "total += 1\n    return total\n" in text


def test_page_reads_as_prose() -> None:
    text = corpus.clean_page(PAGE)
    assert "This module counts things; see iterable and PEP 8." in text
    assert "for `count()` users" in text
    assert "Return the total as an `int`. Equivalent to `len(self)`." in text
    for dropped in ("sectionauthor", "_counting-label", "pair:", "synopsis", "Source code", "cell"):
        assert dropped not in text
    assert '         tally.add("x")' in text


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        (":func:`len`", "`len()`"),
        (":meth:`!close`", "`close()`"),
        (":class:`~collections.abc.Mapping`", "`Mapping`"),
        (":ref:`the tutorial <tut>`", "the tutorial"),
        ("`PyPI <https://pypi.org>`_", "PyPI"),
        ("``None``", "`None`"),
        (":c:func:`PyErr_Clear`", "`PyErr_Clear()`"),
    ],
)
def test_inline_markup(markup: str, shown: str) -> None:
    assert corpus.inline(markup) == shown


def test_first_paragraph_keeps_whole_sentences() -> None:
    assert corpus.first_paragraph("  One\n  line.\n\n  Other.") == "One line."
    assert corpus.first_paragraph("No full stop") == "No full stop."
    assert corpus.first_paragraph("Kept sentence. An example::") == "Kept sentence."
    assert corpus.first_paragraph("First one. Second one.", limit=15) == "First one."
    assert corpus.first_paragraph("x" * 400) == ""


def test_answers_are_the_documentation_of_public_names(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    smalltalk = tmp_path / "smalltalk.json"
    smalltalk.write_text(json.dumps([{"ask": ["Hello"], "answer": "Hi."}]))
    documents = [one for one in _documents(sources) if not corpus.is_heldout(one)]
    exchanges = {(one.kind, one.subject): one for one in dialogs.collect(documents, smalltalk)}
    answers = {key: exchange.answer for key, exchange in exchanges.items()}
    assert answers["name", "counting.count"] == (
        "`counting.count`: Return the number of *items* that were seen."
    )
    assert answers["name", "counting.Tally.total"] == (
        "`counting.Tally.total`: Return the total as an `int`. Equivalent to `len(self)`."
    )
    assert answers["name", "counting"].startswith("`counting`: This module counts things")
    assert answers["code", "count"].startswith("```python\ndef count(items):\n    ")
    assert answers["asked", "Hello"] == "Hi."
    assert not any("_hidden" in subject for _, subject in answers)

    conversations = list(dialogs.epoch(list(exchanges.values()), random.Random(0)))
    assert conversations == list(dialogs.epoch(list(exchanges.values()), random.Random(0)))
    replies = [one["content"] for turns in conversations for one in turns[-1:]]
    assert set(replies) <= set(answers.values())
    assert all(turns[-1]["role"] == "assistant" for turns in conversations)


def test_windows_cover_the_stream_once_and_begin_with_conversations(
    sources: tuple[Path, Path],
) -> None:
    documents = _documents(sources)
    tokenizer = tokens.train_tokenizer([document.text for document in documents], 300)
    stream = encode_stream(documents, tokenizer, random.Random(0))
    assert np.count_nonzero(stream == tokens.END_OF_TEXT_ID) == len(documents)

    windows = TextWindows(np.arange(100, dtype=np.uint16), np.random.default_rng(0))
    drawn = np.concatenate([windows.draw(10) for _ in range(9)])
    assert len(set(drawn.tolist())) == 90

    exchanges = [dialogs.Exchange("asked", "Hello", "Hi.")]
    chat = ChatWindows(exchanges, tokenizer, random.Random(0)).draw(64)
    assert len(chat) == 64
    assert chat[0] == tokenizer.token_to_id(tokens.TURN_START)
    assert tokens.TURN_END_ID in chat
