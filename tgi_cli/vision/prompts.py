"""Prompts with images: from what clients send to what the engine computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tgi_cli.engine.messages import ImageInput
from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError
from tgi_cli.text.conversation import adapt
from tgi_cli.text.images import ImageMarks, ImagePart
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.windowed_encoding import encode_in_windows, is_long
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageError, ProcessedImage, PromptPiece

DETAILS = (None, "auto", "low", "high", "original")
"""OpenAI's values of ``detail``."""
MOST_TOKENS = 1 << 18
"""Tokens of a prompt's text before it is truncated: 16 MB."""


_TOOL = {
    "name": "probe_tool",
    "description": "Probe.",
    "parameters": {
        "type": "object",
        "properties": {"probe": {"type": "string", "description": "Probe."}},
        "required": ["probe"],
    },
}


class Preprocessing(Protocol):
    """Fetches and preprocesses images: :class:`tgi_cli.vision.service.ImageService`."""

    async def process(self, images: Sequence[ImagePart]) -> list[ProcessedImage]:
        """Process the images of one prompt. Raises ImageError."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class PromptTooLongError(Exception):
    """A prompt has more tokens than it may have: at least ``tokens``."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images, as the engine takes it.

    Attributes:
        ids: Token ids, with the image token for each row of an image.
        images: In the order of their positions.
    """

    ids: list[int]
    images: tuple[ImageInput, ...]

    @property
    def highest_id(self) -> int:
        """The highest id of the text; that of rows of images may be beyond the vocabulary."""
        highest = start = 0
        for image in self.images:
            for first, count in image.spans:
                highest = max((highest, *self.ids[start:first]))
                start = first + count
        return max((highest, *self.ids[start:]))

    def last(self, count: int, front: int = 0) -> ImagePrompt:
        """The last ``count`` tokens, with the images in them.

        Args:
            front: So many of them are the first tokens instead.

        Raises:
            ImageError: An image would be cut.
        """
        removed = len(self.ids) - count
        if removed <= 0:
            return self
        kept = []
        for image in self.images:
            (first, _), (last, rows) = image.spans[0], image.spans[-1]
            if first < front + removed < last + rows:
                raise ImageError("the prompt cannot be truncated within an image")
            if first >= front + removed:
                spans = tuple((start - removed, length) for start, length in image.spans)
                kept.append(replace(image, spans=spans))
        return ImagePrompt(self.ids[:front] + self.ids[front + removed :], tuple(kept))


def encode_prompt(
    text: str,
    processed: Sequence[ProcessedImage],
    image_format: ImageFormat,
    tokenize: Callable[[str], Sequence[int]],
) -> ImagePrompt:
    """Tokenize a prompt that has a placeholder for each of its images.

    Raises:
        ImageError: It has more or fewer.
    """
    replacements = [image.replacement for image in processed]
    written = image_format.write(text, replacements)
    ids, spans = image_format.repeat(tokenize(written), replacements)
    images = tuple(
        ImageInput(
            digest=image.digest,
            spans=positions,
            tensors=image.tensors,
            grid=image.grid,
            bidirectional=image.bidirectional,
        )
        for image, positions in zip(processed, spans, strict=True)
    )
    return ImagePrompt(ids, images)


def bounded_tokenize(
    tokenizer: Tokenizer, add_special_tokens: bool, most: int
) -> Callable[[str], list[int]]:
    """Tokenizes a text in bounded memory.

    Args:
        most: Tokens that a long text may have; the result raises PromptTooLongError for more.
    """

    def tokenize(text: str) -> list[int]:
        if not is_long(text):
            return tokenizer.encode(text, add_special_tokens)
        ids: list[int] = []
        for window in encode_in_windows(tokenizer, text, add_special_tokens):
            ids += window.ids
            if len(ids) > most:
                raise PromptTooLongError(len(ids))
        return ids

    return tokenize


def run_lengths(processed: Sequence[ProcessedImage]) -> list[int]:
    """How often each placeholder token of the written prompt stands for a row, in order."""
    return [piece.rows for image in processed for piece in image.replacement if piece.rows]


def written_prompt(
    text: str, processed: Sequence[ProcessedImage], image_format: ImageFormat
) -> str:
    """The text to tokenize. Raises ImageError if its placeholders are not those of the images."""
    replacements: list[Sequence[PromptPiece]] = [image.replacement for image in processed]
    return image_format.write(text, replacements)


def renders_result_images(template: ChatTemplate, image_format: ImageFormat) -> bool:
    """Whether a chat template writes the placeholder for an image in the result of a tool."""
    traits = template.traits(True)
    if not (traits.calls and traits.results):
        return False
    words, marks = "Probe of a result.", ImageMarks()
    function = {"name": "probe_tool", "arguments": {"probe": "a"}}
    call = {"id": "call_0", "type": "function", "function": function}
    result = words + marks.add(ImagePart(b""))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Probe."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "call_0"},
    ]
    try:
        text = template.render(
            adapt(messages, traits),
            [{"type": "function", "function": _TOOL}],
            image_mark=marks.mark,
        )
    except ChatTemplateError:
        return False
    return words in text and text.count(image_format.placeholder) == 1


class ImageReader:
    """Reads the images of prompts for one model.

    Args:
        image_format: How images are written in its prompts.
        service: Fetches and preprocesses images.
        max_images: Images of one prompt.
    """

    def __init__(self, image_format: ImageFormat, service: Preprocessing, max_images: int) -> None:
        self.image_format = image_format
        self.service = service
        self._max_images = max_images

    def check(self, parts: Sequence[ImagePart]) -> None:
        """Check what can be checked without the images. Raises ImageError."""
        if len(parts) > self._max_images:
            raise ImageError(f"At most {self._max_images} image(s) may be provided in one prompt.")
        for part in parts:
            if part.detail not in DETAILS:
                raise ImageError("the detail of an image must be auto, low, high or original")

    async def read(self, parts: Sequence[ImagePart]) -> list[ProcessedImage]:
        """Fetch and process the images of one prompt. Raises ImageError."""
        self.check(parts)
        return await self.service.process(parts)

    def close(self) -> None:
        """End the processes; images in progress fail."""
        self.service.close()
