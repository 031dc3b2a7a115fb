"""Miniatures of models that take images, and random images as their processors would make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.parity.cases import (
    CONV,
    DELTA,
    DELTA_SHARED,
    GEMMA,
    GEMMA3,
    GEMMA4_DENSE,
    GEMMA_STD,
    MROPE,
    QWEN_MOE,
    QWEN_VISION,
    SMALL,
    VISION,
    YARN_ROPE,
    Case,
)

IMAGE = 250
"""The id of placeholder tokens; random texts have only lower ones."""

_TILE, _PATCH = 28, 7
_SMALL_VISION = VISION | {"num_hidden_layers": 3, "patch_size": _PATCH}
_LLAMA = SMALL | {"model_type": "llama"}
_MISTRAL = SMALL | {"model_type": "mistral", "head_dim": 16, "sliding_window": 40}
_MINISTRAL3 = SMALL | {
    "model_type": "ministral3",
    "head_dim": 16,
    "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.1},
}
_QWEN2 = SMALL | {"model_type": "qwen2"}
_QWEN3 = SMALL | {"model_type": "qwen3", "head_dim": 16}
_COHERE2 = SMALL | {"model_type": "cohere2", "sliding_window": 24, "logit_scale": 0.25}
_PIXTRAL = VISION | {
    "model_type": "pixtral",
    "num_hidden_layers": 2,
    "image_size": 84,
    "patch_size": 14,
}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]

Inputs = dict[str, Tensor]
"""Outputs of an image processor, by name."""


@dataclass(frozen=True, slots=True)
class VisionCase:
    """A miniature model that sees.

    Attributes:
        case: its decoder and tower.
        image: a random image by a seed; several seeds give several sizes.
        along: the dimension in which transformers takes several images.
        axes: of the positions within images.
        spans: whose tokens attend to each other.
        builtin: whether the decoder is a family's of our own.
        seeds: of images of one prompt.
    """

    case: Case
    image: Callable[[int], Inputs]
    along: int = 0
    axes: int = 1
    spans: Literal["", "image", "prompt"] = ""
    builtin: bool = True
    seeds: tuple[int, ...] = (0, 1)

    def joined(self, images: list[Inputs]) -> Inputs:
        """Several images as one call of transformers' model takes them."""
        return {
            name: torch.cat(_padded([each[name] for each in images], self.along), self.along)
            for name in images[0]
        }


def _padded(tensors: list[Tensor], along: int) -> list[Tensor]:
    """Zeros behind what is smaller in other dimensions."""
    shape = [max(sizes) for sizes in zip(*(each.shape for each in tensors), strict=True)]
    padded = []
    for each in tensors:
        wanted = [each.shape[d] if d == along else size for d, size in enumerate(shape)]
        whole = each.new_zeros(wanted)
        whole[tuple(slice(size) for size in each.shape)] = each
        padded.append(whole)
    return padded


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _one(seed: int) -> Inputs:
    return {"pixel_values": _random(seed, 1, 3, _TILE, _TILE)}


def _tiles(seed: int) -> Inputs:
    return {"pixel_values": _random(seed, 2 + seed, 3, _TILE, _TILE)}


def _frames(seed: int) -> Inputs:
    shape = (1, 3 - seed, 3, _TILE, _TILE)
    mask = torch.ones(shape[0], shape[1], _TILE, _TILE, dtype=torch.int64)
    return {"pixel_values": _random(seed, *shape), "pixel_attention_mask": mask}


def _quarters(seed: int) -> Inputs:
    """Parts of different sizes, as quarters and the whole are: the first is padded."""
    count, height, width = ((2, 28, 42), (1, 35, 21))[seed]
    mask = torch.ones(1, count, height, width, dtype=torch.int64)
    if count > 1:
        mask[0, 0, 21:] = mask[0, 0, :, 28:] = 0
    pixels = _random(seed, 1, count, 3, height, width) * mask[:, :, None]
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _any_size(seed: int) -> Inputs:
    height, width = ((40, 56), (56, 21))[seed]
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    patches = image_size_to_num_patches([height, width], _PINPOINTS, _TILE)
    return {
        "pixel_values": _random(seed, 1, patches, 3, _TILE, _TILE),
        "image_sizes": torch.tensor([[height, width]]),
    }


def _ragged(seed: int) -> Inputs:
    height, width = ((28, 56), (84, 28))[seed]
    return {
        "pixel_values": _random(seed, 1, 3, height, width),
        "image_sizes": torch.tensor([[height, width]]),
    }


def _grid(patch: int) -> Callable[[int], Inputs]:
    """Of towers that take patches one by one, two frames of each."""

    def image(seed: int) -> Inputs:
        height, width = ((4, 6), (8, 2))[seed]
        return {
            "pixel_values": _random(seed, height * width, 3 * 2 * patch * patch),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }

    return image


def _small_images(seed: int) -> Inputs:
    """Of PaddleOCR-VL's tower: patches are images."""
    found = _grid(4)(seed)
    pixels = found["pixel_values"][:, : 3 * 4 * 4]
    return found | {"pixel_values": pixels.reshape(-1, 3, 4, 4)}


