"""The images of requests: whether the model takes them, and prompts with them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence

from tgi_cli.process.worker_pool import WorkerError, WorkersBusy
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.http import errors
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.images import ImagePart
from tgi_cli.text.spans import Spans, repeated
from tgi_cli.text.workers import TextWorkers
from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.image_format import ImageFormat, renders_images
from tgi_cli.vision.images import ImageError, ProcessedImage
from tgi_cli.vision.load import Vision
from tgi_cli.vision.prompts import (
    MOST_TOKENS,
    ImagePrompt,
    bounded_tokenize,
    encode_prompt,
    renders_result_images,
    run_lengths,
    written_prompt,
)

_TEXT_ONLY = "it takes text only"


class PromptImageLoader:
    """Prompts with images, of one model.

    Args:
        text: Tokenizer and chat template of the model.
        workers: Threads for texts.
        admission: Tells clients of an overloaded server when to try again.
        vision: Reads its images, or tells why it takes none.

    Attributes:
        in_parts: The chat template writes an image for a part of a message. Otherwise put the text
            for an image into the message.
        in_results: It does so in results of tools.
    """

    def __init__(
        self,
        text: TextBundle,
        workers: TextWorkers,
        admission: ConcurrencyLimiter,
        vision: Vision,
    ) -> None:
        self._tokenizer = text.tokenizer
        self._workers = workers
        self._admission = admission
        self._vision = vision
        self._reader = reader = vision.reader
        template = text.chat_template
        self.in_parts = self.in_results = False
        if reader is not None and template is not None:
            self.in_parts = renders_images(template, reader.image_format)
            self.in_results = renders_result_images(template, reader.image_format)

    @property
    def supported(self) -> bool:
        """Whether the model takes images."""
        return self._reader is not None

    @property
    def expected(self) -> bool:
        """Whether the model is one for images, even if this server gives it none."""
        return self._vision.expected

    @property
    def image_format(self) -> ImageFormat:
        """How the model's prompts write images. Only of a model that takes images."""
        assert self._reader is not None
        return self._reader.image_format

    def require(self, kind: str, param: str) -> None:
        """Refuse parts of the type ``kind`` if the model takes no images. Raises ApiError."""
        if self._reader is None:
            raise errors.validation(
                f"content of type `{kind}` is not supported by this model: "
                f"{self._vision.reason or _TEXT_ONLY}",
                param,
            )

    def check(self, images: Sequence[ImagePart], param: str) -> None:
        """Check what does not need the images themselves. Raises ApiError."""
        if images and self._reader is not None:
            try:
                self._reader.check(images)
            except ImageError as error:
                raise _refused(error, param) from None

    async def encode(self, spec: GenerationSpec, most: int) -> ImagePrompt:
        """Fetch, process and tokenize a prompt with images.

        Args:
            most: Tokens that it may have.

        Raises:
            ApiError: An image or the prompt is invalid.
            PromptTooLongError: It has more tokens.
            ModelError: The tokenizer fails on it.
        """
        processed = await self._read(spec.images, spec.prompt_param)
        if spec.truncate is not None:
            most = MOST_TOKENS
        tokenize = bounded_tokenize(self._tokenizer, self._special(spec), most)
        try:
            text = _text(spec)
            prompt = await self._workers.run(
                encode_prompt, text, processed, self.image_format, tokenize
            )
            return prompt if spec.truncate is None else prompt.last(spec.truncate)
        except ImageError as error:
            raise _refused(error, spec.prompt_param) from None

    async def write(
        self, prompt: str, images: list[ImagePart], param: str
    ) -> tuple[str, deque[int]]:
        """The text that is tokenized for a prompt, and how often its placeholders stand for a row.

        Raises ApiError, which names ``param``.
        """
        if not images:
            return prompt, deque()
        processed = await self._read(images, param)
        try:
            text = await self._workers.run(written_prompt, prompt, processed, self.image_format)
        except ImageError as error:
            raise _refused(error, param) from None
        return text, deque(run_lengths(processed))

    async def spans(
        self, text: str, add_special_tokens: bool, rows: deque[int]
    ) -> AsyncIterator[Spans]:
        """The tokens of a text that :meth:`write` returned; see :meth:`TextWorkers.spans`."""
        if not rows:
            async for window in self._workers.spans(text, add_special_tokens):
                yield window
            return
        special = add_special_tokens and self.image_format.special_tokens
        token = self.image_format.placeholder_id
        async for window in self._workers.spans(text, special):
            yield repeated(window, token, rows)

    async def count(self, spec: GenerationSpec) -> int:
        """Number of tokens of a prompt, rows of images included. Raises ApiError."""
        special = self._special(spec) if spec.images else spec.add_special_tokens
        text, rows = await self.write(_text(spec), spec.images, spec.prompt_param)
        return await self._workers.count(text, special) + sum(rows) - len(rows)

    def _special(self, spec: GenerationSpec) -> bool:
        return spec.add_special_tokens and self.image_format.special_tokens

    async def _read(self, images: list[ImagePart], param: str) -> list[ProcessedImage]:
        """The images of a prompt, whose sources are freed. Raises ApiError."""
        assert self._reader is not None
        try:
            return await self._reader.read(images)
        except ImageError as error:
            raise _refused(error, param) from None
        except WorkersBusy:
            raise self._admission.overloaded() from None
        except WorkerError as error:
            raise errors.engine_gone(error.cause) from error
        finally:
            images.clear()


def _text(spec: GenerationSpec) -> str:
    assert isinstance(spec.prompt, str)
    return spec.prompt


def _refused(error: ImageError, param: str) -> errors.ApiError:
    """The error of an image that cannot be fetched, read or placed."""
    if isinstance(error, MediaError):
        if error.unavailable:
            return errors.engine_gone(str(error))
        return errors.validation(str(error), param, error.code)
    return errors.validation(str(error), param)
