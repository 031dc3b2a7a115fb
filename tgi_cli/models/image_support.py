"""Which architectures take images, and why others do not. No torch.

A model takes images if its tower runs through transformers (:mod:`tgi_cli.models.hf.vision`), and
if its decoder gets what transformers gives it for an image: rows, positions and masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
_TORCHVISION = "its image processor requires torchvision"
_ENCODER = "its images go into an encoder, as texts of encoder-decoder models do"
_PREPROCESSING = "preprocessing of its images is not implemented"
_PROTEINS = "it takes proteins in place of images"

REFUSALS: Mapping[str, str] = {
    "Apertus1p5ForConditionalGeneration": _TOKENS,
    "AriaForConditionalGeneration": _PREPROCESSING,
    "Blip2ForConditionalGeneration": _PREPROCESSING,
    "BlipForConditionalGeneration": _CROSS,
    "ChameleonForConditionalGeneration": _TOKENS,
    "Cohere2VisionForConditionalGeneration": _TORCHVISION,
    "CohereCompassForConditionalGeneration": _AXES,
    "Cosmos3EdgeForConditionalGeneration": _AXES,
    "Cosmos3OmniForConditionalGeneration": _AXES,
    "DeepseekOcr2ForConditionalGeneration": _PREPROCESSING,
    "DeepseekVLHybridForConditionalGeneration": _PREPROCESSING,
    "DiffusionGemmaForBlockDiffusion": _PREPROCESSING,
    "Dots3NoteForConditionalGeneration": _PREPROCESSING,
    "Emu3ForConditionalGeneration": _TOKENS,
    "Ernie4_5_VLMoeForConditionalGeneration": _AXES,
    "EvollaForProteinText2Text": _PROTEINS,
    "FastVlmForConditionalGeneration": _LIBRARY,
    "Florence2ForConditionalGeneration": _ENCODER,
    "FuyuForCausalLM": _PREPROCESSING,
    "Gemma3nForConditionalGeneration": _LIBRARY,
    "Gemma4UnifiedForConditionalGeneration": _TORCHVISION,
    "GitForCausalLM": _PREPROCESSING,
    "Glm5NextForConditionalGeneration": _PREPROCESSING,
    "GotOcr2ForConditionalGeneration": _PREPROCESSING,
    "Granite4VisionForConditionalGeneration": _LAYERS,
    "GraniteDoclingForConditionalGeneration": _LAYERS,
    "HYV4VLForConditionalGeneration": _AXES,
    "HunYuanVLForConditionalGeneration": _AXES,
    "IdeficsForVisionText2Text": _CROSS,
    "Inkling2ForConditionalGeneration": _TORCHVISION,
    "Inkling2LoopForConditionalGeneration": _TORCHVISION,
    "InklingForConditionalGeneration": _TORCHVISION,
    "InstructBlipForConditionalGeneration": _PREPROCESSING,
    "InstructBlipVideoForConditionalGeneration": _PREPROCESSING,
    "Kimi_K25ForConditionalGeneration": _TORCHVISION,
    "Kosmos2ForConditionalGeneration": _PREPROCESSING,
    "Kosmos2_5ForConditionalGeneration": _PREPROCESSING,
    "Lfm2VlForConditionalGeneration": _TORCHVISION,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "MiniCPMOcrForConditionalGeneration": _TORCHVISION,
    "MiniCPMV4_6ForConditionalGeneration": _PREPROCESSING,
    "MiniCPMV4_7ForConditionalGeneration": _AXES,
    "MiniMaxM3SparseForConditionalGeneration": _TORCHVISION,
    "MistralLarge4ForConditionalGeneration": _PREPROCESSING,
    "MllamaForConditionalGeneration": _CROSS,
    "Molmo2ForConditionalGeneration": _TORCHVISION,
    "MuseGlimmerForConditionalGeneration": _TORCHVISION,
    "MuseSparkForConditionalGeneration": _TORCHVISION,
    "NemotronH_Omni_Reasoning_V3": _TORCHVISION,
    "Ovis2ForConditionalGeneration": _PREPROCESSING,
    "PI0ForConditionalGeneration": _TORCHVISION,
    "PPFormulaNetForConditionalGeneration": _ENCODER,
    "PerceptionLMForConditionalGeneration": _TORCHVISION,
    "Pix2StructForConditionalGeneration": _ENCODER,
    "Qwen2_5OmniThinkerForConditionalGeneration": _AXES,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _AXES,
    "Qwen4ExpForConditionalGeneration": _AXES,
    "Step3p7ForConditionalGeneration": _TORCHVISION,
    "T5Gemma2ForConditionalGeneration": _ENCODER,
    "UdopForConditionalGeneration": _ENCODER,
    "UnlimitedOcrForConditionalGeneration": _TORCHVISION,
    "VideoLlama3ForConditionalGeneration": _PREPROCESSING,
    "VideoLlavaForConditionalGeneration": _PREPROCESSING,
    "VisionEncoderDecoderModel": _ENCODER,
}
"""Architectures of transformers that are made for images and take none here, with the reasons. Of
most, the text part is served."""

TEXT_ARCHITECTURES = frozenset({"Mistral4ForCausalLM"})
"""Architectures that transformers lists among those for images, and that have no tower."""


def takes_images(config: ModelConfig) -> bool:
    """Whether the architecture of a checkpoint takes images."""
    return config.architecture in IMAGE_ARCHITECTURES


def is_for_images(architecture: str, raw: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json is made for images, even if it takes none here."""
    named = architecture in IMAGE_ARCHITECTURES or architecture in REFUSALS
    return named or isinstance(raw.get("vision_config"), Mapping)


def image_refusal(architecture: str, raw: Mapping[str, Any]) -> str:
    """Why a model takes no images, to complete "this model takes no images: ..."; "" if it does."""
    if architecture in IMAGE_ARCHITECTURES:
        return ""
    if not is_for_images(architecture, raw):
        return f"{architecture} is a text model"
    reason = REFUSALS.get(architecture, _PREPROCESSING)
    return f"{reason} ({architecture})" if architecture else reason
