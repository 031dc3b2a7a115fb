"""Commands run in this process, with what they start replaced."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tgi_cli.config import ServeConfig
from tgi_cli.config.settings import SETTINGS
from tgi_cli.launcher import serve as launcher
from tgi_cli.router.config import RouterConfig


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting comes from the machine that the tests run on."""
    for setting in SETTINGS:
        for name in setting.all_variables:
            monkeypatch.delenv(name, raising=False)
    for name in ("TGI_TRACEBACK", "HF_HUB_ENABLE_HF_TRANSFER", "DEBUG", "LOG_COLORIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HUB_CACHE", "DISABLE_CUSTOM_KERNELS", "WEIGHTS_CACHE_OVERRIDE", "NO_COLOR"):
        # What a command puts there is gone after the test.
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `tgi serve` would have started, as ``config`` and ``router``."""
    seen: dict[str, Any] = {}

    def serve(config: ServeConfig, router: RouterConfig, _locate: object) -> int:
        seen.update(config=config, router=router)
        return 0

    monkeypatch.setattr(launcher, "serve", serve)
    return seen
