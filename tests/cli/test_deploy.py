"""`tgi deploy`: the settings of a server in a file, with the memory that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tgi_cli import demo
from tgi_cli.cli import main
from tgi_cli.deploy import memory
from tgi_cli.errors import ExitCode
from tgi_cli.worker.sizing.saved_profile import SavedProfile

PROFILE = SavedProfile(
    activation_bytes=200 << 20,
    graphs=False,
    step_seconds=0.1,
    max_total_tokens=2048,
    weight_bytes=10 << 20,
    block_bytes=1 << 20,
    when=1.0,
)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model was measured."""
    monkeypatch.setattr(memory.saved_profile, "load", lambda key: PROFILE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def deploy(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(["deploy", *words]) == ExitCode.OK, capsys.readouterr().err
    return capsys.readouterr().out


def command(text: str) -> list[str]:
    found: list[str] = yaml.safe_load(text)["services"]["tgi"]["command"]
    return found


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(["deploy", *words]) == ExitCode.USAGE
    return capsys.readouterr().err


def test_the_settings_of_the_server_are_in_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tgi.yaml"
    file.write_text("max-best-of: 3\nserve:\n  max_stop_sequences: 7\n")
    monkeypatch.setenv("MAX_CLIENT_BATCH_SIZE", "9")
    text = deploy(
        capsys,
        *("compose", "org/model", "--memory", "4GiB", "--port", "8080", "--config", str(file)),
        *("--served-model-name", "a", "b", "--no-prefix-caching", "--cuda-graphs", "1,2"),
    )
    assert command(text) == [
        *("serve", "org/model", "--port=8080", "--graceful-termination-timeout=90"),
        *("--no-prefix-caching", "--cuda-graphs=1,2", "--served-model-name=a"),
        *("--served-model-name=b", "--max-best-of=3", "--max-stop-sequences=7"),
        *("--max-client-batch-size=9", "--json-output"),
    ]


def test_measured_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = deploy(capsys, "compose", "--max-total-tokens", "1024", "--max-batch-size", "4")
    # Four requests of 64 blocks, and a quarter for prefixes.
    assert "--max-batch-total-tokens=5120" in command(text)
    assert "weights 10.0 MiB, a step 200.0 MiB, cache 320.0 MiB, processes 768.0 MiB" in text
    limits = yaml.safe_load(text)["services"]["tgi"]["deploy"]["resources"]["limits"]
    assert limits["memory"] == "1334M"  # 10 + 200 + 768 + 320 / 0.9


def test_given_memory_is_the_caches(capsys: pytest.CaptureFixture[str]) -> None:
    text = deploy(capsys, "compose", "--memory", "2GiB")
    blocks = int((2048 - 768 - 10 - 200) * 0.9)
    assert f"--max-batch-total-tokens={16 * blocks}" in command(text)
    assert yaml.safe_load(text)["services"]["tgi"]["memswap_limit"] == "2048M"


def test_too_little_memory_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", "compose", "--memory", "1000M", "--max-total-tokens", "2048"]
    assert main.run(words) == ExitCode.OUT_OF_MEMORY
    assert "2048" in capsys.readouterr().err


def test_a_model_that_is_not_here_needs_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(capsys, "k8s", "org/model")
    assert "--memory" in error
    assert "tgi warmup" in error


def test_keys_are_never_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    for target in ("docker", "compose", "systemd", "k8s"):
        text = deploy(capsys, target)
        assert "sk-secret" not in text
        assert "hf-secret" not in text
    assert "sk-flag" not in failure(capsys, "docker", "--api-key", "sk-flag")


def test_a_local_model_is_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(demo.model_path())
    text = deploy(capsys, "compose", path)
    assert command(text)[1] == path
    volumes: list[Any] = yaml.safe_load(text)["services"]["tgi"]["volumes"]
    assert volumes[1]["source"] == path
    assert f" {path} " in deploy(capsys, "systemd", path)


def test_files_that_flags_name_are_mounted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").touch()
    (tmp_path / "org").mkdir()
    text = deploy(
        capsys,
        *("compose", "--memory", "4GiB", "--chat-template", "chat.jinja"),
        *("--served-model-name", "org"),
    )
    assert f"--chat-template={tmp_path}/chat.jinja" in command(text)
    assert "--served-model-name=org" in command(text)
    volumes: list[Any] = yaml.safe_load(text)["services"]["tgi"]["volumes"]
    assert [volume["source"] for volume in volumes] == ["data", f"{tmp_path}/chat.jinja"]


def test_the_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--port" in failure(capsys, "k8s", "--port", "0")


def test_what_watches_servers_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(deploy(capsys, "grafana"))["title"] == "TGI"
    assert yaml.safe_load(deploy(capsys, "prometheus"))["groups"][0]["rules"]
    for words in (("grafana", "org/model"), ("prometheus", "--port", "80")):
        assert f"has no effect on `tgi deploy {words[0]}`" in failure(capsys, *words)


def test_options_of_kubernetes_are_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = deploy(
        capsys,
        *("k8s", "org/model", "--memory", "4GiB", "--pods", "2", "--namespace", "llm"),
        *("--autoscale", "keda", "--max-pods", "9", "--target-queue", "5", "--gateway", "smg"),
        *("--target-token-latency", "80", "--prometheus-url", "http://p", "--monitoring"),
        *("--storage", "7GiB", "--storage-class", "nfs"),
    )
    found = {each["kind"]: each for each in yaml.safe_load_all(text)}
    spec = found["ScaledObject"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 9)
    thresholds = [each["metadata"]["threshold"] for each in spec["triggers"]]
    assert thresholds == ["5", "0.08"]
    assert found["PersistentVolumeClaim"]["spec"]["storageClassName"] == "nfs"
    assert {"RoleBinding", "PodMonitor", "PrometheusRule"} <= found.keys()
    nodes = deploy(capsys, "k8s", "org/model", "--memory", "4GiB", "--nodes", "2")
    assert "kind: LeaderWorkerSet" in nodes


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("docker", "--pods", "2"), "--pods has no effect on `tgi deploy docker`"),
        (("compose", "--storage", "1GiB"), "--storage has no effect"),
        (("k8s", "--gpus", "1", "--max-pods", "3"), "--max-pods needs an autoscaler"),
        (("k8s", "--gpus", "1", "--gateway", "smg"), "--namespace"),
        (("k8s", "--gpus", "1", "--ray-fronts", "2"), "--nodes"),
        (("docker", "--distributed", "ray"), "--distributed"),
        (("docker", "--nnodes", "2"), "--nnodes is not for files"),
        (("k8s", "--gpus", "1", "--nodes", "2", "--ray-address", "a:1"), "--ray-address"),
        (("ray", "--pods", "2"), "--pods"),
    ],
)
def test_flags_without_effect_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
) -> None:
    assert part in failure(capsys, *words)


