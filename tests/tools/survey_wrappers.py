"""What the survey's miniatures of models that take images and text need beside small sizes."""

from __future__ import annotations

from typing import Any

WIDTHS = ("out_hidden_size", "text_hidden_size", "adapter_out_dim", "output_dim")
"""What towers call the width of the text model, to which their output is made to fit."""

_IMAGES = {"vision_start_token_id": 251, "vision_end_token_id": 252}

OF_WRAPPERS: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {
        "image_token_id": 251,
        "audio_token_id": 252,
        "image_token_offset": 64,
        "audio_token_offset": 128,
        "vision_config.codebook_size": 64,
        "vision_config.base_channels": 32,
        "audio_config.codebook_size": 64,
    },
    "ChameleonConfig": {"vocabulary_map": {"<image>": 252, "IMGIMGAZ": 253, "IMGIMGBZ": 254}},
    "Dots3NoteConfig": {
        "vision_config.adapter_in_dim": 32,
        "vision_config.num_hidden_layers": 42,
        "vision_config.moe_intermediate_size": 32,
        "audio_config.adapter_input_size": 32,
        "audio_config.num_attention_heads": 2,
        "audio_config.num_key_value_heads": 2,
        "audio_config.head_dim": 16,
    },
    "Emu3Config": {
        "vocabulary_map": {"<image>": 252, "<|extra_200|>": 253, "<|visual token 000000|>": 254},
        "vq_config.base_channels": 32,
    },
    "Granite4VisionConfig": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
        "vision_config.hidden_size": 64,
        "qformer_config.intermediate_size": 32,
    },
    "MuseSparkConfig": {
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
        "audio_config.num_hidden_layers": 4,
        "audio_config.hidden_sizes": [8, 8, 8, 8],
        "audio_config.depths": [1, 1, 1, 1],
    },
    "PerceptionLMConfig": {"vision_config.model_args": {"embed_dim": 32}},
    "Qwen2_5OmniThinkerConfig": _IMAGES,
    "Qwen3OmniMoeThinkerConfig": _IMAGES,
}
"""By configuration class: arguments, and attributes of parts, which have a point in their names."""
