"""Which models take images, and how their prompts are written.

Reads the JSON files of a checkpoint's folder alone, so that the router need not import
transformers. Tokens are found by the ids in config.json, or by the names that transformers'
processors give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.text.tokenizer import Tokenizer, read_json
from tgi_cli.vision.image_format import ImageFormat

_OF_LLAVAS_KIN = {"llava_next_video": "llava_next", "vipllava": "llava"}
"""Model types whose images are preprocessed as those of others."""

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def image_format(folder: Path, tokenizer: Tokenizer) -> ImageFormat:
    """How a checkpoint's prompts write images.

    Raises:
        UnsupportedModelError: The model takes no images; the cause is the reason.
        ModelError: A file cannot be read.
    """
    files = CheckpointFiles(folder, tokenizer)
    kind = files.model_type
    build = _FORMATS.get(kind)
    if build is None:
        raise _refused(f"models of the type `{kind}` have no supported image encoder")
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        raise _refused(
            f"its folder has no {_PROCESSOR_FILES[0]}", "download the model's files again"
        )
    return build(files)


class CheckpointFiles:
    """The JSON files of a folder that describe its images.

    Attributes:
        config: config.json.
        vision: Its part for the image encoder.
        model_type: Type of the whole model.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.config = read_json(folder / "config.json")
        self.vision = mapping(self.config.get("vision_config"))
        self.model_type = str(self.config.get("model_type", ""))
        self._tokenizer = tokenizer
        names = read_json(folder / "tokenizer_config.json")
        for key in ("extra_special_tokens", "model_specific_special_tokens"):
            names |= mapping(names.get(key))
        self._names: dict[str, Any] = names
        self._processor = read_json(folder / "processor_config.json")

    def row_token(self, *texts: str) -> tuple[str, int]:
        """Text and id of the token that stands for a row.

        Args:
            texts: What it may be if config.json does not state it.

        Raises:
            UnsupportedModelError: The tokenizer has no such token.
        """
        index = self.config.get("image_token_id", self.config.get("image_token_index"))
        known = self.text_of(index)
        for text in (known, *texts) if known else texts:
            found = self._tokenizer.backend.token_to_id(text)
            if found is not None and found in self._tokenizer.added_ids:
                return text, found
        raise _refused(
            "its tokenizer has no token for images", "use the tokenizer.json of the model's author"
        )

    def text_of(self, index: Any) -> str:
        """The text of a token id; empty if there is none."""
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            return ""
        return self._tokenizer.backend.id_to_token(index) or ""

    def token(self, text: str, *, index: str = "", name: str = "") -> str:
        """The text of another token.

        Args:
            text: If the files do not state it.
            index: Key of its id in config.json.
            name: Key of its text in tokenizer_config.json or processor_config.json.
        """
        for named in (self._names.get(name), self._processor.get(name)) if name else ():
            content = named.get("content") if isinstance(named, Mapping) else named
            if isinstance(content, str) and content:
                return content
        return self.text_of(self.config.get(index)) or text

    @property
    def bos_token(self) -> str:
        """The token that begins a text."""
        return self._tokenizer.bos_token or "<bos>"


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Tower:
    """An image encoder of LLaVA's kin, with the defaults of transformers' classes.

    Attributes:
        class_tokens: Rows beside those of patches.
        patch: Side of a patch in pixels.
        strategy: ``vision_feature_select_strategy``: ``default`` drops the first row.
    """

    class_tokens: int
    patch: int
    strategy: str


def llava_tower(config: Mapping[str, Any]) -> Tower | None:
    """The image encoder of a LLaVA; None if it is not supported."""
    onevision = config.get("model_type") == "llava_onevision"
    default = "siglip_vision_model" if onevision else "clip_vision_model"
    strategy = "full" if onevision else "default"
    kind = mapping(config.get("vision_config")).get("model_type", default)
    if kind == "clip_vision_model":
        return Tower(1, 32, strategy)
    return Tower(0, 16, strategy) if kind == "siglip_vision_model" else None


