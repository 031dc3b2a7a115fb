"""Requests of one tenant, salt and adapter find recent answers, as long as there is room."""

from __future__ import annotations

from tgi_cli.engine.speculation.recent_answers import (
    MAX_ANSWER,
    MAX_KEYS,
    MAX_TOKENS,
    TEXT_TOKENS,
    Key,
    RecentAnswers,
)

KEY = Key(b"", b"", 0)


def salted(number: int) -> Key:
    return Key(b"", b"%d" % number, 0)


def found(answers: RecentAnswers, key: Key, context: list[int]) -> list[list[int]]:
    return [
        index.follow(index.find(context)[1], 3)[0]
        for index in answers.indexes(key)
        if index.find(context)[0]
    ]


def test_an_answer_is_found_by_its_own_key_only() -> None:
    answers = RecentAnswers()
    own = Key(b"a", b"one", 0)
    answers.add(own, [1, 2, 3, 4, 5])
    assert found(answers, own, [2, 3]) == [[4, 5]]
    for other in ({"cache_salt": b"two"}, {"cache_salt": b""}, {"adapter_id": 1}, {"tenant": b"b"}):
        assert found(answers, own._replace(**other), [2, 3]) == []


def test_answers_do_not_run_into_each_other() -> None:
    answers = RecentAnswers()
    answers.add(KEY, [1, 2, 3])
    answers.add(KEY, [])
    answers.add(KEY, [4, 5, 6])
    assert found(answers, KEY, [1, 2]) == [[3]]
    assert found(answers, KEY, [2, 3]) == [[]]


def test_the_oldest_answers_of_a_key_are_dropped() -> None:
    answers = RecentAnswers()
    for number in range(4 * TEXT_TOKENS // 1000):
        answers.add(KEY, [number * 1000 + i for i in range(1000)])
        assert len(answers.indexes(KEY)) <= 2
        assert answers.num_tokens == sum(len(index.tokens) for index in answers.indexes(KEY))
        assert answers.num_tokens <= 2 * (TEXT_TOKENS + 1001)
    assert found(answers, KEY, [500, 501]) == []
    last = number * 1000
    assert found(answers, KEY, [last, last + 1]) == [[last + 2, last + 3, last + 4]]


def test_of_a_long_answer_the_end_is_kept() -> None:
    answers = RecentAnswers()
    answers.add(KEY, list(range(3 * MAX_ANSWER)))
    assert answers.num_tokens == MAX_ANSWER + 1
    assert found(answers, KEY, [2 * MAX_ANSWER - 1]) == []
    assert found(answers, KEY, [3 * MAX_ANSWER - 2]) == [[3 * MAX_ANSWER - 1]]


def test_the_keys_that_were_used_longest_ago_are_dropped() -> None:
    answers = RecentAnswers()
    first = Key(b"", b"first", 0)
    count = MAX_TOKENS // 1000 + 10
    for number in range(count):
        answers.add(salted(number), list(range(999)))
        answers.add(first, [1, 2, 3])
        assert answers.num_tokens <= MAX_TOKENS
    assert not answers.indexes(salted(0))
    assert answers.indexes(first), "it was used"
    assert answers.indexes(salted(count - 1))


def test_the_number_of_keys_is_limited() -> None:
    answers = RecentAnswers()
    for number in range(MAX_KEYS + 1):
        answers.add(salted(number), [1, 2, 3])
    assert not answers.indexes(salted(0))
    assert answers.num_tokens == 4 * MAX_KEYS
