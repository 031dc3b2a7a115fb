"""Model families, their registry and the loading of their weights; independent of requests.

Reading a configuration needs no torch, and does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tgi_cli.models.config import ModelConfig, read_config
from tgi_cli.models.registry import model_facts

if TYPE_CHECKING:
    from tgi_cli.models.base import CausalLM
    from tgi_cli.models.loader import load_model

__all__ = ["CausalLM", "ModelConfig", "load_model", "model_facts", "read_config"]


def __getattr__(name: str) -> Any:
    if name == "CausalLM":
        from tgi_cli.models.base import CausalLM

        return CausalLM
    if name == "load_model":
        from tgi_cli.models.loader import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
