"""Text for callers of the step-driven services."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.process.worker_pool import WorkersBusy
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.grammar import grammar
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer


class StoppedText:
    """The growing text of one sequence, and whether a stop sequence stands in it.

    One that ends within a token counts as well; the text keeps the whole token. Raises
    ValueError for stop sequences that are too long.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_sequences: Sequence[str]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stop_sequences)
        self._state = 0
        self._pieces: list[str] = []

    def push(self, token_id: int) -> tuple[str, bool]:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Output.push`."""
        piece = self._detokenizer.push(token_id)
        self._pieces.append(piece)
        if not self._stops or not piece:
            return piece, False
        self._state, _, found = self._stops.read(self._state, piece)
        return piece, found is not None

    def text(self) -> str:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Output.text`."""
        return "".join(self._pieces) + self._detokenizer.flush()


class ModelTexts:
    """Implements :class:`tgi_cli.tgi_grpc.text_interface.Texts`.

    Args:
        tokenizer: of the model.
        ends: ids that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self.special_ids = tokenizer.special_ids | frozenset(ends)
        self._tokenizer = tokenizer
        self._ends = ends
        self._checker: GrammarChecker | None = None

    def encode(self, text: str, add_special_tokens: bool, truncate: int) -> list[int]:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Texts.encode`."""
        ids = self._tokenizer.encode(text, add_special_tokens)
        if not truncate or len(ids) <= truncate:
            return ids
        kept = 0
        if add_special_tokens:
            special = self._tokenizer.special_ids
            added = len(ids) - len(self._tokenizer.encode(text, add_special_tokens=False))
            while kept < min(added, truncate - 1) and ids[kept] in special:
                kept += 1
        return ids[:kept] + ids[kept - truncate :]

    def surface(self, token_id: int) -> str:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Texts.surface`."""
        return self._tokenizer.surface(token_id)

    def output(self, prompt_ids: Sequence[int], stop_sequences: Sequence[str]) -> StoppedText:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Texts.output`."""
        return StoppedText(self._tokenizer, prompt_ids, stop_sequences)

    def grammar(self, kind: str, source: str) -> str:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Texts.grammar`."""
        asked = grammar.native({"type": kind, "value": source})
        if self._checker is None:
            self._checker = GrammarChecker(self._tokenizer, self._ends)
        try:
            return asyncio.run(self._checker.compile(asked))
        except WorkersBusy:
            raise ValueError("too many grammars are being compiled") from None

    def close(self) -> None:
        """See :meth:`tgi_cli.tgi_grpc.text_interface.Texts.close`."""
        if self._checker is not None:
            self._checker.close()


def load_texts(model_path: Path, trust_remote_code: bool, info: EngineInfo) -> ModelTexts:
    """Those of a model's folder. Raises ModelError."""
    return ModelTexts(Tokenizer.load(model_path, trust_remote_code), info.eos_token_ids)
