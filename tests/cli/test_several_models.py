"""`tgi serve` of several models, up to the point where the server starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tgi_cli import demo
from tgi_cli.cli import main
from tgi_cli.errors import ExitCode
from tgi_cli.multi_model import server
from tgi_cli.multi_model.config import ModelSpec, MultiModelConfig

SECRET = "marzipan"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[MultiModelConfig]:
    """What would be served."""
    configs: list[MultiModelConfig] = []

    def serve(config: MultiModelConfig) -> int:
        configs.append(config)
        return ExitCode.OK

    monkeypatch.setattr(server, "serve_models", serve)
    monkeypatch.setattr("tgi_cli.process.spawn.run_in_fork", lambda work: work())
    return configs


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Two models."""
    copies = [shutil.copytree(demo.model_path(), tmp_path / name) for name in "ab"]
    return str(copies[0]), str(copies[1])


def specs(served: list[MultiModelConfig]) -> dict[str, ModelSpec]:
    (config,) = served
    return {spec.name: spec for spec in config.models}


def test_models_of_the_command_line(
    served: list[MultiModelConfig], folders: tuple[str, str]
) -> None:
    words = ["--max-total-tokens", "512", "--sleep-idle-seconds", "60", "--api-key", SECRET]
    limits = ["--models-memory", "1GiB", "--models-max", "1", "--model-wait-seconds", "7"]
    assert main.run(["serve", *folders, *words, *limits]) == ExitCode.OK
    found = specs(served)
    assert list(found) == [*folders]
    for spec in found.values():
        assert spec.arguments == ("--max-total-tokens=512",)
        assert spec.idle_seconds == 60
        assert spec.memory > 8_000_000
    (config,) = served
    assert config.api_key == SECRET
    assert SECRET not in str(config)
    policy = config.policy
    assert (policy.budget, policy.most_loaded, policy.wait) == (1 << 30, 1, 7)


def test_models_of_a_file_have_names_and_flags_of_their_own(
    served: list[MultiModelConfig], folders: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        f"coder:\n  model: {folders[0]}\n  max-total-tokens: 256\n  served-model-name: [code]\n"
        f"chat:\n  model: {folders[1]}\n  sleep-idle-seconds: 9\n"
    )
    assert main.run(["serve", "--models", str(file), "--max-total-tokens", "512"]) == ExitCode.OK
    found = specs(served)
    coder, chat = found["coder"], found["chat"]
    assert coder.names[:2] == ("coder", "code")
    assert folders[0] in coder.names
    assert (coder.arguments, chat.arguments) == (
        ("--max-total-tokens=256",),
        ("--max-total-tokens=512",),
    )
    assert (coder.idle_seconds, chat.idle_seconds) == (0, 9)


def test_no_secret_is_on_the_command_line_of_a_model(
    served: list[MultiModelConfig], folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which process lists and the list of models show; TGI's variables may be set."""
    monkeypatch.setenv("NGROK_AUTHTOKEN", SECRET)
    monkeypatch.setenv("API_KEY", SECRET)
    assert main.run(["serve", *folders]) == ExitCode.OK
    assert [spec.arguments for spec in specs(served).values()] == [(), ()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--revision", "main"), "--revision is for one model, and there are 2"),
        (("--shard-uds-path", "/tmp/x"), "--shard-uds-path is for a server of one model"),
        (("--nnodes", "2"), "--nnodes is for a server of one model"),
    ],
)
def test_what_is_for_one_model_is_refused(
    words: tuple[str, ...],
    message: str,
    served: list[MultiModelConfig],
    folders: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(["serve", *folders, *words]) == ExitCode.USAGE
    assert message in capsys.readouterr().err
    assert not served


def test_names_are_of_one_model_each(
    served: list[MultiModelConfig], folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["serve", folders[0], folders[0]]) == ExitCode.USAGE
    assert "two of the models are called" in capsys.readouterr().err
    assert not served
