"""One loaded model for all tests of the package: random weights, the bundled tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.checkpoints import make_llama
from tgi_cli import LLM, demo

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 128,
    "max_batch_prefill_tokens": 64,
    "max_batch_total_tokens": 4096,
    "max_batch_size": 40,
}


class Statistics(list[dict[str, Any]]):
    """Keeps what ``on_stats`` is told."""

    def __call__(self, text: str) -> None:
        self.append(json.loads(text))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return make_llama(path, vocab_size=4096, tokenizer=demo.model_path())


@pytest.fixture(scope="session")
def make_llm(checkpoint: Path) -> Callable[..., LLM]:
    return lambda **changes: LLM(checkpoint, **(LIMITS | changes))


@pytest.fixture(scope="session")
def stats() -> Statistics:
    return Statistics()


@pytest.fixture(scope="session")
def llm(make_llm: Callable[..., LLM], stats: Statistics) -> Iterator[LLM]:
    with make_llm(on_stats=stats) as llm:
        yield llm
