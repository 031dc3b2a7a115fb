"""Which models of transformers take images, and why the others do not.

``python -m tests.tools.survey_images [CLASS ...]`` goes through the classes that take images and
text. It compares the rows that a miniature's tower makes of random images, and the logits of
prompts with these images, fed in chunks. It prints a line per class, and the counts:

    runs      rows and logits are the same
    refused   with the reason
    unmade    no miniature could be made, or transformers cannot run it
    WRONG     it runs, and computes something else: a mistake here

Those that take images are the miniatures of the parity tests (:mod:`tests.parity.vision`).
``--try`` makes miniatures of all classes as if they took images, to find those that could: name a
few, it is slow.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from tests.parity.families import TOLERANCE, make_checkpoint, random_ids
from tests.parity.vision import check_vision
from tests.parity.vision_cases import VISION_CASES
from tests.tools.image_prompts import ImagePrompt
from tests.tools.paged_run import PagedRun, load
from tests.tools.survey import SECONDS, Late, alarm, classes_of, configurations
from tgi_cli.errors import TgiError
from tgi_cli.models import CausalLM, image_support
from tgi_cli.models.hf.towers import towers_without_libraries
from tgi_cli.models.image_support import image_refusal

IMAGE = 250
"""The id of placeholder tokens."""

_IMAGE_IDS = ("image_token_id", "image_token_index", "im_patch_id", "img_context_token_id")
"""What configurations call it."""

Inputs = dict[str, Tensor]


def survey(name: str, folder: Path, trying: bool = False) -> tuple[str, str]:
    """What became of the class ``name``, and why."""
    kind = getattr(transformers, name)
    if not trying:
        return _known(name, folder)
    why = ""
    for config in configurations(kind):
        try:
            if isinstance(config, Exception):
                raise config
            oracle = _written(kind, config, folder)
            image, rows = _seen(oracle, config)
            break
        except Late:
            raise
        except Exception as error:  # whatever the class has against the sizes
            why = why or f"{type(error).__name__}: {error}"
    else:
        return "unmade", why
    chosen = image_support.IMAGE_ARCHITECTURES | {name}
    with (
        mock.patch.object(image_support, "IMAGE_ARCHITECTURES", chosen) if trying else nullcontext()
    ):
        try:
            model = load(folder)
        except TgiError as error:
            return "refused", str(error)
    if model.vision is None:
        return "refused", model.image_refusal
    try:
        ours = model.vision.encode(image, len(rows))
    except ValueError as error:
        return "refused" if trying else "WRONG", str(error)
    text = random_ids(40, seed=1)
    prompt = ImagePrompt.of([text[:9], ours, text[9:]], IMAGE)
    try:
        wanted = _logits(oracle, prompt.ids, image)
    except Late:
        raise
    except Exception as error:
        return "unmade", f"{type(error).__name__}: {error}"
    off = (ours.rows - rows).abs().max().item()
    worst = (_fed(model, prompt) - wanted).abs().max().item()
    spread = wanted.std().item()
    fine = off < TOLERANCE * max(1.0, rows.std().item()) and worst < TOLERANCE * max(1.0, spread)
    native = "" if type(model).__name__.startswith("Transformers") else "; defined here"
    return (
        "runs" if fine else "WRONG",
        f"rows {len(rows)}, {off:.1e} of {rows.std().item():.2f}; logits {worst:.1e} of "
        f"{spread:.2f}; deepstack {len(ours.deepstack)}{native}",
    )


def _known(name: str, folder: Path) -> tuple[str, str]:
    """The outcome of a class, by the miniature of the parity tests if it takes images."""
    if name not in image_support.IMAGE_ARCHITECTURES:
        return "refused", image_refusal(name, {})
    case = next(each for each in VISION_CASES.values() if each.case.model == name)
    result = check_vision(case, make_checkpoint(case.case, folder))
    differences = (result.max_feature_difference, result.max_logit_difference)
    fine = max(differences) < TOLERANCE and result.identical == result.compared
    return (
        "runs" if fine else "WRONG",
        f"rows {differences[0]:.1e}; logits {differences[1]:.1e} of {result.logit_std:.2f}; "
        f"greedy tokens {result.identical} of {result.compared}",
    )


def _written(kind: Any, config: Any, folder: Path) -> Any:
    """transformers' model of a checkpoint with random weights, which is written."""
    for key in _IMAGE_IDS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, IMAGE)
    config.architectures = [kind.__name__]
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.0 / weight[0].numel() ** 0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}))
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _seen(oracle: Any, config: Any) -> tuple[Inputs, Tensor]:
    """An image that the class takes, found by trial, and its rows."""
    inner = oracle.base_model
    core = inner if hasattr(inner, "get_image_features") else oracle
    error: Exception | None = None
    for inputs in _images(config):
        try:
            with torch.inference_mode():
                output = core.get_image_features(**inputs, return_dict=True)
            return inputs, _flat(getattr(output, "pooler_output", output))
        except Late:
            raise
        except Exception as raised:
            error = error or raised
    raise error or ValueError("it takes no image of any kind known here")


