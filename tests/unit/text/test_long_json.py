"""JSON of long texts is that of json.dumps."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tgi_cli.text import long_json

LONG = 'é"\\\n\ud800𐀀 end' * 7


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "LONG", 10)


@pytest.mark.parametrize(
    "value",
    [
        LONG,
        "short",
        [],
        [{"content": LONG, "role": "user"}, {"content": "hi", "role": LONG}],
        {LONG: LONG, LONG + "2": [LONG, None, 1, True, -0.5, {"a": LONG * 3}]},
        ({"tuple": (LONG, "b")},),
        {3: math.inf, "n": math.nan},
    ],
)
def test_it_is_what_json_writes(value: Any) -> None:
    assert long_json.dumps(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("text", ["", "plain text", LONG, LONG * 3 + "\udfff"])
def test_texts_are_decoded_across_pieces(text: str) -> None:
    assert long_json.decode(bytearray(text.encode(errors="surrogatepass"))) == text


def test_errors_are_those_of_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        long_json.dumps([LONG, object()])
    deep: Any = LONG
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RecursionError):
        long_json.dumps(deep)
