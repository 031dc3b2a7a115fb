"""The text side of a model, for callers of TGI's own services."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.process.worker_pool import WorkersBusy
from tgi_cli.text.grammar import grammar
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.sequence_text import CutAt, SequenceText
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer


class ModelText:
    """Encodes prompts, compiles grammars and makes the text of outputs for one model.

    Any thread may call any method, one at a time.

    Args:
        tokenizer: Tokenizer of the model.
        eos_token_ids: Ids that end a text.

    Attributes:
        special_ids: Tokens that add nothing to the text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self.special_ids = tokenizer.special_ids | frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._checker: GrammarChecker | None = None

    def encode(self, text: str, add_special_tokens: bool, truncate: int) -> list[int]:
        """Token ids of a prompt; the last ``truncate`` of them (0: all).

        Special tokens that are added in front stay there.
        """
        ids = self._tokenizer.encode(text, add_special_tokens)
        if not truncate or len(ids) <= truncate:
            return ids
        front = 0
        if add_special_tokens:
            special = self._tokenizer.special_ids
            added = len(ids) - len(self._tokenizer.encode(text, add_special_tokens=False))
            while front < min(added, truncate - 1) and ids[front] in special:
                front += 1
        return ids[:front] + ids[front - truncate :]

    def surface(self, token_id: int) -> str:
        """The text of one id by itself."""
        return self._tokenizer.surface(token_id)

    def output(
        self, prompt_ids: Sequence[int], stop_sequences: Sequence[str], max_new_tokens: int
    ) -> SequenceText:
        """The text that will follow a prompt. Raises ValueError for too long stop sequences."""
        return SequenceText(
            self._tokenizer,
            prompt_ids,
            StopStrings(stop_sequences),
            hidden_ids=self.special_ids,
            cut_at=CutAt.AFTER_TOKEN,
            length_first=max_new_tokens,
        )

    def grammar(self, kind: str, source: str) -> str:
        """A grammar in the engine's form; ``kind`` is json or regex. Raises ValueError."""
        parsed = grammar.parse_tgi({"type": kind, "value": source})
        if self._checker is None:
            self._checker = GrammarChecker(self._tokenizer, self._eos_token_ids)
        try:
            return asyncio.run(self._checker.compile(parsed))
        except WorkersBusy:
            raise ValueError("too many grammars are being compiled") from None

    def close(self) -> None:
        """End the processes that compile grammars. May be called twice."""
        if self._checker is not None:
            self._checker.close()


def load_model_text(model_path: Path, trust_remote_code: bool, info: EngineInfo) -> ModelText:
    """The text side of a model folder. Raises ModelError."""
    return ModelText(Tokenizer.load(model_path, trust_remote_code), info.eos_token_ids)
