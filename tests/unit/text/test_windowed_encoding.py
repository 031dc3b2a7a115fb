"""A text that is encoded in windows has the tokens that it has as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.unit.text import tiny
from tgi_cli import demo
from tgi_cli.text.spans import Spans
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import WINDOW_CHARACTERS, encode_in_windows
from tgi_cli.text.workers import TextWorkers

_RANDOM = random.Random(0)
_WORDS = ["".join(_RANDOM.choices("abcdefghijklmnop", k=_RANDOM.randint(1, 9))) for _ in range(200)]

TEXTS = {
    "prose": " ".join(_RANDOM.choices(_WORDS, k=6_000)),
    "one word": "".join(_RANDOM.choices(_WORDS, k=4_000)),
    "digits": "".join(_RANDOM.choices("0123456789", k=20_000)),
    "one letter": "a" * 20_000,
    "spaces": " " * 20_000,
    "lines": "a\n" * 8_000,
    "emoji": "\U0001f600\U0001f389" * 3_000,
    "Chinese": "\u4e2d\u6587\u5b57\u7b26" * 3_000,
    "accents": "e\u0301\u00e9" * 5_000,
    "specials": "<s></s> x<s>" * 2_000,
    "anything": "".join(chr(_RANDOM.choice([*range(1, 0x300), 0x1F600])) for _ in range(20_000)),
    "runs": "".join(c * _RANDOM.randint(1, 3_000) for c in _RANDOM.choices("a 1\n.\u4e2d", k=20)),
}


def digits_in_threes() -> Backend:
    """Splits words, digits and the rest as Llama 3's does."""
    backend = tiny.byte_level()
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def unigram() -> Backend:
    """Weighs all ways to cut a text that is not split before, as T5's and ALBERT's nearly do."""
    pieces = [("<unk>", 0.0), *((chr(code), -8.0) for code in range(33, 127)), ("\u2581", -4.0)]
    pieces += [(word, -6.0 - len(word) / 4) for word in dict.fromkeys(_WORDS) if len(word) > 1]
    pieces += [(left + right, -9.0) for left in "abcd" for right in "efgh"]
    found = dict(pieces)
    backend = Backend(models.Unigram(list(found.items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte level": tiny.byte_level,
    "byte fallback": tiny.byte_fallback,
    "digits in threes": digits_in_threes,
    "unigram": unigram,
}


@pytest.fixture(scope="module", params=[*KINDS, "bundled"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bundled":
        return Tokenizer.load(demo.model_path())
    return Tokenizer(KINDS[request.param]())


@pytest.mark.parametrize(
    ("name", "special"),
    [*((name, False) for name in TEXTS), ("prose", True), ("one word", True), ("specials", True)],
)
def test_windows_give_the_tokens_of_the_whole_text(
    tokenizer: Tokenizer, name: str, special: bool
) -> None:
    text = TEXTS[name]
    found = list(encode_in_windows(tokenizer, text, special, window=1024))
    whole = list(tokenizer.spans(text, special))
    assert len(found) > 3 or len(whole) < 10, "one token may have much text"
    assert list(chain.from_iterable(found)) == whole


class _Odd:
    """A tokenizer whose tokens depend on how far a text reaches, as none should."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def spans(self, text: str, add_special_tokens: bool) -> Spans:
        self.lengths.append(len(text))
        text = text.replace(" ", "_") if len(self.lengths) % 2 else text
        return self._tokenizer.spans(text, add_special_tokens)


def test_disagreeing_windows_grow_up_to_the_whole_text(tokenizer: Tokenizer) -> None:
    odd = _Odd(tokenizer)
    text = "a b c d " * 2_000
    found = list(chain.from_iterable(encode_in_windows(odd, text, False, window=1024)))  # type: ignore[arg-type]
    assert odd.lengths[-1] == len(text)
    assert found[-1][2] == len(text)
    assert sum(odd.lengths) < 8 * len(text)


class TestWorkers:
    @pytest.fixture
    def encoded(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many characters the tokenizer was given in each call."""
        seen: list[int] = []
        spans = Tokenizer.spans

        def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> Spans:
            seen.append(len(text))
            return spans(self, text, add_special_tokens)

        monkeypatch.setattr(Tokenizer, "spans", watched)
        return seen

    @pytest.fixture
    def run(self, tokenizer: Tokenizer) -> Callable[..., object]:
        async def run(*args: object, **kwargs: object) -> list[int]:
            workers = TextWorkers(tokenizer, 1)
            try:
                return await workers.encode(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                workers.close()

        return run

    async def test_a_long_text_is_given_up_where_it_is_too_long(
        self, run: Callable[..., object], encoded: list[int]
    ) -> None:
        text = "the quick brown fox " * 100_000
        ids = await run(text, True, 5_000)  # type: ignore[misc]
        assert len(ids) > 5_000
        assert sum(encoded) < 10 * WINDOW_CHARACTERS
        assert max(encoded) <= 2 * WINDOW_CHARACTERS

    async def test_last_tokens_are_those_of_the_whole_text(
        self, run: Callable[..., object], tokenizer: Tokenizer, encoded: list[int]
    ) -> None:
        text = TEXTS["prose"] * 4
        whole = tokenizer.encode(text)
        assert await run(text, True) == whole  # type: ignore[misc]
        assert await run(text, True, None, 100) == whole[-100:]  # type: ignore[misc]
        assert max(encoded) <= WINDOW_CHARACTERS
        assert await run("hello world", True, None, 1) == tokenizer.encode("hello world")[-1:]  # type: ignore[misc]
