"""Preprocessing of images and the ids of prompts, against transformers' processors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tools.image_models import IMAGE_MODELS, OracleProcessor, write_image_model
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.vision.image_format import ImageFormat, expand
from tgi_cli.vision.images import ImageError, ImageOptions, ImageProcessor, ProcessedImage
from tgi_cli.vision.model_formats import image_format
from tgi_cli.vision.processing import image_processor

SIZES = {
    "photo": (160, 90),
    "portrait": (61, 143),
    "square": (112, 112),
    "small": (20, 9),
    "point": (1, 1),
    "ribbon": (300, 6),
    "large": (900, 700),
}
NAMES = list(IMAGE_MODELS)
KINDS = {"pixel_values": np.float32, "pixel_attention_mask": np.bool_}
DIGEST = bytes(32)
PLAIN = ImageOptions()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


class Miniature:
    """A family's processor and its oracle, of one folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = write_image_model(name, folder)
        self.tokenizer = Tokenizer.load(self.folder)
        self.format: ImageFormat = image_format(self.folder, self.tokenizer)
        self.oracle = OracleProcessor(name, self.folder)
        self.model_type = IMAGE_MODELS[name].config["model_type"]

    def processor(self, max_rows: int | None = None, dtype: str = "float32") -> ImageProcessor:
        return image_processor(self.folder, self.format, max_rows, dtype)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=self.format.special_tokens)


@pytest.fixture(scope="module")
def miniatures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str) -> Miniature:
        return Miniature(name, tmp_path_factory.mktemp("miniature"))

    return make


def processed(
    miniature: Miniature, image: Image.Image, options: ImageOptions = PLAIN
) -> ProcessedImage:
    return miniature.processor().process(image, options, DIGEST)


def refused_by(miniature: Miniature, image: Image.Image) -> bool:
    try:
        miniature.oracle(miniature.format.placeholder, [image])
    except (ValueError, ZeroDivisionError):
        return True
    return False


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_one_image_is_what_transformers_makes_of_it(miniatures: Any, name: str, size: str) -> None:
    miniature = miniatures(name)
    image = noise(*SIZES[size])
    if refused_by(miniature, image):
        with pytest.raises(ImageError, match=r"cannot take an image of \d+ x \d+ pixels"):
            processed(miniature, image)
        return
    expected = miniature.oracle(f"A {miniature.format.placeholder} B", [image])
    found = processed(miniature, image)
    ids, spans = expand(
        f"A {miniature.format.placeholder} B",
        [found.replacement],
        miniature.format,
        miniature.encode,
    )
    assert ids == expected["input_ids"][0].tolist()
    assert sum(count for _, count in spans[0]) == found.num_rows
    for key, tensor in found.tensors.items():
        assert tensor.dtype == KINDS.get(key, np.int64)
        np.testing.assert_array_equal(tensor, expected[key])