def _patches(seed: int) -> Inputs:
    """Of Gemma 4's tower: patches with their columns and rows, of which 9 become a row."""
    width, height = ((6, 6), (12, 3))[seed]
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
    return {
        "pixel_values": _random(seed, 1, height * width, 3 * 4 * 4),
        "image_position_ids": places[None],
    }


def _made(name: str, text: Mapping[str, Any], eye: Mapping[str, Any], **own: Any) -> Case:
    """The case of ``NAMEForConditionalGeneration``."""
    values = {"text_config": text, "vision_config": eye} | own
    return Case(f"{name}Config", values, model=f"{name}ForConditionalGeneration")


_CLIP = _SMALL_VISION | {"model_type": "clip_vision_model"}
_SIGLIP = _SMALL_VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
_INTERN = _SMALL_VISION | {"image_size": [_TILE, _TILE], "patch_size": [_PATCH, _PATCH]}
_BY_INDEX = {"image_token_index": IMAGE}

VISION_CASES: dict[str, VisionCase] = {
    "SmolVLM": VisionCase(
        _made("Idefics3", _LLAMA, _SMALL_VISION, image_token_id=IMAGE), _frames, 1
    ),
    "SmolVLM 2": VisionCase(
        _made("SmolVLM", _LLAMA, _SMALL_VISION, image_token_id=IMAGE), _frames, 1
    ),
    "Idefics 2": VisionCase(
        _made(
            "Idefics2",
            _MISTRAL,
            _SMALL_VISION | {"image_size": 42},
            perceiver_config={
                "hidden_size": 64,
                "resampler_n_latents": 3,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            },
            image_token_id=IMAGE,
        ),
        _quarters,
        1,
    ),
    "LLaVA 1.5": VisionCase(_made("Llava", _LLAMA, _CLIP, **_BY_INDEX), _one),
    "LLaVA-NeXT": VisionCase(
        _made("LlavaNext", _MISTRAL, _CLIP, image_grid_pinpoints=_PINPOINTS, **_BY_INDEX),
        _any_size,
    ),
    "LLaVA-OneVision": VisionCase(
        _made(
            "LlavaOnevision",
            _QWEN2,
            _SIGLIP,
            image_grid_pinpoints=_PINPOINTS,
            video_token_index=251,
            tie_word_embeddings=True,
            **_BY_INDEX,
        ),
        _any_size,
    ),
    "Pixtral": VisionCase(
        _made(
            "Llava",
            _MISTRAL,
            _PIXTRAL,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            **_BY_INDEX,
        ),
        _ragged,
    ),
    "Mistral Small 3": VisionCase(
        _made("Mistral3", _MISTRAL, _PIXTRAL, tie_word_embeddings=False, **_BY_INDEX), _ragged
    ),
    "Ministral 3": VisionCase(
        _made("Mistral3", _MINISTRAL3, _PIXTRAL, tie_word_embeddings=False, **_BY_INDEX),
        _ragged,
        builtin=False,
    ),
    "LightOnOCR": VisionCase(_made("LightOnOcr", _QWEN3, _PIXTRAL, image_token_id=IMAGE), _ragged),
    "LLaVA-NeXT-Video": VisionCase(
        _made(
            "LlavaNextVideo",
            _LLAMA,
            _CLIP,
            image_grid_pinpoints=_PINPOINTS,
            video_token_index=251,
            **_BY_INDEX,
        ),
        _any_size,
    ),
    "DeepSeek-VL": VisionCase(_made("DeepseekVL", _LLAMA, _SIGLIP, image_token_id=IMAGE), _one),
    "ViP-LLaVA": VisionCase(
        _made("VipLlava", _LLAMA, _CLIP, vision_feature_layer=[-2, -1, 1], **_BY_INDEX), _one
    ),
    "Aya Vision": VisionCase(
        _made("AyaVision", _COHERE2, _SIGLIP, **_BY_INDEX), _tiles, builtin=False
    ),
    "Qianfan-OCR": VisionCase(
        _made("QianfanOCR", _QWEN3, _INTERN, image_token_id=IMAGE, tie_word_embeddings=False),
        _tiles,
        builtin=False,
    ),
    "InternVL 3": VisionCase(_made("InternVL", _QWEN2, _INTERN, image_token_id=IMAGE), _tiles),
    "InternVL 3.5": VisionCase(
        _made("InternVL", _QWEN3, _INTERN, image_token_id=IMAGE, tie_word_embeddings=False), _tiles
    ),
}
"""By model."""

_MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 32,
    "patch_size": 4,
}
_GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_DEEPSTACK_VISION = QWEN_VISION | {"depth": 4, "deepstack_visual_indexes": [0, 2, 3]}