def _flat(features: Any) -> Tensor:
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([_flat(each) for each in features])


def _images(config: Any) -> Iterator[Inputs]:
    """Random images as processors of various families make them."""
    eye = getattr(config, "vision_config", config)

    def size(*names: str, default: int) -> int:
        for name in names:
            value = getattr(eye, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int):
                return value
        return default

    patch, side = size("patch_size", default=14), size("image_size", default=56)
    merge = size("spatial_merge_size", "merge_size", default=2)
    frames, colours = size("temporal_patch_size", default=1), size("in_channels", default=3)
    height, width = 2 * merge, 3 * merge
    grid = torch.tensor([[1, height, width]])
    flat = colours * frames * patch * patch
    merges = {"image_merge_sizes": torch.tensor([merge])}
    patches = height * width
    shapes: tuple[tuple[tuple[int, ...], Mapping[str, Tensor]], ...] = (
        ((patches, flat), {"image_grid_thw": grid}),
        ((patches, colours * patch * patch), {"image_grid_thw": grid}),
        ((patches, colours, patch, patch), {"image_grid_thw": grid}),
        ((1, patches, colours, patch, patch), {"image_grid_thw": grid}),
        ((patches, flat), {"image_grid_thw": grid} | merges),
        ((1, 3, side, side), {"image_sizes": torch.tensor([[side, side]])}),
        ((1, 3, 3, side, side), {"image_sizes": torch.tensor([[2 * side, side]])}),
        ((1, 3, side, side), {}),
        ((2, 3, side, side), {}),
        ((1, 2, 3, side, side), {}),
        (
            (1, 2, 3, side, side),
            {"pixel_attention_mask": torch.ones(1, 2, side, side, dtype=torch.int64)},
        ),
    )
    for shape, others in shapes:
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        yield {"pixel_values": pixels} | dict(others)


def _logits(oracle: Any, ids: list[int], image: Inputs) -> Tensor:
    """transformers' logits of the prompt, [n, vocab]."""
    given: dict[str, Tensor] = {"input_ids": torch.tensor([ids]), **image}
    kinds = (given["input_ids"] == IMAGE).long()
    parameters = inspect.signature(inspect.unwrap(type(oracle).forward)).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in parameters:
            given[name] = kinds
    with torch.inference_mode():
        logits: Tensor = oracle(**given).logits[0]
        return logits


def _fed(model: CausalLM, prompt: ImagePrompt) -> Tensor:
    """Our logits of the prompt, in chunks."""
    run, choose, start = PagedRun(model, torch.float32, None), random.Random(1), 0
    pieces = []
    while start < len(prompt.ids):
        end = prompt.end(start, choose.choice((1, 3, 7, 16)))
        images = {"a": prompt.chunk(start, end)}
        pieces.append(run.step({"a": prompt.ids[start:end]}, images=images)["a"])
        start = end
    return torch.cat(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.survey_images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="default: all of them")
    parser.add_argument("--try", dest="trying", action="store_true", help="see above")
    options = parser.parse_args()
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    signal.signal(signal.SIGPROF, alarm)
    counts: Counter[str] = Counter()
    for name in options.classes or classes_of(text_parts=True):
        getattr(transformers, name)  # its module is imported now
        with tempfile.TemporaryDirectory() as folder, towers_without_libraries():
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                outcome, why = survey(name, Path(folder), options.trying)
            except Late:
                outcome, why = "unmade", f"it takes more than {SECONDS} s of the processor"
            except Exception as error:  # one class more or less shall not end the survey
                outcome, why = "WRONG", f"{type(error).__name__}: {error}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        counts[outcome] += 1
        print(f"{outcome:8} {name:40} {' '.join(why.split())[:240]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
