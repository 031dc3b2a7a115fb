"""Makes the image processor of a model, for the process that preprocesses.

transformers' image processors for Pillow and numpy do the work, so torchvision is not needed. Their
results are those of transformers' processors, where these run without torchvision.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.process.installation import install_command
from tgi_cli.text.tokenizer import read_json
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageProcessor
from tgi_cli.vision.preprocessing.anyres import LlavaNextPreprocessor, LlavaOnevisionPreprocessor
from tgi_cli.vision.preprocessing.base import Preprocessor, Setup
from tgi_cli.vision.preprocessing.fixed import (
    Gemma3Preprocessor,
    JanusPreprocessor,
    LlavaPreprocessor,
    PaliGemmaPreprocessor,
    SquarePreprocessor,
)
from tgi_cli.vision.preprocessing.grids import GridPreprocessor, PaddleOcrPreprocessor
from tgi_cli.vision.preprocessing.ragged import (
    Gemma4Preprocessor,
    LightOnOcrPreprocessor,
    PixtralPreprocessor,
)
from tgi_cli.vision.preprocessing.tiles import (
    AyaVisionPreprocessor,
    Idefics2Preprocessor,
    Idefics3Preprocessor,
    InternVLPreprocessor,
)
from tgi_cli.vision.preprocessing.values import DTYPES

_FAMILIES: dict[str, type[Preprocessor]] = {
    "aya_vision": AyaVisionPreprocessor,
    "deepseek_vl": SquarePreprocessor,
    "gemma3": Gemma3Preprocessor,
    "gemma4": Gemma4Preprocessor,
    "glm4v": GridPreprocessor,
    "idefics2": Idefics2Preprocessor,
    "idefics3": Idefics3Preprocessor,
    "internvl": InternVLPreprocessor,
    "janus": JanusPreprocessor,
    "lighton_ocr": LightOnOcrPreprocessor,
    "llava": LlavaPreprocessor,
    "llava_next": LlavaNextPreprocessor,
    "llava_onevision": LlavaOnevisionPreprocessor,
    "paddleocr_vl": PaddleOcrPreprocessor,
    "paligemma": PaliGemmaPreprocessor,
    "pixtral": PixtralPreprocessor,
    "qwen2_vl": GridPreprocessor,
}
_NO_LIMIT = 1 << 40


def hide_torch() -> None:
    """Keep transformers from importing torch, unless it is imported: 1 s and 200 MB a process."""
    for name in ("torch", "torchvision"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def image_processor(
    folder: Path, image_format: ImageFormat, max_rows: int | None = None, dtype: str = "float32"
) -> ImageProcessor:
    """The image processor of a checkpoint's folder.

    Takes a second for the first import of transformers.

    Args:
        image_format: Format of the checkpoint (:func:`.model_formats.image_format`).
        max_rows: Shrink images to as many rows by the processor's own settings. Images of families
            that have one size, or a smallest one, may take more.
        dtype: Of ``pixel_values``: float16, bfloat16, which is returned as uint16, or else float32.

    Raises:
        UnsupportedModelError: Pillow is not installed, or the processor cannot be used.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedModelError(
            "this model takes no images: Pillow is not installed", install_command("vision")
        )
    setup = Setup(
        processor=_load(folder),
        image_format=image_format,
        config=read_json(folder / "config.json"),
        max_rows=_NO_LIMIT if max_rows is None else max(1, max_rows),
        dtype=dtype if dtype in DTYPES else "float32",
    )
    try:
        return _FAMILIES[image_format.family](setup)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unusable(error) from error


def _load(folder: Path) -> Any:
    """transformers' image processor of a folder, for Pillow and numpy."""
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor  # untyped
    try:
        processor = loader.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises any kind for files that it cannot use
        raise _unusable(error) from error
    if getattr(processor, "backend", None) != "pil":
        raise UnsupportedModelError(
            "this model takes no images: its image processor requires torchvision"
        )
    return processor


def _unusable(error: Exception) -> UnsupportedModelError:
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return UnsupportedModelError(
        f"this model takes no images: its image processor cannot be used: {cause}",
        "download the model's files again",
    )