VISION_CASES |= {
    "Qwen2-VL": VisionCase(
        _made(
            "Qwen2VL",
            SMALL | {"rope_parameters": _AXES},
            {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            **_MARKS,
        ),
        _grid(4),
        axes=3,
    ),
    "Qwen2.5-VL": VisionCase(
        _made(
            "Qwen2_5_VL",
            SMALL | {"rope_parameters": _AXES},
            {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_MARKS,
        ),
        _grid(4),
        axes=3,
    ),
    "Qwen3-VL": VisionCase(
        _made(
            "Qwen3VL",
            SMALL | {"head_dim": 16, "rope_parameters": _AXES | {"mrope_interleaved": True}},
            _DEEPSTACK_VISION,
            **_MARKS,
        ),
        _grid(4),
        axes=3,
    ),
    "Qwen3-VL MoE": VisionCase(
        _made(
            "Qwen3VLMoe",
            QWEN_MOE | {"head_dim": 16, "rope_parameters": _AXES | {"mrope_interleaved": True}},
            _DEEPSTACK_VISION,
            **_MARKS,
        ),
        _grid(4),
        axes=3,
    ),
    "GLM-4.1V": VisionCase(
        _made(
            "Glm4v",
            SMALL | {"rope_parameters": _AXES | _HALF},
            _GLM_VISION,
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _grid(4),
        axes=3,
        builtin=False,
    ),
    "GLM-4.6V": VisionCase(
        _made(
            "Glm46V",
            SMALL | {"rope_parameters": _AXES | _HALF},
            _GLM_VISION,
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _grid(4),
        axes=3,
        builtin=False,
    ),
    "GLM-4.5V": VisionCase(
        _made(
            "Glm4vMoe",
            SMALL | _GLM_EXPERTS | {"rope_parameters": _AXES | _HALF},
            _GLM_VISION,
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _grid(4),
        axes=3,
        builtin=False,
    ),
    "GLM-OCR": VisionCase(
        _made(
            "GlmOcr",
            SMALL | {"rope_parameters": _AXES},
            _GLM_VISION,
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _grid(4),
        axes=3,
        builtin=False,
    ),
    "Janus": VisionCase(
        _made(
            "Janus",
            _LLAMA,
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "mlp_ratio": 1.5,
                "image_size": _TILE,
                "patch_size": _PATCH,
                "projection_dim": 64,
                "num_image_tokens": 16,
            },
            vq_config={
                "num_embeddings": 16,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1],
                "num_res_blocks": 1,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        ),
        _one,
    ),
    "PaddleOCR-VL": VisionCase(
        _made(
            "PaddleOCRVL",
            SMALL | {"head_dim": 16, "rope_parameters": _AXES},
            VISION | {"num_hidden_layers": 2, "image_size": 32, "patch_size": 4},
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _small_images,
        axes=3,
        builtin=False,
    ),
    "EXAONE 4.5": VisionCase(
        _made(
            "Exaone4_5_",
            SMALL | {"model_type": "exaone4", "sliding_window": 24, "sliding_window_pattern": 2},
            {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "num_key_value_heads": 1,
                "out_hidden_size": 64,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _grid(4),
        builtin=False,
    ),
    "HyperCLOVA X SEED": VisionCase(
        _made(
            "HyperCLOVAXVisionV2",
            SMALL | {"model_type": "hyperclovax"},
            {
                "model_type": "qwen2_5_vl_vision",
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            image_token_id=IMAGE,
            video_token_id=251,
        ),
        _grid(4),
        builtin=False,
    ),
    "LFM3-VL": VisionCase(
        _made(
            "Lfm3Vl",
            CONV | {"model_type": "lfm3", "num_hidden_layers": 6, "sliding_window": 24},
            {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "patch_size": 4,
            },
            projector_hidden_size=48,
            **_MARKS,
        ),
        _grid(4),
    ),
    "Qwen 3.5 MoE": VisionCase(
        _made(
            "Qwen3_5Moe", DELTA | DELTA_SHARED | {"rope_parameters": MROPE}, QWEN_VISION, **_MARKS
        ),
        _grid(4),
        axes=3,
    ),
    "Qwen 3.5": VisionCase(
        _made(
            "Qwen3_5",
            DELTA | {"rope_parameters": MROPE},
            QWEN_VISION,
            tie_word_embeddings=False,
            **_MARKS,
        ),
        _grid(4),
        axes=3,
    ),
    "Gemma 3": VisionCase(
        _made("Gemma3", GEMMA3, _SMALL_VISION, mm_tokens_per_image=4, **_BY_INDEX),
        _one,
        spans="image",
    ),
    "Gemma 4": VisionCase(
        replace(
            _made(
                "Gemma4",
                GEMMA4_DENSE | {"use_bidirectional_attention": "vision"},
                VISION | {"patch_size": 4, "head_dim": 16, "num_key_value_heads": 2},
                audio_config=None,
                image_token_id=IMAGE,
            ),
            embedding_std=GEMMA_STD,
            qk_norm=0.6,
        ),
        _patches,
        spans="image",
    ),
    "PaliGemma": VisionCase(
        _made(
            "PaliGemma",
            GEMMA | {"model_type": "gemma", "max_position_embeddings": 300},
            _SIGLIP,
            projection_dim=64,
            vocab_size=256,
            **_BY_INDEX,
        ),
        _one,
        spans="prompt",
        builtin=False,
    ),
}
"""Models whose images have positions of their own, or see themselves."""
