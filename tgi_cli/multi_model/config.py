"""What a server of several models is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tgi_cli.config.settings import default
from tgi_cli.multi_model.model_scheduler import SwitchPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One of the models.

    Attributes:
        name: what requests call it; unique.
        model_id: its id or folder.
        path: its files.
        names: all names that requests may use, ``name`` first.
        arguments: flags of its ``tgi serve``.
        memory: estimate of the bytes that it takes, until it is measured.
        idle_seconds: time without requests after which it is unloaded; 0 for never.
    """

    name: str
    model_id: str
    path: Path
    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    memory: int = 0
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModelConfig:
    """Settings of the server in front of the models; fields that it shares with
    :class:`tgi_cli.router.config.RouterConfig` mean the same.

    Attributes:
        models: the first is the one for requests that name none.
        policy: when they are loaded and unloaded.
        payload_limit: bytes of a request's body; each model's server has its own limit, too.
    """

    models: tuple[ModelSpec, ...]
    policy: SwitchPolicy
    hostname: str
    port: int
    payload_limit: int
    graceful_termination_timeout: int
    api_key: str | None = field(default=None, repr=False)
    cors_allow_origin: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    otlp_endpoint: str | None = None
    otlp_service_name: str = default("otlp_service_name")
    logger_level: str = "INFO"
    json_output: bool = False

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, separately."""
        return () if self.api_key is None else tuple(self.api_key.split(","))
