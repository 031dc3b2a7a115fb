"""Towers: what they encode, how they are loaded, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.families import make_checkpoint, random_ids
from tests.parity.vision_cases import IMAGE, VISION_CASES
from tests.tools.image_prompts import ImagePrompt
from tests.tools.paged_run import CPU, PagedRun
from tests.tools.survey import classes_of
from tests.tools.vision_model import ROWS, TILE, make_vision_model, token_id
from tgi_cli.errors import CheckpointError
from tgi_cli.kernels import cpp_library
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import CausalLM, load_model, model_facts, read_config
from tgi_cli.models.image_support import (
    IMAGE_ARCHITECTURES,
    REFUSALS,
    TEXT_ARCHITECTURES,
    image_refusal,
    is_for_images,
    takes_images,
)
from tgi_cli.models.lora import lora_targets
from tgi_cli.models.vision import VisionTower


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(read_config(path), dtype, CPU)


def tower_of(model: CausalLM) -> VisionTower:
    assert model.vision is not None
    return model.vision


def image(seed: int = 0, tiles: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(1, tiles, 3, TILE, TILE, generator=generator),
        "pixel_attention_mask": torch.ones(1, tiles, TILE, TILE, dtype=torch.int64),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return load(path)


def test_an_image_has_a_row_for_each_of_its_tokens(model: CausalLM) -> None:
    features = tower_of(model).encode(image(tiles=3), 3 * ROWS)
    assert features.rows.shape == (3 * ROWS, 64)
    assert features.deepstack == ()
    assert features.rows.isfinite().all()


def test_an_image_of_another_number_of_tokens_is_refused(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="an image of 7 tokens has 8 rows"):
        tower_of(model).encode(image(), 7)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "missing: .'pixel_values'"),
        ({"pixel_values": torch.zeros(1, 3, TILE, TILE)}, "cannot be encoded"),
        (
            {"pixel_values": torch.zeros(1, 2, 3, TILE, TILE), "image_grid_thw": torch.ones(1, 3)},
            "unknown: .'image_grid_thw'",
        ),
        ({"pixel_values": torch.ones(1, 2, 4, TILE, TILE)}, "cannot be encoded"),
    ],
)
def test_tensors_that_are_no_image_of_the_model_are_refused(
    tensors: dict[str, Tensor], why: str, model: CausalLM
) -> None:
    with pytest.raises(ValueError, match=why):
        tower_of(model).encode(tensors, 2 * ROWS)


def test_every_layer_of_a_tower_is_called_for_each_tile(model: CausalLM) -> None:
    tower, called = tower_of(model), list[int]()
    hooks = [
        layer.register_forward_pre_hook(lambda *_, n=index: called.append(n))
        for index, layer in enumerate(tower.layers)
    ]
    tower.encode(image(), 2 * ROWS)
    for hook in hooks:
        hook.remove()
    assert called == [0, 1] * 2, "the miniature has two layers"


def test_numbers_of_any_dtype_are_those_of_the_model(model: CausalLM) -> None:
    pixels, mask = image()["pixel_values"].bfloat16(), image()["pixel_attention_mask"]
    rows = [
        tower_of(model).encode({"pixel_values": each, "pixel_attention_mask": mask}, 2 * ROWS).rows
        for each in (pixels, pixels.float())
    ]
    assert torch.equal(*rows)


def test_a_tower_in_bfloat16_is_near_to_that_in_float32(path: Path, model: CausalLM) -> None:
    exact = tower_of(model).encode(image(), 2 * ROWS).rows
    rounded = tower_of(load(path, torch.bfloat16)).encode(image(), 2 * ROWS).rows
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.1 * exact.std()


def test_missing_and_misshaped_tensors_of_a_tower_are_named_before_data_is_read(
    path: Path, tmp_path: Path
) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.connector.modality_projection.proj.weight"]
    name = "model.vision_model.encoder.layers.1.mlp.fc1.bias"
    tensors[name] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert "1 missing: model.connector.modality_projection.proj.weight" in str(error.value)
    assert f"{name} [3] instead of [48]" in str(error.value)


def test_a_model_may_be_loaded_for_text_alone(
    path: Path, model: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        blind = load_model(read_config(path), torch.float32, CPU, vision=False)
    assert blind.vision is None
    assert blind.image_refusal
    assert blind.weight_bytes < model.weight_bytes
    assert "only the text part" in caplog.text


def test_a_model_that_sees_is_loaded_without_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(path).image_refusal == ""
    assert caplog.text == ""


def test_random_weights_fill_a_tower_too(path: Path) -> None:
    model = load_model(read_config(path), torch.float32, CPU, load_format="dummy")
    assert tower_of(model).encode(image(), 2 * ROWS).rows.isfinite().all()


def test_towers_are_not_quantized_as_they_are_loaded(path: Path, model: CausalLM) -> None:
    quantized = load_model(read_config(path), torch.float32, CPU, quantize="int8")
    wanted = tower_of(model).encode(image(), 2 * ROWS).rows
    assert torch.equal(tower_of(quantized).encode(image(), 2 * ROWS).rows, wanted)
    text = {"a": random_ids(9, seed=1)}
    plain, rounded = (
        PagedRun(each, torch.float32, "torch").step(text)["a"] for each in (model, quantized)
    )
    assert not torch.equal(plain, rounded), "the decoder is"


def test_adapters_do_not_change_towers(path: Path) -> None:
    table = LoraTable(1, 4, 64)
    model = load_model(read_config(path), torch.float32, CPU, lora=table)
    targets = lora_targets(model)
    assert "model.text_model.layers.0.self_attn.q_proj" in targets
    assert not any("vision" in name or "connector" in name for name in targets)


def test_a_decode_is_not_said_to_read_the_tower(path: Path, model: CausalLM) -> None:
    blind = load_model(read_config(path), torch.float32, CPU, vision=False)
    assert model.bytes_read(1) == blind.bytes_read(1)


def test_ids_of_image_tokens_may_be_outside_of_the_vocabulary(model: CausalLM) -> None:
    features = tower_of(model).encode(image(), 2 * ROWS)
    text = random_ids(20, seed=1)
    logits = []
    for number in (token_id("<image>"), 10**6):
        prompt = ImagePrompt.of([text[:7], features, text[7:]], number)
        images = {"a": prompt.chunk(0, len(prompt.ids))}
        run = PagedRun(model, torch.float32, "torch")
        logits.append(run.step({"a": prompt.ids}, images=images)["a"])
    assert torch.equal(*logits)


def test_a_program_takes_rows_as_the_modules_do(path: Path) -> None:
    if cpp_library() is None:
        pytest.skip("the kernels are not compiled: there is no C++ compiler here")
    model = load(path, torch.bfloat16)
    features = tower_of(model).encode(image(), 2 * ROWS)
    prompt = ImagePrompt.of([random_ids(9, seed=1), features, random_ids(5, seed=2)], IMAGE)
    logits = []
    for eager in (False, True):
        run = PagedRun(model, torch.bfloat16, "native", eager=eager)
        assert (run.program is None) == eager
        pieces = []
        for start in range(0, len(prompt.ids), 6):
            tokens = prompt.ids[start : start + 6]
            images = {"a": prompt.chunk(start, start + len(tokens))}
            pieces.append(run.step({"a": tokens}, images=images)["a"])
        logits.append(torch.cat(pieces))
    assert torch.equal(*logits)


def test_checkpoints_as_transformers_4_wrote_them_are_read(tmp_path: Path) -> None:
    """Their decoders and towers have other prefixes."""
    new = make_checkpoint(VISION_CASES["LLaVA 1.5"].case, tmp_path / "new")
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((new / "config.json").read_text())
    tensors = {}
    for name, each in load_file(new / "model.safetensors").items():
        if name.startswith("lm_head."):
            name = f"language_model.{name}"
        elif name.startswith("model.language_model."):
            name = name.replace("model.language_model.", "language_model.model.")
        tensors[name.removeprefix("model.")] = each
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    given = VISION_CASES["LLaVA 1.5"].image(0)
    ours, theirs = (tower_of(load(each)).encode(given, 16).rows for each in (old, new))
    assert torch.equal(ours, theirs)


def refusal(architecture: str, **raw: Any) -> str:
    return image_refusal(architecture, raw)


def test_facts_say_whether_a_model_sees(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    assert takes_images(config)
    assert model_facts(config).takes_images
    assert image_refusal(config.architecture, config.raw) == ""
    raw = config.raw | {"architectures": ["MllamaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not takes_images(read_config(tmp_path))


def test_refusals_name_the_architecture_and_the_reason() -> None:
    cross = "its decoder attends to images by layers of its own (MllamaForConditionalGeneration)"
    assert refusal("MllamaForConditionalGeneration", vision_config={}) == cross
    assert "token ids of an image" in refusal("Emu3ForConditionalGeneration"), "without the key"
    new = "preprocessing of its images is not implemented (NewForConditionalGeneration)"
    assert refusal("NewForConditionalGeneration", vision_config={}) == new
    assert refusal("LlamaForCausalLM") == "LlamaForCausalLM is a text model"


def test_every_class_of_transformers_is_accounted_for() -> None:
    """The classes of newer releases, too: their configurations have a part for images."""
    names = set(classes_of(text_parts=True))
    assert len(names) >= 90
    assert names >= IMAGE_ARCHITECTURES
    assert not IMAGE_ARCHITECTURES & REFUSALS.keys()
    for name in names - TEXT_ARCHITECTURES:
        assert is_for_images(name, {}) or "vision_config" in configuration_of(name), name
    for name in TEXT_ARCHITECTURES:
        assert "vision_config" not in configuration_of(name)


def configuration_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = getattr(transformers, name).config_class().to_dict()
    return values


def test_the_documentation_names_every_class_with_its_reason() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = text.partition("## Vision-language models")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    documented = {name: row[-1].strip() for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert documented.keys() >= IMAGE_ARCHITECTURES
    for name, reason in REFUSALS.items():
        assert documented[name] == reason, name
