"""Decoders of models with images against transformers' own, in float32.

Vectors of images are random numbers: what makes them is tested elsewhere. Positions on three axes,
features behind the first layers, and tokens that attend to each other are what is compared.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.cases import (
    DELTA,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4_DENSE,
    GEMMA_STD,
    MROPE,
    QWEN_MOE,
    QWEN_VISION,
    SMALL,
    VISION,
    Case,
)
from tests.parity.families import TOLERANCE, Oracle, make_checkpoint, random_ids
from tests.tools.image_run import ImageRun, Prompt
from tests.tools.paged_run import CPU, load
from tests.tools.thread_shards import on_shards
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.engine.step import RowImage
from tgi_cli.models import load_model, read_config

IMAGE = 250
"""The id of a placeholder."""
HIDDEN = 64
NEW = 4
"""Tokens behind a prompt."""

TOKENS = {"image_token_id": IMAGE, "video_token_id": 251, "vision_start_token_id": 252}
TOKENS |= {"vision_end_token_id": 253}
CONTIGUOUS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
ALTERNATING = CONTIGUOUS | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
HALF = CONTIGUOUS | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
EYES = {"depth": 1, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48}
EYES |= {"out_hidden_size": HIDDEN}
LEVELS = EYES | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 16}


def with_axes(config: str, text: dict[str, Any], vision: dict[str, Any], model: str) -> Case:
    values = {"text_config": text, "vision_config": vision, **TOKENS}
    return Case(f"{config}Config", values, model=f"{model}ForConditionalGeneration")


AXES: dict[str, Case] = {
    "Qwen2-VL": with_axes(
        "Qwen2VL",
        SMALL | {"rope_parameters": CONTIGUOUS},
        {"depth": 1, "num_heads": 2, "patch_size": 4, "embed_dim": 32, "hidden_size": HIDDEN},
        "Qwen2VL",
    ),
    "Qwen2.5-VL": with_axes(
        "Qwen2_5_VL", SMALL | {"rope_parameters": CONTIGUOUS}, EYES, "Qwen2_5_VL"
    ),
    "Qwen3-VL": with_axes(
        "Qwen3VL", SMALL | {"head_dim": 16, "rope_parameters": ALTERNATING}, LEVELS, "Qwen3VL"
    ),
    "Qwen3-VL MoE": with_axes(
        "Qwen3VLMoe",
        QWEN_MOE | {"head_dim": 16, "rope_parameters": ALTERNATING},
        LEVELS,
        "Qwen3VLMoe",
    ),
    "Qwen 3.5": with_axes("Qwen3_5", DELTA | {"rope_parameters": MROPE}, QWEN_VISION, "Qwen3_5"),
    "GLM-4.1V": with_axes("Glm4v", SMALL | {"rope_parameters": HALF}, EYES, "Glm4v"),
    "GLM-4.6V": with_axes("Glm46V", SMALL | {"rope_parameters": HALF}, EYES, "Glm46V"),
}
NATIVE = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3-VL MoE", "Qwen 3.5")
WINDOW = 12
"""Shorter than prompts, longer than some images."""

SPANS: dict[str, Case] = {
    "Gemma 3": Case(
        "Gemma3Config",
        {
            "text_config": GEMMA3 | {"sliding_window": WINDOW},
            "vision_config": VISION,
            "image_token_index": IMAGE,
        },
        model="Gemma3ForConditionalGeneration",
        embedding_std=GEMMA_STD,
    ),
    "Gemma 4": Case(
        "Gemma4Config",
        {
            "text_config": GEMMA4_DENSE
            | {"sliding_window": WINDOW, "use_bidirectional_attention": "vision"},
            "vision_config": VISION,
            "audio_config": None,
            "image_token_id": IMAGE,
            "video_token_id": 251,
            "audio_token_id": 252,
        },
        model="Gemma4ForConditionalGeneration",
        embedding_std=GEMMA_STD,
        qk_norm=0.6,
    ),
}
PREFIXES: dict[str, Case] = {
    name: Case(
        "PaliGemmaConfig",
        {
            "text_config": text,
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "image_token_index": IMAGE,
            "projection_dim": HIDDEN,
            "vocab_size": 256,
        },
        model="PaliGemmaForConditionalGeneration",
        embedding_std=GEMMA_STD,
    )
    for name, text in {
        "PaliGemma": GEMMA | {"model_type": "gemma"},
        "PaliGemma 2": GEMMA2 | {"model_type": "gemma2", "sliding_window": WINDOW},
    }.items()
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A checkpoint, and transformers' model of it."""

    name: str
    path: Path
    oracle: Oracle

    def logits(self, prompt: Prompt) -> Tensor:
        """transformers' for every token of a text."""
        kinds = torch.zeros(1, len(prompt.ids), dtype=torch.int64)
        kinds[0, prompt.places] = 1
        if self.name in PREFIXES:
            suffix = torch.zeros_like(kinds)
            suffix[0, prompt.length or len(prompt.ids) :] = 1
            return self.oracle.logits(prompt.ids, token_type_ids=suffix, **_features(prompt, False))
        if self.name == "Gemma 3":
            return self.oracle.logits(prompt.ids, token_type_ids=kinds, **_features(prompt, False))
        inputs = {"mm_token_type_ids": kinds, **_features(prompt, True)}
        if prompt.images and self.name in AXES:
            grids = [image.grid for image in prompt.images if image.grid is not None]
            inputs["image_grid_thw"] = torch.tensor([[1, 2 * h, 2 * w] for h, w in grids])
        return self.oracle.logits(prompt.ids, **inputs)


