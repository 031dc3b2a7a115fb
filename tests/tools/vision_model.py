"""A vision-language miniature, complete as a published checkpoint: a server can serve its folder.

SmolVLM's architecture with random weights: tokenizer, chat template and processor files included.
``python -m tests.tools.vision_model OUT`` writes one; tests call :func:`make_vision_model`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.parity.cases import SMALL, VISION, Case
from tests.parity.families import make_checkpoint

TILE = 28
"""Height and width of a tile, in pixels."""
ROWS = 4
"""Placeholder tokens of a tile: patches of 7, of which 2 x 2 are one."""
LONGEST = 56
"""The longer side of an image after resizing: at most 2 x 2 tiles and the whole one."""

IMAGE_TOKEN = "<image>"
_NAMED = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", IMAGE_TOKEN)
_FRAMES = ("<global-img>", *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)))
SPECIAL_TOKENS = (*_NAMED, *_FRAMES)
"""In the order of their ids, behind the 256 bytes."""

VOCABULARY = 304

_TEMPLATE = """<|im_start|>
{%- for message in messages -%}
{{ message['role'] | capitalize }}:
{%- if message['content'] is string %} {{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<image>{%- else %} {{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<end_of_utterance>
{% endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""


def token_id(token: str) -> int:
    """The id of one of :data:`SPECIAL_TOKENS`."""
    return 256 + SPECIAL_TOKENS.index(token)


def make_vision_model(path: Path, seed: int = 0, **text: Any) -> Path:
    """Write the miniature into ``path`` and return it; ``text`` are options of its decoder."""
    end = token_id("<end_of_utterance>")
    decoder: dict[str, Any] = SMALL | {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    case = Case(
        "Idefics3Config",
        {
            "text_config": decoder | text,
            "vision_config": VISION | {"num_hidden_layers": 2, "image_size": TILE, "patch_size": 7},
            "scale_factor": 2,
            "image_token_id": token_id(IMAGE_TOKEN),
        },
        model="Idefics3ForConditionalGeneration",
    )
    make_checkpoint(case, path, seed)
    write_processor(path)
    return path


def write_processor(path: Path) -> None:
    """Write what turns conversations and images into the model's inputs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in SPECIAL_TOKENS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    end = "<end_of_utterance>"
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1024,
            "bos_token": "<|im_start|>",
            "eos_token": end,
            "pad_token": end,
        },
    )
    (path / "chat_template.jinja").write_text(_TEMPLATE)
    _write(
        path / "preprocessor_config.json",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"longest_edge": LONGEST},
            "resample": 1,
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": TILE},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_pad": True,
        },
    )
    _write(
        path / "processor_config.json",
        {"processor_class": "Idefics3Processor", "image_seq_len": ROWS},
    )


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.vision_model")
    parser.add_argument("out", type=Path)
    make_vision_model(parser.parse_args().out)


if __name__ == "__main__":
    main()
