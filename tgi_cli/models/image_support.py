"""Which architectures take images, and why others do not. No torch.

A model takes images if its tower runs through transformers (:mod:`tgi_cli.models.hf.vision`), and
if its decoder gets what transformers gives it for an image: rows, positions and masks.
"""

from __future__ import annotations

from collections.abc import Mapping

from tgi_cli.models.config import ModelConfig

IMAGE_ARCHITECTURES = frozenset(
    {
        "AyaVisionForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "JanusForConditionalGeneration",
        "Lfm3VlForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "QianfanOCRForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    }
)
"""Architectures that take images."""

_CROSS = "its decoder attends to images by layers of its own"
_TOKENS = "its tower makes token ids of an image, which its table of embeddings turns into vectors"
_CHUNKED = "a chunk of its attention may begin within an image"
_AXES = "it counts positions within images in a way that is not implemented"
_LIBRARY = "its tower is a convolutional network of the package timm"
_LAYERS = "it adds features of images after decoder layers in a way that is not implemented"

REFUSALS: Mapping[str, str] = {
    "ChameleonForConditionalGeneration": _TOKENS,
    "CohereCompassForConditionalGeneration": _AXES,
    "Cosmos3EdgeForConditionalGeneration": _AXES,
    "Cosmos3OmniForConditionalGeneration": _AXES,
    "Emu3ForConditionalGeneration": _TOKENS,
    "Ernie4_5_VLMoeForConditionalGeneration": _AXES,
    "FastVlmForConditionalGeneration": _LIBRARY,
    "Gemma3nForConditionalGeneration": _LIBRARY,
    "Granite4VisionForConditionalGeneration": _LAYERS,
    "GraniteDoclingForConditionalGeneration": _LAYERS,
    "HunYuanVLForConditionalGeneration": _AXES,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "MiniCPMV4_7ForConditionalGeneration": _AXES,
    "MllamaForConditionalGeneration": _CROSS,
    "Qwen2_5OmniThinkerForConditionalGeneration": _AXES,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _AXES,
    "Qwen4ExpForConditionalGeneration": _AXES,
}
"""Architectures whose text part alone is served, with reasons; of all others that take images,
preprocessing is not implemented."""


def takes_images(config: ModelConfig) -> bool:
    """Whether the architecture of a checkpoint takes images."""
    return config.architecture in IMAGE_ARCHITECTURES


def image_refusal(config: ModelConfig) -> str:
    """Why a model takes no images, to complete "this model takes no images: ..."; "" if it does."""
    if takes_images(config):
        return ""
    name = config.architecture
    if name in REFUSALS:
        return f"{REFUSALS[name]} ({name})"
    if "vision_config" in config.raw:
        return f"preprocessing of images is not implemented for {name}"
    return f"{name} is a text model"
