"""The bundled miniature model: a trained Llama checkpoint small enough to ship in the package.

`tgi serve` without a model serves it, tests load it, and quantization measures its perplexity on
a text that it never saw. `model/README.md` is its model card.
"""

from pathlib import Path

MODEL_ID = "tgi-demo"
"""The name under which the bundled model is served."""

_FOLDER = Path(__file__).resolve().parent

HELDOUT_PATH = _FOLDER / "heldout"
"""The folder of the held-out text."""


def model_path() -> Path:
    """Return the folder of the bundled checkpoint (config, tokenizer, `model.safetensors`)."""
    return _FOLDER / "model"


def heldout_text() -> str:
    """Return the held-out text for perplexity: documentation pages first, then modules.

    About 140 KB of plain text. None of its files took part in training or in the tokenizer.
    """
    names = ("documentation.txt", "source.txt")
    return "\n\n".join((HELDOUT_PATH / name).read_text(encoding="utf-8") for name in names)
