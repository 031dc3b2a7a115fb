"""Default sampling parameters of a model: its generation_config.json.

They apply to the OpenAI routes. TGI's routes have TGI's defaults.
https://huggingface.co/docs/transformers/main_classes/text_generation
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path

from tgi_cli.files import read_json

logger = logging.getLogger(__name__)

_LARGEST = float((1 << 31) - 1)
"""Largest value of a parameter, as in requests."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default parameters of /v1 requests: OpenAI's, unless the model has its own."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, model_path: Path) -> SamplingDefaults:
        """Read the defaults of a model folder; an invalid value is ignored with a warning.

        ``do_sample`` is ignored: most models omit it, which would make them greedy.
        """
        file = model_path / "generation_config.json"
        try:
            config = read_json(file)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored: %s", file, error)
            return cls()
        if not isinstance(config, dict):
            return cls()
        found: dict[str, float] = {}
        for each in fields(cls):
            value = config.get(each.name)
            if value is None:
                continue
            kind = int if each.name == "top_k" else float
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not abs(value) <= _LARGEST  # NaN fails, too
                or not _in_range(each.name, value)
            ):
                logger.warning("%s: invalid %s %.40r is ignored", file, each.name, value)
                continue
            found[each.name] = kind(value)
        defaults = cls(**found)  # type: ignore[arg-type]
        if defaults != cls():
            values = ", ".join(f"{name} {value:g}" for name, value in found.items())
            logger.info("default sampling parameters of the model: %s", values)
        return defaults


def _in_range(name: str, value: float) -> bool:
    if name in ("top_p", "typical_p"):
        return 0 < value <= 1
    if name == "repetition_penalty":
        return value > 0
    if name == "min_p":
        return 0 <= value <= 1
    return value >= 0