def _refused(reason: str, remedy: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(f"this model takes no images: {reason}", remedy)


def _format(family: str, row: tuple[str, int], **others: Any) -> ImageFormat:
    """A format whose placeholder is the token of rows, unless told otherwise."""
    text, index = row
    given = {"placeholder": text, "text": text, **others}
    return ImageFormat(family=family, row_token=text, placeholder_id=index, **given)


def _qwen(files: CheckpointFiles) -> ImageFormat:
    row = files.row_token("<|image_pad|>")
    start = files.token("<|vision_start|>", index="vision_start_token_id")
    end = files.token("<|vision_end|>", index="vision_end_token_id")
    return _format("qwen2_vl", row, text=start + row[0] + end)


def _paddleocr(files: CheckpointFiles) -> ImageFormat:
    row = files.row_token("<|IMAGE_PLACEHOLDER|>")
    start = files.token("<|IMAGE_START|>", index="vision_start_token_id")
    end = files.token("<|IMAGE_END|>", index="vision_end_token_id")
    return _format("paddleocr_vl", row, text=start + row[0] + end)


def _patch_grid(files: CheckpointFiles) -> ImageFormat:
    """As Qwen's, with tokens around an image that only the chat template knows."""
    return _format("qwen2_vl", files.row_token("<|image_pad|>"))


def _glm(files: CheckpointFiles) -> ImageFormat:
    row = files.row_token("<|image|>")
    start = files.token("<|begin_of_image|>", index="image_start_token_id")
    end = files.token("<|end_of_image|>", index="image_end_token_id")
    return _format("glm4v", row, text=start + row[0] + end)


def _idefics2(files: CheckpointFiles) -> ImageFormat:
    fake = files.token("<fake_token_around_image>", name="fake_image_token")
    return _format("idefics2", files.row_token("<image>"), tokens={"fake": fake}, boundary=fake)


def _idefics3(files: CheckpointFiles) -> ImageFormat:
    tokens = {
        "fake": files.token("<fake_token_around_image>", name="fake_image_token"),
        "global": files.token("<global-img>", name="global_image_token"),
    }
    return _format("idefics3", files.row_token("<image>"), tokens=tokens)


def _pixtral(files: CheckpointFiles) -> ImageFormat:
    tokens = {
        "break": files.token("[IMG_BREAK]", name="image_break_token"),
        "end": files.token("[IMG_END]", name="image_end_token"),
    }
    return _format("pixtral", files.row_token("[IMG]"), tokens=tokens)


def _lighton_ocr(files: CheckpointFiles) -> ImageFormat:
    return _format("lighton_ocr", files.row_token("<|image_pad|>"))


def _llava(files: CheckpointFiles) -> ImageFormat:
    kind = files.vision.get("model_type")
    if kind == "pixtral":
        return _pixtral(files)
    if llava_tower(files.config) is None:
        raise _refused(f"image encoders of the type `{kind}` are not supported")
    family = _OF_LLAVAS_KIN.get(files.model_type, files.model_type)
    return _format(family, files.row_token("<image>"))


def _internvl(files: CheckpointFiles) -> ImageFormat:
    tokens = {
        "start": files.token("<img>", name="start_image_token"),
        "end": files.token("</img>", name="end_image_token"),
    }
    return _format("internvl", files.row_token("<IMG_CONTEXT>"), tokens=tokens)


def _qianfan_ocr(files: CheckpointFiles) -> ImageFormat:
    # Templates write a word in place of each image.
    return replace(_internvl(files), placeholder="<image>", text="<image>")


def _aya_vision(files: CheckpointFiles) -> ImageFormat:
    tokens = {
        "start": files.token("<|START_OF_IMG|>", name="start_of_img_token"),
        "end": files.token("<|END_OF_IMG|>", name="end_of_img_token"),
        "tile": files.token("TILE", name="tile_token"),
        "global": files.token("TILE_GLOBAL", name="tile_global_token"),
    }
    row = files.row_token("<|IMG_PATCH|>")
    return _format("aya_vision", row, placeholder="<image>", text="<image>", tokens=tokens)


def _deepseek_vl(files: CheckpointFiles) -> ImageFormat:
    return _format("deepseek_vl", files.row_token("<image_placeholder>"))


def _janus(files: CheckpointFiles) -> ImageFormat:
    tokens = {
        "start": files.token("<begin_of_image>", name="boi_token"),
        "end": files.token("<end_of_image>", name="eoi_token"),
    }
    return _format("janus", files.row_token("<image_placeholder>"), tokens=tokens)


def _gemma3(files: CheckpointFiles) -> ImageFormat:
    # Templates write the token that begins an image, which is not the one of its rows.
    start = files.token("<start_of_image>", index="boi_token_index", name="boi_token")
    end = files.token("<end_of_image>", index="eoi_token_index", name="eoi_token")
    return _format(
        "gemma3",
        files.row_token("<image_soft_token>"),
        placeholder=start,
        text=start,
        tokens={"start": start, "end": end},
    )


def _gemma4(files: CheckpointFiles) -> ImageFormat:
    tokens = {
        "start": files.token("<|image>", index="boi_token_id", name="boi_token"),
        "end": files.token("<image|>", index="eoi_token_id", name="eoi_token"),
    }
    return _format("gemma4", files.row_token("<|image|>"), tokens=tokens)


def _paligemma(files: CheckpointFiles) -> ImageFormat:
    return _format(
        "paligemma",
        files.row_token("<image>"),
        behind_images=files.bos_token,
        at_end="\n",
        special_tokens=False,
        prompt_bidirectional=True,
    )


_FORMATS: dict[str, Callable[[CheckpointFiles], ImageFormat]] = {
    "aya_vision": _aya_vision,
    "deepseek_vl": _deepseek_vl,
    "exaone4_5": _patch_grid,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm46v": _glm,
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "glm_ocr": _glm,
    "hyperclovax_vision_v2": _patch_grid,
    "idefics2": _idefics2,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "janus": _janus,
    "lfm3_vl": _qwen,
    "lighton_ocr": _lighton_ocr,
    "llava": _llava,
    "llava_next": _llava,
    "llava_next_video": _llava,
    "llava_onevision": _llava,
    "mistral3": _pixtral,
    "paddleocr_vl": _paddleocr,
    "paligemma": _paligemma,
    "qianfan_ocr": _qianfan_ocr,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "smolvlm": _idefics3,
    "vipllava": _llava,
}
MODEL_TYPES = frozenset(_FORMATS)
"""``model_type`` of the checkpoints whose images can be processed."""
