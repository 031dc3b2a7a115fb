"""What miniatures of models with images have beside their weights: tokenizer, image processor and
chat template; and transformers' own processors for them, which are the oracle.

transformers makes these processors only where torchvision is installed, for the sake of videos.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<bos>", "<eos>"
_LINES = ("Ċ", "ĊĊ", "ĊĊĊ", "ĊĊĊĊ")
"""Line ends as a byte-level vocabulary writes them: one token each, as in Gemma's."""

_CONTENT = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class ImageModel:
    """The parts of a miniature that concern images.

    Attributes:
        config: Keys of config.json.
        ids: Keys of config.json for ids of tokens.
        preprocessor: preprocessor_config.json.
        oracle: Module and name of transformers' processor.
        arguments: Of the latter.
        tokens: Added tokens, the one of rows first.
        names: Tokens by their names in tokenizer_config.json.
        written: What chat templates write for an image.
    """

    config: dict[str, Any]
    ids: dict[str, str]
    preprocessor: dict[str, Any]
    oracle: tuple[str, str]
    tokens: tuple[str, ...]
    written: str
    arguments: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


_CLIP = {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 28}
_SIGLIP = {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 28}
_TILES = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_LIGHTON = ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>")
_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_IDS = {
    "image_token_id": _QWEN[0],
    "vision_start_token_id": _QWEN[1],
    "vision_end_token_id": _QWEN[2],
}
_QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
_GLM = (
    *("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
_GLM_IDS = {
    "image_token_id": _GLM[0],
    "image_start_token_id": _GLM[1],
    "image_end_token_id": _GLM[2],
}
_GLM_TEXT = "<|begin_of_image|><|image|><|end_of_image|>"
_PADDLE = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>")
_SIDES = (28, 56, 84)


def _tiled(kind: str, name: str, processor: str) -> ImageModel:
    return ImageModel(
        config={
            "model_type": kind,
            "scale_factor": 2,
            "vision_config": {"patch_size": 14, "image_size": 56},
        },
        ids={"image_token_id": "<image>"},
        preprocessor={
            "image_processor_type": processor,
            "size": {"longest_edge": 224},
            "max_image_size": {"longest_edge": 56},
            "do_image_splitting": True,
        },
        oracle=(f"{kind}.processing_{kind}", name),
        arguments={"image_seq_len": 4},
        tokens=_TILES,
        written="<image>",
    )


def _pixtral(kind: str, patch: int, merge: int) -> ImageModel:
    vision = {"model_type": "pixtral", "patch_size": patch}
    return ImageModel(
        config={"model_type": kind, "vision_config": vision}
        | ({"spatial_merge_size": merge} if merge > 1 else {}),
        ids={"image_token_index": "[IMG]"},
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": patch, "width": patch},
        },
        oracle=("pixtral.processing_pixtral", "PixtralProcessor"),
        arguments={"patch_size": patch, "spatial_merge_size": merge},
        tokens=_PIXTRAL,
        written="[IMG]",
    )


def _qwen(kind: str, oracle: tuple[str, str], patch: int) -> ImageModel:
    block = (2 * patch) ** 2
    return ImageModel(
        config={"model_type": kind, "vision_config": {"patch_size": patch}},
        ids=_QWEN_IDS,
        preprocessor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 4 * block, "longest_edge": 48 * block},
        },
        oracle=oracle,
        tokens=_QWEN,
        written=_QWEN_TEXT,
    )


def _glm(kind: str, name: str, processor: str) -> ImageModel:
    return ImageModel(
        config={"model_type": kind, "vision_config": {"patch_size": 14}},
        ids=_GLM_IDS,
        preprocessor={
            "image_processor_type": processor,
            "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 2 * 64 * 28 * 28},
        },
        oracle=(f"{kind}.processing_{kind}", name),
        tokens=_GLM,
        written=_GLM_TEXT,
    )


