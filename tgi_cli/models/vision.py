"""The part of a model that turns an image into the vectors that stand for it in a text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tgi_cli.models.weight_map import Source


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The features of one image.

    Attributes:
        rows: [N, hidden], one for each of the image's placeholder tokens, in their order. They
            replace the tokens' embeddings after any factor of these.
        deepstack: each [N, hidden], added to the output of the first decoder layers in turn.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()


class PausePoints:
    """The points within a tower's layers at which a run may be interrupted.

    Callers with little time set ``check``, which is then called some milliseconds of work apart, on
    the thread of the run.
    """

    def __init__(self) -> None:
        self.check: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Called at such a point."""
        if self.check is not None:
            self.check()


class VisionTower(nn.Module):
    """An image encoder and its projector to the decoder's width, for inference only.

    Part of a :class:`~tgi_cli.models.CausalLM`, whose loader fills it. Every shard has all of it.

    Attributes:
        pauses: where :meth:`encode` may be interrupted within layers; used on a CPU alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pauses = PausePoints()

    @abstractmethod
    def encode(self, tensors: Mapping[str, Tensor], num_rows: int | None) -> ImageFeatures:
        """Encode one image. A result never depends on other images.

        Args:
            tensors: outputs of the family's image processor for this image alone, by name
                (``pixel_values``, ``image_grid_thw`` and such), on any device; floating-point
                numbers in any dtype.
            num_rows: placeholder tokens of the image; None for any number.

        Raises:
            ValueError: ``tensors`` are not an image of this model, or it has another number of
                rows.
        """

    @abstractmethod
    def largest(self, max_rows: int) -> Mapping[str, Any]:
        """The arguments of :meth:`encode` for an image of any content: to measure its cost.

        It is the largest image of about ``max_rows`` tokens at most, or the smallest one if all
        images of the family take more.
        """

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Modules that :meth:`encode` calls in turn, between which a caller may let it pause.

        They are the tower's blocks, which do nearly all of its work.
        """

    @property
    def parts(self) -> int:
        """Equal parts into which a run should be divisible: one for each layer, or more for a
        tower that encodes the tiles of an image one after the other."""
        return len(self.layers)

    def calls(self, tensors: Mapping[str, Any]) -> int:
        """How often :meth:`encode` calls its :attr:`layers` for an image, at most: once each, or
        once for each of its tiles."""
        return len(self.layers)

    @abstractmethod
    def source(self, name: str) -> Source:
        """Where the checkpoint has the tensor that the tower calls ``name``."""
