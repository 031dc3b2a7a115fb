"""Model card of a quantized checkpoint: how it was made, and its evaluation.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import jinja2

from tgi_cli.files import read_text
from tgi_cli.quantize.evaluation import Evaluation
from tgi_cli.quantize.gptq import LayerReport
from tgi_cli.version import __version__

_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Keys of the original's metadata that apply to the quantized model, too."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TEMPLATE = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    keep_trailing_newline=True,
).get_template("model_card.md.jinja")


def model_card(
    *,
    name: str,
    original: str,
    folder: Path,
    description: str,
    command: str,
    calibration: str,
    layers: Sequence[LayerReport],
    ignored: int,
    evaluation: Evaluation | None,
) -> str:
    """Compose the text of README.md.

    Args:
        name: name of the output.
        original: model id or folder, as the user gave it.
        folder: the original's folder.
        description: the recipe in a few words.
        command: the command line.
        calibration: description of the samples; empty if there were none.
        layers: reports of the quantized layers.
        ignored: number of linear layers that were not quantized.
        evaluation: comparison with the original, or None.
    """
    known = sorted((each for each in layers if not math.isnan(each.loss)), key=lambda e: -e.loss)
    return _TEMPLATE.render(
        metadata=_metadata(original, folder),
        name=name,
        base=Path(original).name,
        version=__version__,
        description=description,
        command=command,
        calibration=calibration,
        layers=layers,
        ignored=ignored,
        evaluation=evaluation,
        known=known,
        mean=fmean(each.loss for each in known) if known else math.nan,
        notes=[each for each in layers if each.note],
    )


def _metadata(original: str, folder: Path) -> list[str]:
    lines = ["library_name: transformers", "tags:", "- quantized", "- tgi"]
    if _HUB_ID.fullmatch(original) and not Path(original).exists():
        lines += [f"base_model: {original}", "base_model_relation: quantized"]
    card = folder / "README.md"
    text = read_text(card, errors="replace") if card.is_file() else ""
    if text.startswith("---\n"):
        inherited = False
        for line in text[4:].partition("\n---")[0].splitlines():
            if not line.startswith((" ", "-")):
                inherited = line.partition(":")[0] in _INHERITED
            if inherited:
                lines.append(line)
    return lines
