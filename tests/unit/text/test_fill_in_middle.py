"""Prompts between a prefix and a suffix, by the tokens of each family."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.unit.text import tiny
from tgi_cli.text.fill_in_middle import File, FillInMiddle, PromptParts, TextPart
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import TextWorkers

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def tokenizer_with(*tokens: str, backend: Backend | None = None) -> Tokenizer:
    backend = backend or tiny.byte_level()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return Tokenizer(backend)


def rendered(tokenizer: Tokenizer, prompt: PromptParts) -> str:
    """The prompt's text, tokens by name."""
    return "".join(
        part.text if isinstance(part, TextPart) else "".join(names(tokenizer, part))
        for part in prompt.parts
    )


def names(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The vocabulary's entries."""
    return [tokenizer.backend.id_to_token(index) or "" for index in ids]


def found(tokenizer: Tokenizer) -> FillInMiddle:
    infill = FillInMiddle.find(tokenizer)
    assert infill is not None
    return infill


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (QWEN, "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<fim_prefix>P<fim_suffix>S<fim_middle>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
        ),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "▁<PRE>P▁<SUF>S▁<MID>"),
        (
            ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
            "<[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>",
        ),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]S[PREFIX]P"),
    ],
)
def test_each_family_has_its_tokens_and_order(tokens: tuple[str, ...], expected: str) -> None:
    tokenizer = tokenizer_with(*tokens)
    assert rendered(tokenizer, found(tokenizer).prompt("P", "S")) == tiny.BOS + expected


@pytest.mark.parametrize("tokens", [(), QWEN[:2], ("<|fim_prefix|>", "<fim_suffix>")])
def test_models_without_all_tokens_have_no_format(tokens: tuple[str, ...]) -> None:
    assert FillInMiddle.find(tokenizer_with(*tokens)) is None


def test_tokens_that_may_follow_end_the_answer() -> None:
    ends = (*QWEN, "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<|fim_pad|>")
    tokenizer = tokenizer_with(*ends, "<|other|>")
    assert found(tokenizer).stop_ids == {tokenizer.backend.token_to_id(name) for name in ends}


def test_files_precede_the_prefix_behind_their_names() -> None:
    tokenizer = tokenizer_with(*QWEN, "<|file_sep|>", "<|repo_name|>")
    prompt = found(tokenizer).prompt("P", "S", [File("a.py", "A"), File("b.py", "B")])
    assert rendered(tokenizer, prompt) == (
        f"{tiny.BOS}<|repo_name|>repository\n<|file_sep|>a.py\nA\n<|file_sep|>b.py\nB\n"
        "<|file_sep|>current\n<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"
    )


def test_files_are_part_of_the_prefix_without_tokens_for_them() -> None:
    tokenizer = tokenizer_with(*QWEN)
    prompt = found(tokenizer).prompt("P", "S", [File("a.py", "A")], add_special_tokens=False)
    expected = "<|fim_prefix|># a.py\nA\n\nP<|fim_suffix|>S<|fim_middle|>"
    assert rendered(tokenizer, prompt) == expected


def test_the_prefix_may_be_token_ids() -> None:
    tokenizer = tokenizer_with(*QWEN)
    infill = found(tokenizer)
    prompt = infill.prompt((7, 8), "S", add_special_tokens=False)
    assert [part for part in prompt.parts if isinstance(part, tuple)] == [
        (infill.prefix_id,), (7, 8), (infill.suffix_id,), (infill.middle_id,)
    ]  # fmt: skip
    assert len(prompt) == 1


@pytest.fixture
def spaced() -> Iterator[tuple[Tokenizer, TextWorkers]]:
    tokenizer = tokenizer_with("▁<PRE>", "▁<SUF>", "▁<MID>", backend=tiny.byte_fallback())
    workers = TextWorkers(tokenizer, 1)
    yield tokenizer, workers
    workers.close()


def test_sentencepiece_puts_a_space_in_front_of_the_prefix_only(
    spaced: tuple[Tokenizer, TextWorkers],
) -> None:
    tokenizer, workers = spaced
    assert tokenizer.adds_space
    prompt = found(tokenizer).prompt("the", "low")
    ids = asyncio.run(workers.encode_parts(prompt))
    assert "".join(names(tokenizer, ids)) == "▁<PRE>▁the▁<SUF>low▁<MID>"


async def test_encoding_stops_behind_the_limit(spaced: tuple[Tokenizer, TextWorkers]) -> None:
    tokenizer, workers = spaced
    prompt = found(tokenizer).prompt("the " * 10_000, "x" * 10_000)
    assert (
        50 < len(await workers.encode_parts(prompt, 50)) < len(await workers.encode_parts(prompt))
    )


@pytest.mark.parametrize("size", [1, 500, 9000, 30_000])
async def test_long_and_many_parts_are_encoded_as_short_ones(
    size: int, spaced: tuple[Tokenizer, TextWorkers]
) -> None:
    tokenizer, workers = spaced
    text = "the low fox " * (size // 4)
    files = [File(f"f{n}", text if n == 1 else "low") for n in range(size // 100)]
    prompt = found(tokenizer).prompt(text, text, files)
    expected: list[int] = []
    line = tokenizer.encode("\n", False)
    for part in prompt.parts:
        if isinstance(part, tuple):
            expected += part
        elif part.continues:
            expected += tokenizer.encode("\n" + part.text, False)[len(line) :]
        else:
            expected += tokenizer.encode(part.text, False)
    assert await workers.encode_parts(prompt) == expected
