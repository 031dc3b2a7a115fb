"""How a model's makers want it sampled: generation_config.json, for requests that do not say.

It concerns the OpenAI routes. On TGI's own, silence means what it meant there.
https://huggingface.co/docs/transformers/main_classes/text_generation
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path

from tgi_cli.files import read_json

logger = logging.getLogger(__name__)

_LARGEST = float((1 << 31) - 1)
"""Of any parameter: what requests may say, too."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an absent parameter of a /v1 request means; OpenAI's meaning unless a model says."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, model_path: Path) -> SamplingDefaults:
        """Those of a model's folder; a value that cannot be is passed over, with a warning.

        ``do_sample`` is not read: its absence, which is usual, would make models greedy.
        """
        file = model_path / "generation_config.json"
        try:
            stated = read_json(file)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            logger.warning("%s is not used: %s", file, error)
            return cls()
        if not isinstance(stated, dict):
            return cls()
        found: dict[str, float] = {}
        for each in fields(cls):
            value = stated.get(each.name)
            if value is None:
                continue
            kind = int if each.name == "top_k" else float
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not abs(value) <= _LARGEST  # NaN is not, either
                or not _sane(each.name, value)
            ):
                logger.warning("%s: %s is %.40r, which is not used", file, each.name, value)
                continue
            found[each.name] = kind(value)
        defaults = cls(**found)  # type: ignore[arg-type]
        if defaults != cls():
            told = ", ".join(f"{name} {value:g}" for name, value in found.items())
            logger.info("sampling by default with the model's %s", told)
        return defaults


def _sane(name: str, value: float) -> bool:
    if name in ("top_p", "typical_p"):
        return 0 < value <= 1
    if name == "repetition_penalty":
        return value > 0
    if name == "min_p":
        return 0 <= value <= 1
    return value >= 0
