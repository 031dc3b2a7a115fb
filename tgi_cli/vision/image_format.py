"""How the images of a model are written in its prompts.

An image is one placeholder in the text that a chat template renders. The placeholder is replaced
by the image's own text, in which one token is repeated for each row of the encoder's output. The
text is tokenized with one such token per run, and the token's id is repeated afterwards: around a
run the tokenizer sees what it would see in the whole text, and a prompt of 100,000 rows costs what
its words cost. Texts cannot be tokenized in parts and joined, as Gemma's ``\\n\\n`` around an image
is one token with the line ends beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError
from tgi_cli.vision.images import ImageError, PromptPiece

Span = tuple[int, int]
"""First position and number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFormat:
    """How the images of a model are written in its prompts; JSON values only.

    Attributes:
        family: Key of the preprocessing, such as ``qwen2_vl``.
        placeholder: What stands for one image in a prompt, and is replaced by its text.
        text: What to write for an image where no chat template does: the placeholder, and the
            tokens around it that templates write and preprocessing does not.
        row_token: The token that stands for a row.
        placeholder_id: Its id.
        tokens: Other tokens within the text of an image, by the names of :mod:`.model_formats`.
        boundary: Begins and ends an image, once between two that are adjacent, and is followed by a
            blank where a word would be (Idefics 2's ``<fake_token_around_image>``).
        behind_images: Follows the last image of a prompt (PaliGemma's ``<bos>``).
        at_end: Ends a prompt with images (PaliGemma's line end).
        special_tokens: Whether the tokenizer adds its special tokens to a prompt with images.
        prompt_bidirectional: All tokens of a prompt with images attend to each other (PaliGemma).
    """

    family: str
    placeholder: str
    text: str
    row_token: str
    placeholder_id: int
    tokens: Mapping[str, str] = field(default_factory=dict)
    boundary: str = ""
    behind_images: str = ""
    at_end: str = ""
    special_tokens: bool = True
    prompt_bidirectional: bool = False

    def write(self, text: str, images: Sequence[Sequence[PromptPiece]]) -> str:
        """The text to tokenize: placeholders replaced, with one token for each run of rows.

        Args:
            text: A prompt with one placeholder for each image.
            images: The replacements of its images, in their order.

        Raises:
            ImageError: The prompt has another number of placeholders.
        """
        count = text.count(self.placeholder)  # a text may have millions, which are not split
        if count != len(images):
            raise ImageError(
                f"the prompt has {count} placeholders of images, "
                f"but the request has {len(images)} images"
            )
        if not images:
            return text
        first, *others = text.split(self.placeholder)
        written = [first]
        for image, following in zip(images, others, strict=True):
            written += (piece.text for piece in image)
            written.append(following)
        written.insert(-1, self.behind_images)
        whole = "".join((*written, self.at_end))
        return self._with_boundaries(whole) if self.boundary else whole

    def _with_boundaries(self, text: str) -> str:
        single = text.replace(self.boundary * 2, self.boundary)
        return re.sub(
            rf"{re.escape(self.boundary)}(?=[^\s<])", lambda found: f"{found[0]} ", single
        )

    def repeat(
        self, ids: Sequence[int], images: Sequence[Sequence[PromptPiece]]
    ) -> tuple[list[int], tuple[tuple[Span, ...], ...]]:
        """The prompt's ids with one for each row, and the spans of rows of each image.

        Args:
            ids: Token ids of the text that :meth:`write` returned.
            images: As there.

        Raises:
            ImageError: The text has other tokens of this kind.
        """
        counts = [[piece.rows for piece in image if piece.rows] for image in images]
        token = self.placeholder_id
        ids = list(ids)
        if ids.count(token) != sum(map(len, counts)):
            raise ImageError("the text of the prompt contains the token that stands for images")
        found: list[int] = []
        spans: list[tuple[Span, ...]] = []
        start = 0
        for runs in counts:
            own: list[Span] = []
            for rows in runs:
                index = ids.index(token, start)
                found += ids[start:index]
                own.append((len(found), rows))
                found += [token] * rows
                start = index + 1
            spans.append(tuple(own))
        return found + ids[start:], tuple(spans)


def expand(
    text: str,
    images: Sequence[Sequence[PromptPiece]],
    image_format: ImageFormat,
    tokenize: Callable[[str], Sequence[int]],
) -> tuple[list[int], tuple[tuple[Span, ...], ...]]:
    """Token ids of a prompt with images, and the spans of rows of each image.

    Args:
        text: A prompt with one placeholder for each image.
        images: The replacements of its images, in their order.
        tokenize: Token ids of a text.

    Raises:
        ImageError: The text does not fit the images.
    """
    return image_format.repeat(tokenize(image_format.write(text, images)), images)


def renders_images(template: ChatTemplate, image_format: ImageFormat) -> bool:
    """Whether a chat template writes the placeholder for a part ``{"type": "image"}``.

    Others expect strings, or were written for models without images: the caller puts
    ``ImageFormat.text`` into the message's text.

    Raises:
        WorkersBusy, WorkerError: As :meth:`ChatTemplate.render`.
    """
    words = "Probe of images."
    parts = [{"type": "image"}, {"type": "text", "text": words}]
    try:
        text = template.render([{"role": "user", "content": parts}])
    except ChatTemplateError:
        return False
    return words in text and text.count(image_format.placeholder) == 1