PROMPTS = {
    "one": "{}",
    "between words": "first{}then {} last",
    "between lines": "a\n\n{}\n{}\n\nb\n",
    "adjacent": "{}{}{} which?",
    "at both ends": "{} and\n\n\n{}",
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_ids_of_a_prompt_are_those_of_transformers(miniatures: Any, name: str, prompt: str) -> None:
    miniature = miniatures(name)
    text = PROMPTS[prompt].replace("{}", miniature.format.text)
    count = PROMPTS[prompt].count("{}")
    images = [noise(*size, seed) for seed, size in enumerate([(90, 70), (70, 160), (200, 120)])]
    images = images[:count]
    options = ImageOptions(several=count > 1)
    replacements = [processed(miniature, image, options).replacement for image in images]
    ids, spans = expand(text, replacements, miniature.format, miniature.encode)
    assert ids == miniature.oracle(text, images)["input_ids"][0].tolist()
    covered = [position for own in spans for at, rows in own for position in range(at, at + rows)]
    token = miniature.format.placeholder_id
    assert covered == [position for position, found in enumerate(ids) if found == token]
    rows = [sum(count for _, count in own) for own in spans]
    assert rows == [sum(piece.rows for piece in pieces) for pieces in replacements]


def test_one_of_several_images_is_a_square_for_onevision(miniatures: Any) -> None:
    miniature = miniatures("LLaVA-OneVision")
    images = [noise(160, 90), noise(50, 80, 1)]
    several = [processed(miniature, image, ImageOptions(several=True)) for image in images]
    expected = miniature.oracle("<image><image>", images)
    for index, found in enumerate(several):
        assert found.num_rows == 5
        pixels = found.tensors["pixel_values"][0]
        np.testing.assert_array_equal(pixels, expected["pixel_values"][index])
        assert found.tensors["batch_num_images"].tolist() == [2]
    alone = miniature.processor()
    data = b"a file"
    modes = {alone.digest(data, ImageOptions(several=several)) for several in (False, True)}
    assert len(modes) == 2


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_other_modes_are_converted_before(miniatures: Any, mode: str) -> None:
    image = noise(50, 40).convert(mode)
    found = processed(miniatures("Qwen2-VL"), image.convert("RGB"))
    expected = miniatures("Qwen2-VL").oracle("<|image_pad|>", [image])
    np.testing.assert_array_equal(found.tensors["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pixels_are_rounded_as_torch_does(miniatures: Any, name: str, dtype: str) -> None:
    miniature, image = miniatures(name), noise(160, 90)
    whole = processed(miniature, image).tensors["pixel_values"]
    half = miniature.processor(dtype=dtype).process(image, ImageOptions(), DIGEST)
    pixels = half.tensors["pixel_values"]
    assert pixels.dtype == (np.uint16 if dtype == "bfloat16" else np.float16)
    kind = getattr(torch, dtype)
    assert torch.equal(torch.from_numpy(pixels).view(kind), torch.from_numpy(whole).to(kind))


SHAPES = [(1, 1), (7, 900), (1200, 30), (640, 480), (480, 640), (1000, 1000), (33, 57), (2000, 900)]


@pytest.mark.parametrize("max_rows", [None, 40, 9, 1])
@pytest.mark.parametrize("name", NAMES)
def test_no_image_takes_more_rows_than_told(
    miniatures: Any, name: str, max_rows: int | None
) -> None:
    miniature = miniatures(name)
    processor = miniature.processor(max_rows)
    rows = []
    for shape in SHAPES:
        for low_detail in (False, True):
            try:
                found = processor.process(noise(*shape), ImageOptions(low_detail), DIGEST)
            except ImageError:
                continue
            rows.append(found.num_rows)
            assert found.num_rows <= processor.max_rows
    assert rows
    smallest = {"SmolVLM": 4, "Idefics 3": 4, "LLaVA 1.5": 4, "Gemma 3": 4, "PaliGemma": 4}
    smallest["Idefics 2"] = 4
    smallest |= {
        "InternVL": 4,
        "Aya Vision": 4,
        "DeepSeek-VL": 4,
        "Janus": 4,
        "Qianfan-OCR": 4,
        "Mistral 3": 4,
        "Gemma 4": 70,
        "LLaVA-NeXT": 16,
        "LLaVA-OneVision": 16,
    }
    if max_rows is not None:
        assert processor.max_rows <= max(max_rows, smallest.get(name, 1))


@pytest.mark.parametrize("max_rows", [None, 100, 30])
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_image_takes_the_most_rows(
    miniatures: Any, name: str, max_rows: int | None
) -> None:
    processor = miniatures(name).processor(max_rows)
    largest = processor.process(noise(*processor.largest_image()), ImageOptions(), DIGEST)
    assert processor.max_rows * 0.8 <= largest.num_rows <= processor.max_rows
    for shape in SHAPES:
        try:
            found = processor.process(noise(*shape), ImageOptions(), DIGEST)
        except ImageError:
            continue
        assert found.num_rows <= largest.num_rows * 1.1


def test_where_rows_have_several_patches_the_rest_of_an_image_has_none(tmp_path: Path) -> None:
    """As in transformers: 5 x 3 patches are 2 x 1 rows, and a single patch is none."""
    folder = write_image_model("LightOnOCR", tmp_path, patch_size={"height": 14, "width": 14})
    tokenizer = Tokenizer.load(folder)
    made = image_format(folder, tokenizer)
    processor = image_processor(folder, made)
    found = processor.process(noise(40, 70), PLAIN, DIGEST)
    assert (found.num_rows, found.tensors["image_sizes"].tolist()) == (2, [[70, 42]])
    with pytest.raises(ImageError, match="cannot take an image of 9 x 30 pixels"):
        processor.process(noise(9, 30), PLAIN, DIGEST)
    assert processor.process(noise(*processor.largest_image()), PLAIN, DIGEST).num_rows == 16


def test_an_image_beyond_the_limit_is_refused(miniatures: Any) -> None:
    # GLM's processor makes it as high as a block, however wide it gets.
    with pytest.raises(ImageError, match=r"300 x 3 pixels takes 80 tokens, more than .* 64"):
        processed(miniatures("GLM-4.1V"), noise(300, 3))


def test_tells_that_images_are_shrunk(miniatures: Any) -> None:
    assert miniatures("Qwen2-VL").processor(20).note == (
        "images are shrunk to at most 20 tokens; the model allows 48"
    )
    assert miniatures("Qwen2-VL").processor(48).note == ""
    assert miniatures("Gemma 3").processor(1).note == ""


@pytest.mark.parametrize("name", ["Qwen3-VL", "GLM-4.1V"])
def test_low_detail_is_512_pixels_at_most(miniatures: Any, name: str, tmp_path: Path) -> None:
    miniature = miniatures(name)
    found = processed(miniature, noise(900, 900), ImageOptions(low_detail=True))
    same = processed(miniature, noise(900, 900).resize((512, 512), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found.tensors["pixel_values"], same.tensors["pixel_values"])


@pytest.mark.parametrize("name", NAMES)
def test_low_detail_takes_no_more_rows(miniatures: Any, name: str) -> None:
    miniature, image = miniatures(name), noise(900, 700)
    few = processed(miniature, image, ImageOptions(low_detail=True)).num_rows
    assert few <= processed(miniature, image).num_rows


def test_a_long_image_does_not_fill_the_memory(miniatures: Any) -> None:
    # CLIP's processor scales the shorter side to a fixed length.
    with pytest.raises(ImageError, match="cannot take an image of 20000 x 1 pixels"):
        processed(miniatures("LLaVA 1.5"), noise(20000, 1))
    square = processed(miniatures("LLaVA-OneVision"), noise(20000, 1), ImageOptions(several=True))
    assert square.num_rows == 5


@pytest.mark.parametrize(
    ("name", "grid"), [("Qwen2.5-VL", (2, 3)), ("Qwen3-VL", (2, 3)), ("GLM-4.6V", (2, 3))]
)
def test_rotary_positions_get_the_grid_of_rows(
    miniatures: Any, name: str, grid: tuple[int, int]
) -> None:
    block = 32 if name == "Qwen3-VL" else 28
    found = processed(miniatures(name), noise(grid[1] * block, grid[0] * block))
    assert found.grid == grid
    assert found.num_rows == 6


def test_rows_see_each_other_in_gemma_alone(miniatures: Any) -> None:
    image = noise(64, 64)
    seen = {name for name in NAMES if processed(miniatures(name), image).bidirectional}
    assert seen == {"Gemma 3", "Gemma 4", "PaliGemma"}
    whole = {name for name in NAMES if miniatures(name).format.prompt_bidirectional}
    assert whole == {"PaliGemma"}


def test_digests_differ_where_results_may(miniatures: Any) -> None:
    qwen, gemma = miniatures("Qwen2-VL"), miniatures("Gemma 3")
    low, high = ImageOptions(low_detail=True), ImageOptions()
    keys = [
        qwen.processor().digest(b"one", high),
        qwen.processor().digest(b"two", high),
        qwen.processor().digest(b"one", low),
        qwen.processor(9).digest(b"one", high),
        miniatures("Qwen3-VL").processor().digest(b"one", high),
        gemma.processor().digest(b"one", high),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert qwen.processor().digest(b"one", high) == keys[0]
    assert qwen.processor().digest(b"one", replace(high, several=True)) == keys[0]
    assert gemma.processor().digest(b"one", low) == keys[-1]


def test_keeps_the_digest(miniatures: Any) -> None:
    digest = bytes(range(32))
    found = miniatures("Qwen2-VL").processor().process(noise(60, 60), ImageOptions(), digest)
    assert found.digest == digest


def test_a_folder_without_a_usable_processor_is_refused_by_name(
    miniatures: Any, tmp_path: Path
) -> None:
    folder = write_image_model("Qwen2-VL", tmp_path)
    own = miniatures("Qwen2-VL").format
    for content in ("{", '{"image_processor_type": "NoSuchProcessor"}'):
        (folder / "preprocessor_config.json").write_text(content)
        with pytest.raises(UnsupportedModelError, match="its image processor cannot be used"):
            image_processor(folder, own)
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    with pytest.raises(UnsupportedModelError, match="this model takes no images"):
        image_processor(folder, own)


def test_a_ratio_without_bounds_is_refused_by_name(miniatures: Any, tmp_path: Path) -> None:
    folder = write_image_model("InternVL", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"downsample_ratio": 1e308}))
    with pytest.raises(UnsupportedModelError, match="its image processor cannot be used"):
        image_processor(folder, miniatures("InternVL").format)


def test_a_side_without_bounds_makes_no_difference(miniatures: Any, tmp_path: Path) -> None:
    folder = write_image_model("Pixtral", tmp_path)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"size": {"longest_edge": 10**15}}
    file.write_text(json.dumps(settings))
    processor = image_processor(folder, miniatures("Pixtral").format, 9)
    found = processor.process(noise(160, 90), PLAIN, DIGEST)
    assert 0 < found.num_rows <= 9


def test_settings_may_be_in_the_file_of_the_whole_processor(
    miniatures: Any, tmp_path: Path
) -> None:
    folder = write_image_model("Qwen3-VL", tmp_path)
    settings = (folder / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(f'{{"image_processor": {settings}}}')
    own = image_format(folder, Tokenizer.load(folder))
    found = image_processor(folder, own).process(noise(160, 90), PLAIN, DIGEST)
    same = processed(miniatures("Qwen3-VL"), noise(160, 90))
    np.testing.assert_array_equal(found.tensors["pixel_values"], same.tensors["pixel_values"])


PUBLISHED = {
    "LLaVA 1.5": {
        "crop_size": {"height": 28, "width": 28},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "image_processor_type": None,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "resample": 3,
        "size": {"shortest_edge": 28},
    },
    "Qwen2-VL": {
        "size": {"min_pixels": 4 * 784, "max_pixels": 48 * 784},
        "min_pixels": 4 * 784,
        "max_pixels": 48 * 784,
        "processor_class": "Qwen2VLProcessor",
    },
    "InternVL": {
        "crop_to_patches": False,
        "crop_size": None,
        "data_format": "channels_first",
        "device": None,
        "input_data_format": None,
        "return_tensors": None,
    },
    "Mistral 3": {"patch_size": 14, "rescale_factor": 0.00392156862745098, "resample": 3},
    "SmolVLM": {"video_sampling": {"fps": 1, "max_frames": 64}, "resample": 1},
    "Gemma 3": {"do_pan_and_scan": None, "do_convert_rgb": None, "image_seq_length": 256},
}
"""Forms of preprocessor_config.json that checkpoints have had."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_older_settings_mean_the_same(miniatures: Any, name: str, tmp_path: Path) -> None:
    folder = write_image_model(name, tmp_path, **PUBLISHED[name])
    processor = image_processor(folder, miniatures(name).format)
    found = processor.process(noise(160, 90), PLAIN, DIGEST)
    same = processed(miniatures(name), noise(160, 90))
    np.testing.assert_array_equal(found.tensors["pixel_values"], same.tensors["pixel_values"])


def test_needs_neither_torch_nor_torchvision(miniatures: Any, tmp_path: Path) -> None:
    miniature = miniatures("Qwen2.5-VL")
    noise(90, 70).save(tmp_path / "image.png")
    program = f"""
import sys
from pathlib import Path
from PIL import Image
from tgi_cli.vision.image_format import ImageFormat
from tgi_cli.vision.images import ImageOptions
from tgi_cli.vision.processing import hide_torch, image_processor
hide_torch()
own = ImageFormat(**{asdict(miniature.format)!r})
image = Image.open({str(tmp_path / "image.png")!r}).convert("RGB")
processor = image_processor(Path({str(miniature.folder)!r}), own)
print(processor.process(image, ImageOptions(), bytes(32)).num_rows)
print(sys.modules["torch"])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    rows = processed(miniature, noise(90, 70)).num_rows
    assert result.stdout.split() == [str(rows), "None"]
