"""A deployment that is watched and removed."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ExitCode, ShardError
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_cli.ray_serve.run._STATUS_SECONDS", 0.01)
    monkeypatch.setattr(serve, "delete", lambda name: None)


@pytest.mark.usefixtures("quick")
def test_a_signal_does_not_wait_for_a_cluster_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released = threading.Event(), threading.Event()
    signals: SimpleQueue[signal.Signals] = SimpleQueue()

    def status() -> Any:
        asked.set()
        released.wait(60)
        raise ConnectionError

    monkeypatch.setattr(serve, "status", status)
    threading.Thread(target=lambda: asked.wait(60) and signals.put(signal.SIGTERM)).start()
    assert deployment(grace=0).watch(signals) == ExitCode.OK
    released.set()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("hangs", [True, False])
def test_a_cluster_without_answers_is_gone(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    released = threading.Event()

    def status() -> Any:
        if hangs:
            released.wait(60)
        raise ConnectionError("no GCS\nmore")

    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr("tgi_cli.ray_serve.run._LOST_SECONDS", 0.5)
    cause = "no answer" if hangs else "no GCS"
    with pytest.raises(ShardError, match=f"the Ray cluster is gone: {cause}$"):
        deployment(grace=0).watch(SimpleQueue())
    released.set()


@pytest.mark.usefixtures("quick")
def test_an_application_that_was_removed_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states = {"engine": SimpleNamespace(replica_states={"RUNNING": 2, "STARTING": 0})}
    answers = iter([{"tgi": SimpleNamespace(deployments=states)}, {}])
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=next(answers)))
    with caplog.at_level("INFO", "tgi_cli"), pytest.raises(ShardError, match="was removed"):
        deployment(grace=0).watch(SimpleQueue())
    assert "replicas: 2 running" in caplog.text
