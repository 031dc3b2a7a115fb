"""Which requests count as beginning alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tgi_cli.ray_serve.request_key import request_key

TEXT = "".join(f"def function_{number}(argument): pass\n" for number in range(40))
JSON = [(b"content-type", b"application/json")]


def hashes(body: Any) -> list[int]:
    return list(request_key(JSON, json.dumps(body).encode()).hashes)


def common(one: list[int], other: list[int]) -> int:
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count


@pytest.mark.parametrize("field", ["prompt", "inputs", "input"])
def test_a_prompt_that_continues_another_has_its_hashes(field: str) -> None:
    one, other = hashes({field: TEXT}), hashes({field: TEXT + "x = 1"})
    assert len(one) == len(json.dumps(TEXT)) // 256
    assert common(one, other) >= len(one) - 1


def test_a_conversations_next_turn_has_the_hashes_of_the_turn_before() -> None:
    system = {"role": "system", "content": TEXT}
    first = [system, {"role": "user", "content": "Hello"}]
    then = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Why?"}]
    one, other = hashes({"messages": first}), hashes({"messages": then})
    assert len(one) > 3
    assert common(one, other) >= len(one) - 1


def test_parameters_and_the_order_of_fields_do_not_matter() -> None:
    first = {"max_tokens": 7, "model": "m", "temperature": 0.1, "prompt": TEXT, "seed": 1}
    other = {"prompt": TEXT, "model": "m", "stream": True, "max_tokens": 900}
    assert hashes(first) == hashes(other)


@pytest.mark.parametrize("name", ["model", "cache_salt", "tools", "system"])
def test_what_precedes_the_prompt_counts(name: str) -> None:
    assert common(hashes({"prompt": TEXT}), hashes({"prompt": TEXT, name: "other"})) == 0


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "x"}']
)
def test_bodies_without_a_block_have_no_hashes(body: bytes) -> None:
    assert not request_key(JSON, body).hashes


def test_a_long_prompt_is_compared_up_to_a_length() -> None:
    key = request_key(JSON, json.dumps({"prompt": "x" * 2_000_000}).encode())
    assert (len(key.hashes), key.num_tokens) == (4096, 500_000)


def test_sessions_are_named_by_headers_or_by_the_body() -> None:
    body = json.dumps({"prompt": "x", "prompt_cache_key": "s"}).encode()
    plain = request_key(JSON, b"{}")
    assert plain.session is None
    by_body = request_key(JSON, body).session
    assert by_body is not None
    by_header = request_key([(b"x-claude-code-session-id", b"1"), *JSON], body).session
    assert by_header == request_key([(b"session-id", b"1")], b"{}").session
    assert by_header != by_body
