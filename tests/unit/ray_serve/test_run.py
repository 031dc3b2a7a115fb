"""The removal of a deployment."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ExitCode
from tgi_cli.ray_serve.config import RayConfig
from tgi_cli.ray_serve.run import RayDeployment
from tgi_cli.router.config import RouterConfig

serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed")


def deployment(grace: int) -> RayDeployment:
    model = ServeConfig(model_id="m", graceful_termination_timeout=grace)
    router = RouterConfig(model_path=Path(), model_id="m", engine_url="")
    return RayDeployment(RayConfig(), model, router, lambda config: (config, Path()))


def test_requests_may_take_longer_than_ray_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def delete(name: str) -> None:
        calls.append(name)
        if len(calls) < 3:
            raise TimeoutError

    monkeypatch.setattr(serve, "delete", delete)
    assert deployment(grace=600).remove(SimpleQueue()) == ExitCode.OK
    assert calls == ["tgi"] * 3


def test_requests_do_not_keep_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def delete(name: str) -> None:
        calls.append(name)
        raise TimeoutError

    monkeypatch.setattr(serve, "delete", delete)
    monkeypatch.setattr("tgi_cli.ray_serve.run.REMOVAL_SECONDS", -1.0)
    assert deployment(grace=0).remove(SimpleQueue()) == ExitCode.OK
    assert calls == ["tgi"]
