"""Whether a server gives a model images, and if not, why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models.image_support import image_refusal, is_for_images
from tgi_cli.text.tokenizer import Tokenizer, read_json
from tgi_cli.vision.limits import ImageLimits
from tgi_cli.vision.model_formats import image_format
from tgi_cli.vision.prompts import ImageReader

logger = logging.getLogger(__name__)

_REFUSAL = "this model takes no images: "


@dataclass(frozen=True, slots=True)
class Vision:
    """The images of one model.

    Attributes:
        reader: Reads them, or None if the model gets none.
        reason: Why it gets none although it is one for images; empty for other models.
    """

    reader: ImageReader | None = None
    reason: str = ""

    @property
    def expected(self) -> bool:
        """Whether the model is one for images, even if it gets none."""
        return self.reader is not None or bool(self.reason)


TEXT_ONLY = Vision()
"""The vision of a text model: none."""


def load_vision(
    folder: Path, tokenizer: Tokenizer, limits: ImageLimits, info: EngineInfo
) -> Vision:
    """Start reading images for a model if its engine takes them; blocks for seconds.

    Raises:
        ModelError: A file of the model cannot be read.
        WorkerError: No process can be started.
    """
    config = read_json(folder / "config.json")
    architecture = _architecture(config)
    if not is_for_images(architecture, config):
        if limits.fetches or limits.allowed_local_media_path is not None:
            logger.warning("the settings of images have no effect: this model takes text only")
        return TEXT_ONLY
    try:
        if reason := image_refusal(architecture, config):
            raise UnsupportedModelError(reason)
        found = image_format(folder, tokenizer)
        if not info.vision:
            return Vision(reason="the model server has not loaded its image encoder")
        from tgi_cli.vision.service import ImageService  # brings httpx

        service = ImageService(
            folder,
            found,
            limits,
            max_rows=info.max_image_rows or None,
            dtype=info.dtype,
        )
    except UnsupportedModelError as error:
        reason = error.cause.removeprefix(_REFUSAL)
        logger.warning("%s%s%s", _REFUSAL, reason, f" ({error.remedy})" if error.remedy else "")
        return Vision(reason=reason)
    if service.note:
        logger.info(service.note)
    return Vision(ImageReader(found, service, limits.max_images))


def _architecture(config: Mapping[str, Any]) -> str:
    """The first of a checkpoint's architectures, or nothing."""
    stated = config.get("architectures")
    return str(stated[0]) if isinstance(stated, list) and stated else ""
