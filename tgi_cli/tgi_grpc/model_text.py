"""The text side of a model, for callers of TGI's own services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.process.worker_pool import WorkersBusy
from tgi_cli.text.grammar import grammar
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.images import ImagePart
from tgi_cli.text.sequence_text import CutAt, SequenceText
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import special_affixes
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.load import TEXT_ONLY, Vision, load_vision
from tgi_cli.vision.prompts import (
    MOST_TOKENS,
    ImagePrompt,
    PromptTooLongError,
    bounded_tokenize,
    encode_prompt,
)


class ModelText:
    """Encodes prompts, compiles grammars and makes the text of outputs for one model.

    Any thread may call any method, one at a time.

    Args:
        tokenizer: Tokenizer of the model.
        eos_token_ids: Ids that end a text.
        load_vision: Starts reading images, for the first prompt with any.

    Attributes:
        special_ids: Tokens that add nothing to the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        load_vision: Callable[[], Vision] = lambda: TEXT_ONLY,
    ) -> None:
        self.special_ids = tokenizer.special_ids | frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._checker: GrammarChecker | None = None
        self._load_vision = load_vision
        self._loaded_vision: Vision | None = None

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

    @property
    def vision(self) -> Vision:
        """The images of the model; blocks for seconds the first time. Raises TgiError."""
        if self._loaded_vision is None:
            self._loaded_vision = self._load_vision()
        return self._loaded_vision

    def encode_with_images(
        self, pieces: Sequence[str | ImagePart], add_special_tokens: bool, truncate: int
    ) -> ImagePrompt:
        """As :meth:`encode`, of a prompt in pieces.

        Raises:
            ValueError: The model takes no images, or not these.
            TgiError: No process can read them.
        """
        reader = self.vision.reader
        if reader is None:
            reason = self.vision.reason
            words = f"takes none here: {reason}" if reason else "takes text only"
            raise ValueError(f"it has an image, and the model {words}")
        written = reader.image_format
        special = add_special_tokens and written.special_tokens
        images = [piece for piece in pieces if isinstance(piece, ImagePart)]
        processed = asyncio.run(reader.read(images))
        text = "".join(piece if isinstance(piece, str) else written.text for piece in pieces)
        tokenize = bounded_tokenize(self._tokenizer, special, MOST_TOKENS)
        try:
            prompt = encode_prompt(text, processed, written, tokenize)
        except PromptTooLongError as error:
            raise ValueError(f"the prompt has {error}") from None
        front = len(special_affixes(self._tokenizer)[0]) if special and truncate else 0
        return prompt.last(truncate, min(front, truncate - 1)) if truncate else prompt

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
        """End the processes that compile grammars and read images. May be called twice."""
        if self._checker is not None:
            self._checker.close()
        if self._loaded_vision is not None and self._loaded_vision.reader is not None:
            self._loaded_vision.reader.close()


def load_model_text(model_path: Path, trust_remote_code: bool, info: EngineInfo) -> ModelText:
    """The text side of a model folder. Raises ModelError.

    Images must be in the requests: callers fetch them, as TGI's router does.
    """
    tokenizer = Tokenizer.load(model_path, trust_remote_code)
    vision = partial(load_vision, model_path, tokenizer, ImageLimits(), info)
    return ModelText(tokenizer, info.eos_token_ids, vision)
