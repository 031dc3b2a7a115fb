"""`tgi deploy ray` and `tgi serve --distributed ray`, up to the point where Ray starts."""

from __future__ import annotations

from typing import Any

import pytest

from tgi_cli.cli import main
from tgi_cli.errors import ExitCode
from tgi_cli.ray_serve import run as ray_run
from tgi_cli.ray_serve.config import RayConfig

CLUSTER = ("deploy", "ray", "org/model", "--port", "8080")
JOIN = ("serve", "org/model", "--distributed", "ray", "--port", "8080")


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be deployed: RayConfig, ServeConfig and RouterConfig."""
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> int:
        calls.append(arguments)
        return ExitCode.OK

    monkeypatch.setattr(ray_run, "run", run)
    return calls


def test_a_cluster_on_this_machine(deployed: list[tuple[Any, ...]]) -> None:
    words = ["--replicas", "2", "--max-replicas", "4", "--cpus", "8", "--max-total-tokens", "512"]
    assert main.run([*CLUSTER, *words, "--api-key", "secret"]) == ExitCode.OK
    ((config, model, router, _),) = deployed
    assert config == RayConfig(own_cluster=True, replicas=2, max_replicas=4, cluster_cpus=8)
    assert (model.model_id, model.port, model.max_total_tokens) == ("org/model", 8080, 512)
    assert (router.api_key, router.max_total_tokens) == ("secret", 512)


def test_another_cluster(deployed: list[tuple[Any, ...]]) -> None:
    words = ["--ray-address", "10.0.0.1:6379", "--min-replicas", "1", "--num-shard", "2"]
    assert main.run([*JOIN, *words]) == ExitCode.OK
    ((config, model, _, _),) = deployed
    assert config == RayConfig(ray_address="10.0.0.1:6379", replicas=1, min_replicas=1)
    assert model.num_shard == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*CLUSTER, "-o", "file"), "--output is for files"),
        ((*CLUSTER, "--memory", "1GiB"), "--memory is for files"),
        ((*JOIN, "another/model"), "one model"),
        ((*JOIN, "--sleep-idle-seconds", "5"), "do not sleep"),
        (("serve", "org/model", "--max-replicas", "2"), "--max-replicas is for deployments on Ray"),
        (("serve", "a", "b", "--replica-cpus", "2"), "--replica-cpus is for deployments on Ray"),
    ],
)
def test_what_does_not_go_together(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*words]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [CLUSTER, JOIN])
def test_without_ray_the_command_says_how_to_install_it(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert main.run([*words]) == ExitCode.USAGE
    text = capsys.readouterr().err
    assert "Ray Serve is not installed" in text
    assert "[ray]" in text
