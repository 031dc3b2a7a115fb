"""What the environment says about the hub: where it is, who asks, where files are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TRUE = {"1", "ON", "YES", "TRUE"}


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().upper() in _TRUE


def _first(*names: str) -> str | None:
    for name in names:
        if value := os.environ.get(name, "").strip():
            return value
    return None


@dataclass(frozen=True)
class HubEnvironment:
    """The settings of one download, read when it starts rather than at import.

    ``token`` is None for an anonymous caller. ``cache`` is huggingface_hub's cache, in its
    documented layout, so that other tools find what was downloaded and the other way round.
    Sources: https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """

    endpoint: str
    token: str | None
    cache: Path
    offline: bool
    timeout: float
    """Seconds without a byte before a connection counts as lost."""
    prefer_xet: bool
    """Whether the user asked for hf-xet's parallel transfers, which do not resume inside a file."""

    @classmethod
    def read(cls) -> HubEnvironment:
        """The environment variables, TGI's old spellings included; then huggingface_hub's own."""
        from huggingface_hub import constants, get_token

        token = _first("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        cache = _first("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
        if cache is None and (home := _first("HF_HOME")):
            cache = str(Path(home) / "hub")
        return cls(
            endpoint=(_first("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
            token=token or get_token(),
            cache=Path(os.path.expandvars(cache or constants.HF_HUB_CACHE)).expanduser(),
            offline=_is_true("HF_HUB_OFFLINE") or _is_true("TRANSFORMERS_OFFLINE"),
            timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
            prefer_xet=_is_true("HF_XET_HIGH_PERFORMANCE") and not _is_true("HF_HUB_DISABLE_XET"),
        )
