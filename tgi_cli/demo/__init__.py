"""The bundled miniature model: a trained Llama checkpoint small enough to ship in the package.

`tgi serve` without a model serves it, tests load it, and quantization measures its perplexity on
a text that it never saw. `model/README.md` is its model card, `train.py` the script that made it.
"""

from pathlib import Path

MODEL_ID = "tgi-demo"
"""The name under which the bundled model is served."""

_HERE = Path(__file__).resolve().parent
_HELDOUT = ("heldout/documentation.txt", "heldout/source.txt")


def model_path() -> Path:
    """Return the folder of the bundled checkpoint (config, tokenizer, `model.safetensors`)."""
    return _HERE / "model"


def heldout_text() -> str:
    """Return the held-out text for perplexity: documentation pages first, then modules.

    About 140 KB of plain text. None of its files took part in training or in the tokenizer.
    """
    return "\n\n".join((_HERE / name).read_text(encoding="utf-8") for name in _HELDOUT)