IMAGE_MODELS: dict[str, ImageModel] = {
    "SmolVLM": _tiled("smolvlm", "SmolVLMProcessor", "SmolVLMImageProcessor"),
    "Idefics 3": _tiled("idefics3", "Idefics3Processor", "Idefics3ImageProcessor"),
    "Idefics 2": ImageModel(
        config={
            "model_type": "idefics2",
            "perceiver_config": {"resampler_n_latents": 4},
            "vision_config": {"patch_size": 14, "image_size": 56},
        },
        ids={"image_token_id": "<image>"},
        preprocessor={
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 28, "longest_edge": 56},
            "do_image_splitting": True,
        },
        oracle=("idefics2.processing_idefics2", "Idefics2Processor"),
        arguments={"image_seq_len": 4},
        tokens=_TILES[:2],
        written="<image>",
    ),
    "LLaVA 1.5": ImageModel(
        config={"model_type": "llava", "vision_config": _CLIP},
        ids={"image_token_index": "<image>"},
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
        oracle=("llava.processing_llava", "LlavaProcessor"),
        arguments={
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        tokens=("<image>",),
        written="<image>",
    ),
    "LLaVA-NeXT": ImageModel(
        config={"model_type": "llava_next", "vision_config": _CLIP},
        ids={"image_token_index": "<image>"},
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        },
        oracle=("llava_next.processing_llava_next", "LlavaNextProcessor"),
        arguments={
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        tokens=("<image>",),
        written="<image>",
    ),
    "LLaVA-OneVision": ImageModel(
        config={
            "model_type": "llava_onevision",
            "vision_config": _SIGLIP,
            "vision_aspect_ratio": "anyres_max_4",
        },
        ids={"image_token_index": "<image>"},
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[height, width] for height in _SIDES for width in _SIDES],
        },
        oracle=("llava_onevision.processing_llava_onevision", "LlavaOnevisionProcessor"),
        arguments={
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        tokens=("<image>", "<video>"),
        written="<image>",
    ),
    "Mistral 3": _pixtral("mistral3", 14, 2),
    "Pixtral": _pixtral("llava", 16, 1),
    "LightOnOCR": ImageModel(
        config={
            "model_type": "lighton_ocr",
            "vision_config": {"model_type": "pixtral", "patch_size": 14},
        },
        ids={"image_token_id": _LIGHTON[0]},
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": 28, "width": 28},
        },
        oracle=("lighton_ocr.processing_lighton_ocr", "LightOnOcrProcessor"),
        arguments={"patch_size": 14, "spatial_merge_size": 2},
        tokens=_LIGHTON,
        names={
            "image_token": _LIGHTON[0],
            "image_break_token": _LIGHTON[1],
            "image_end_token": _LIGHTON[2],
        },
        written=_LIGHTON[0],
    ),
    "DeepSeek-VL": ImageModel(
        config={"model_type": "deepseek_vl", "vision_config": {"patch_size": 14}},
        ids={"image_token_id": "<image_placeholder>"},
        preprocessor={
            "image_processor_type": "DeepseekVLImageProcessor",
            "size": {"height": 28, "width": 28},
        },
        oracle=("deepseek_vl.processing_deepseek_vl", "DeepseekVLProcessor"),
        arguments={"num_image_tokens": 4},
        tokens=("<image_placeholder>",),
        names={"image_token": "<image_placeholder>"},
        written="<image_placeholder>",
    ),
    "Janus": ImageModel(
        config={"model_type": "janus", "vision_config": {"patch_size": 14}},
        ids={"image_token_id": "<image_placeholder>"},
        preprocessor={
            "image_processor_type": "JanusImageProcessor",
            "size": {"height": 28, "width": 28},
        },
        oracle=("janus.processing_janus", "JanusProcessor"),
        arguments={"num_image_tokens": 4},
        tokens=("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        names={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        written="<image_placeholder>",
    ),
    "Aya Vision": ImageModel(
        config={
            "model_type": "aya_vision",
            "downsample_factor": 2,
            "vision_config": {"patch_size": 14},
        },
        ids={"image_token_index": "<|IMG_PATCH|>"},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 56, "width": 56},
            "max_patches": 6,
        },
        oracle=("aya_vision.processing_aya_vision", "AyaVisionProcessor"),
        arguments={"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        tokens=("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", "TILE"),
        written="<image>",
    ),
    "Qianfan-OCR": ImageModel(
        config={"model_type": "qianfan_ocr", "vision_config": {"patch_size": [14, 14]}},
        ids={"image_token_id": "<IMG_CONTEXT>"},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 56, "width": 56},
            "max_patches": 6,
        },
        oracle=("qianfan_ocr.processing_qianfan_ocr", "QianfanOCRProcessor"),
        arguments={"image_seq_length": 4},
        tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
        names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        written="<image>",
    ),
    "InternVL": ImageModel(
        config={
            "model_type": "internvl",
            "vision_config": {"patch_size": [14, 14]},
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 56, "width": 56},
            "max_patches": 6,
        },
        oracle=("internvl.processing_internvl", "InternVLProcessor"),
        arguments={"image_seq_length": 4},
        tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        written="<IMG_CONTEXT>\n",
    ),
    "PaddleOCR-VL": ImageModel(
        config={"model_type": "paddleocr_vl", "vision_config": {"patch_size": 14}},
        ids={
            "image_token_id": _PADDLE[0],
            "vision_start_token_id": _PADDLE[1],
            "vision_end_token_id": _PADDLE[2],
        },
        preprocessor={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 48 * 28 * 28},
        },
        oracle=("paddleocr_vl.processing_paddleocr_vl", "PaddleOCRVLProcessor"),
        tokens=_PADDLE,
        names={"image_token": _PADDLE[0]},
        written="".join((_PADDLE[1], _PADDLE[0], _PADDLE[2])),
    ),
    "Qwen2-VL": _qwen("qwen2_vl", ("qwen2_vl.processing_qwen2_vl", "Qwen2VLProcessor"), 14),
    "Qwen2.5-VL": _qwen(
        "qwen2_5_vl", ("qwen2_5_vl.processing_qwen2_5_vl", "Qwen2_5_VLProcessor"), 14
    ),
    "Qwen3-VL": _qwen("qwen3_vl", ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"), 16),
    "Qwen 3.5": _qwen("qwen3_5", ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"), 16),
    "GLM-4.1V": _glm("glm4v", "Glm4vProcessor", "Glm4vImageProcessor"),
    "GLM-4.6V": _glm("glm46v", "Glm46VProcessor", "Glm46VImageProcessor"),
    "Gemma 3": ImageModel(
        config={
            "model_type": "gemma3",
            "mm_tokens_per_image": 4,
            "vision_config": {"patch_size": 14, "image_size": 56},
        },
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        oracle=("gemma3.processing_gemma3", "Gemma3Processor"),
        arguments={"image_seq_length": 4},
        tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        names={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        written="<start_of_image>",
    ),
    "PaliGemma": ImageModel(
        config={
            "model_type": "paligemma",
            "vision_config": {"patch_size": 14, "image_size": 28},
        },
        ids={"image_token_index": "<image>"},
        preprocessor={
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_seq_length": 4,
        },
        oracle=("paligemma.processing_paligemma", "PaliGemmaProcessor"),
        tokens=("<image>",),
        names={"image_token": "<image>"},
        written="<image>",
    ),
    "Gemma 4": ImageModel(
        config={
            "model_type": "gemma4",
            "text_config": {"use_bidirectional_attention": "vision"},
            "vision_config": {"patch_size": 16},
        },
        ids={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
        },
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 140,
        },
        oracle=("gemma4.processing_gemma4", "Gemma4Processor"),
        arguments={"feature_extractor": None},
        tokens=(
            *("<|image|>", "<|image>", "<image|>", "<|video|>"),
            *("<|audio|>", "<|audio>", "<audio|>"),
        ),
        names={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        written="<|image|>",
    ),
}
"""One for each family of the preprocessing, and for each processor of transformers."""


def write_image_model(
    name: str, path: Path, config: Mapping[str, Any] | None = None, **preprocessor: Any
) -> Path:
    """Write what a miniature of the model has beside its weights into a folder.

    Args:
        config: The whole config.json; its ids are set to those of the tokenizer. Default: only
            what concerns images.
        preprocessor: Keys of preprocessor_config.json to change.
    """
    model = IMAGE_MODELS[name]
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(model.tokens)
    tokenizer.save(str(path / "tokenizer.json"))
    ids = {key: tokenizer.token_to_id(token) for key, token in model.ids.items()}
    whole = {**(model.config if config is None else config), **ids}
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    named = {**special, "extra_special_tokens": model.names}
    for file, content in (
        ("config.json", whole),
        ("preprocessor_config.json", {**model.preprocessor, **preprocessor}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named}),
    ):
        (path / file).write_text(json.dumps(content))
    (path / "chat_template.jinja").write_text(_CONTENT.replace("IMAGE", model.written))
    return path


def _tokenizer(added: Sequence[str]) -> Tokenizer:
    """Bytes, runs of line ends, and the added tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_LINES[1:]]
    merges = [("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"), ("ĊĊ", "Ċ")]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, *added)]
    )
    return tokenizer


class OracleProcessor:
    """transformers' processor of a miniature, without torchvision and num2words.

    Args:
        changed: Arguments of its class that differ from those of the miniature.
    """

    def __init__(self, name: str, folder: Path, **changed: Any) -> None:
        from transformers import AutoImageProcessor, PreTrainedTokenizerFast
        from transformers.processing_utils import ProcessorMixin

        model = IMAGE_MODELS[name]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        module = _processing_module(model.oracle[0])
        kind = getattr(module, model.oracle[1])
        arguments = {
            "image_processor": self.image_processor,
            "tokenizer": self.tokenizer,
            **model.arguments,
            **changed,
        }
        if "video_processor" in inspect.signature(kind.__init__).parameters:
            arguments["video_processor"] = None
        with pytest.MonkeyPatch.context() as patch:
            # Of the class's parts, only that for videos is missing.
            patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
            if hasattr(module, "num2words"):
                patch.setattr(module, "num2words", object())  # spells numbers of video frames
            self.processor = kind(**arguments)

    def __call__(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """The inputs of a model for a prompt with images; of one sequence."""
        found = self.processor(images=[list(images)], text=[text], return_tensors="np")
        return dict(found)


def _processing_module(name: str) -> ModuleType:
    package = "transformers.models"
    if name.startswith("pixtral"):
        # Imports a function from the processor that needs torchvision, though it is in both.
        path = f"{package}.pixtral.image_processing_pixtral"
        other = importlib.import_module(f"{package}.pixtral.image_processing_pil_pixtral")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, path, other)
            return importlib.import_module(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}")