class _EncoderOutput(SimpleNamespace):
    """What transformers asks the output of an image encoder for."""

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())


def _features(prompt: Prompt, split: bool) -> dict[str, Any]:
    """What transformers takes as its encoder's output."""
    if prompt.features is None:
        return {}
    counts = [sum(count for _, count in image.spans) for image in prompt.images]
    rows = torch.split(prompt.features, counts) if split else prompt.features
    levels = [torch.split(level, counts) for level in prompt.deepstack]
    output = _EncoderOutput(pooler_output=rows, deepstack_features=levels)
    return {"mm_encoder_outputs": {"image": output}}


def prompts_of(name: str) -> dict[str, Prompt]:
    """Images amid a text, at its beginning, at its end, several, and a text without any.

    The last tokens of each are what follows on the prompt.
    """
    layouts: dict[str, list[int | tuple[int, int]]] = {
        "amid": [5, (2, 3), 6],
        "several": [3, (1, 1), 4, (4, 5), 2, (3, 1), 7],
        "first": [(3, 3), 20],
        "last": [19, (2, 4)],
        "none": [27],
    }
    if name in PREFIXES:  # their images come first
        layouts = {"first": layouts["first"], "short": [(2, 2), 3], "none": layouts["none"]}
    made = {}
    for seed, (kind, parts) in enumerate(layouts.items()):
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                ids += random_ids(part, 10 * seed + len(ids))
                continue
            count = part[0] * part[1]
            images.append(RowImage(((len(ids), count),), part, bidirectional=name in SPANS))
            ids += [IMAGE] * count
        length = len(ids)
        ids += random_ids(NEW, seed)
        count = ids.count(IMAGE)
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int = count, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(count, HIDDEN, generator=generator)

        levels = 3 if name.startswith("Qwen3-VL") else 0
        made[kind] = Prompt(
            ids,
            tuple(images),
            draw() if count else None,
            tuple(draw() for _ in range(levels if count else 0)),
            length,
        )
    return made


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Made when they are asked for, and kept."""

    class Pairs(dict[str, Pair]):
        def __missing__(self, name: str) -> Pair:
            case = (AXES | SPANS | PREFIXES)[name]
            path = make_checkpoint(case, tmp_path_factory.mktemp("images"))
            self[name] = Pair(name, path, Oracle(path, case))
            return self[name]

    return Pairs()


def fed(run: ImageRun, prompts: dict[str, Prompt], seed: int, whole: bool) -> dict[str, Tensor]:
    """Logits of texts that are fed together in pieces; ``whole``: which do not end in a span."""
    choose = random.Random(seed)
    done = dict.fromkeys(prompts, 0)
    got: dict[str, list[Tensor]] = {name: [] for name in prompts}
    while any(done[name] < len(prompt.ids) for name, prompt in prompts.items()):
        step = {}
        for name, prompt in prompts.items():
            start, length = done[name], prompt.length or 0
            if start == len(prompt.ids) or choose.random() < 0.3:
                continue
            size = choose.choice((1, 2, 5, 9, 30)) if start < length else 1
            end = min(start + size, length if start < length else len(prompt.ids))
            if whole:
                spans = [span for image in prompt.images for span in image.spans]
                end = max([a + n for a, n in spans if a < end < a + n], default=end)
            step[name] = prompt.ids[start:end]
            done[name] = end
        for name, logits in run.step(step).items() if step else ():
            got[name].append(logits)
    return {name: torch.cat(pieces) for name, pieces in got.items()}


def check(pair: Pair, run: ImageRun, prompts: dict[str, Prompt], seed: int, whole: bool) -> None:
    got = fed(run, prompts, seed, whole)
    for kind, prompt in prompts.items():
        wanted = pair.logits(prompt)
        assert wanted.std() > 0.3
        torch.testing.assert_close(
            got[kind], wanted, atol=TOLERANCE, rtol=0, msg=lambda text, kind=kind: f"{kind}: {text}"
        )


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", AXES)
def test_chunks_anywhere_have_the_positions_of_images(
    pairs: dict[str, Pair], name: str, backend: str
) -> None:
    pair, prompts = pairs[name], prompts_of(name)
    model = load(pair.path)
    assert model.position_axes == 3
    for seed in range(2):
        run = ImageRun(model, torch.float32, backend, prompts=prompts)
        check(pair, run, prompts, seed, whole=False)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", SPANS)
def test_tokens_of_images_see_each_other(pairs: dict[str, Pair], name: str, backend: str) -> None:
    pair, prompts = pairs[name], prompts_of(name)
    model = load(pair.path)
    for seed in range(2):
        run = ImageRun(model, torch.float32, backend, prompts=prompts)
        check(pair, run, prompts, seed, whole=True)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", PREFIXES)
def test_tokens_of_prompts_see_each_other(pairs: dict[str, Pair], name: str, backend: str) -> None:
    pair, prompts = pairs[name], prompts_of(name)
    run = ImageRun(load(pair.path), torch.float32, backend, prompts=prompts)
    got = [run.step({kind: p.ids[: p.length] for kind, p in prompts.items()})]
    for offset in range(NEW):
        got.append(run.step({k: [p.ids[(p.length or 0) + offset]] for k, p in prompts.items()}))
    for kind, prompt in prompts.items():
        logits = torch.cat([step[kind] for step in got])
        torch.testing.assert_close(logits, pair.logits(prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [*NATIVE, *SPANS])
def test_shards_compute_the_same(pairs: dict[str, Pair], name: str) -> None:
    pair, prompts = pairs[name], prompts_of(name)

    def logits(shard: Any) -> dict[str, Tensor]:
        model = load_model(read_config(pair.path), torch.float32, CPU, shard=shard)
        run = ImageRun(model, torch.float32, "torch", prompts=prompts)
        return fed(run, prompts, 1, whole=name in SPANS)

    for got in on_shards(2, logits):
        for kind, prompt in prompts.items():
            torch.testing.assert_close(got[kind], pair.logits(prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [*NATIVE, *SPANS])
def test_a_program_computes_what_the_modules_do(pairs: dict[str, Pair], name: str) -> None:
    pair, prompts = pairs[name], prompts_of(name)
    if name == "Qwen 3.5":
        pytest.skip("tests/parity/test_state_bits.py has models with states")
    model = load(pair.path, torch.bfloat16)
    if not CppAttention.supports(model.kv_specs, 16, torch.bfloat16):
        pytest.skip("there are no kernels for these heads")
    results = []
    for eager in (False, True):
        run = ImageRun(model, torch.bfloat16, None, prompts=prompts, eager=eager)
        if not isinstance(run.attention, CppAttention):
            pytest.skip("there are no kernels for this processor")
        assert (run.program is None) == eager
        results.append(fed(run, prompts, 3, whole=name in SPANS))
    for kind in prompts:
        assert torch.equal(results[0][kind], results[1][kind]), kind


def test_older_and_newer_checkpoints_of_qwen_hold_the_decoder_in_other_places(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    """Fields as they were published before transformers 5, which still writes the older names."""
    pair = pairs["Qwen2.5-VL"]
    stored = load_file(pair.path / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in stored
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((pair.path / "config.json").read_text())
    text = config.pop("text_config")
    axes = text.pop("rope_parameters")
    text.pop("model_type")
    scaling = {"type": "mrope", "mrope_section": axes["mrope_section"]}
    top = config | text | {"rope_scaling": scaling, "rope_theta": axes["rope_theta"]}
    top |= {key: config[key] for key in ("model_type", "architectures")}
    (tmp_path / "config.json").write_text(json.dumps(top))
    prompts = prompts_of("Qwen2.5-VL")
    run = ImageRun(load(tmp_path), torch.float32, "torch", prompts=prompts)
    check(pair, run, prompts, 2, whole=False)
    newer = {
        f"model.{name}"
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1): each
        for name, each in stored.items()
    }
    save_file(newer, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run = ImageRun(load(tmp_path), torch.float32, "torch", prompts=prompts)
    check(pair, run, prompts, 3, whole=False)


def test_experts_of_qwen3_vl_are_read_whichever_way_they_are_stored(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    pair, prompts = pairs["Qwen3-VL MoE"], prompts_of("Qwen3-VL MoE")
    stored = load_file(pair.path / "model.safetensors")
    turned = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each
        for name, each in stored.items()
    }
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((pair.path / "config.json").read_text())
    run = ImageRun(load(tmp_path), torch.float32, "torch", prompts=prompts)
    check(pair, run, prompts, 2, whole=False)