def test_a_model_with_dashes_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = deploy(capsys, "compose", "--model-id=--help", "--memory", "4GiB")
    assert command(text)[1] == "--model-id=--help"


def test_certificates_of_the_host_are_systemds_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cert.pem"
    file.touch()
    assert f"--ssl-certfile={file}" in deploy(capsys, "systemd", "--ssl-certfile", str(file))
    assert "--ssl-certfile" in failure(capsys, "k8s", "--ssl-certfile", str(file))


def test_files_are_replaced_only_by_force(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    words = ("docker", "--output", str(path))
    assert deploy(capsys, *words) == ""
    assert path.read_text().startswith("#!/bin/sh\n")
    assert path.stat().st_mode & 0o111
    assert "--force" in failure(capsys, *words)
    deploy(capsys, *words, "--force", "--name", "other")
    assert "--name other" in path.read_text()


@pytest.mark.parametrize("size", ["16", "1k", "-1GiB", "16GB x", "9" * 30 + "G"])
def test_sizes_that_are_none(capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert size[:20] in failure(capsys, "docker", f"--memory={size}")


def test_keys_from_a_file(tmp_path: Path, served: dict[str, Any]) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\ntwo, three\n")
    assert main.run(["serve", "--api-key-file", str(path), "--api-key", "zero"]) == ExitCode.OK
    assert served["router"].api_key == "zero,one,two,three"


@pytest.mark.parametrize("content", ["", "\n\n", "a b\n", None])
def test_files_of_keys_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    assert main.run(["serve", "--api-key-file", str(path)]) == ExitCode.USAGE
    assert "key" in capsys.readouterr().err
