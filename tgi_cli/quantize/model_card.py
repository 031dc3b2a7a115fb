"""Model card of a quantized checkpoint: how it was made, and its evaluation.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tgi_cli.files import read_text
from tgi_cli.quantize.evaluation import Evaluation
from tgi_cli.quantize.gptq import LayerReport
from tgi_cli.version import __version__

_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Keys of the original's metadata that apply to the quantized model, too."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WORST = 5


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
    lines = ["---", *_metadata(original, folder), "---", "", f"# {name}", ""]
    lines += [
        f"{Path(original).name} quantized by tgi "
        f"{__version__}: {description}. {len(layers)} linear layers are quantized, "
        f"{ignored} are not; embeddings and norms are unchanged.",
        "",
        "```",
        command,
        "```",
        "",
        f"Calibrated with {calibration}." if calibration else "No calibration was needed.",
    ]
    if evaluation is not None:
        lines += ["", f"On {evaluation.tokens} tokens of held-out text:", ""]
        lines += ["| | original | quantized |", "|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in evaluation.rows()]
    known = sorted((each for each in layers if each.loss == each.loss), key=lambda e: -e.loss)
    if known:
        mean = sum(each.loss for each in known) / len(known)
        lines += [
            "",
            f"Squared error of a layer's outputs relative to their mean square: {mean:.1e} on "
            "average; the largest:",
            "",
            "| layer | error |",
            "|---|---|",
            *(f"| {each.name} | {each.loss:.1e} |" for each in known[:_WORST]),
        ]
    if notes := [each for each in layers if each.note]:
        lines += ["", f"{len(notes)} layers deviate from the recipe, such as:", ""]
        lines += [f"- {each.name}: {each.note}" for each in notes[:_WORST]]
    return "\n".join(lines) + "\n"


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
