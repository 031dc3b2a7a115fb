"""Users of other servers are told what replaces their flags and commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.cli.main import run
from tgi_cli.cli.other_servers import flag_hint
from tgi_cli.config.settings import settings_of
from tgi_cli.errors import ExitCode

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "from-others.md"
KNOWN = {flag for s in settings_of("serve") if not s.argument for flag in s.flags}


def documented_flags() -> list[str]:
    """The flags in the first columns of the document's tables."""
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    return [flag for row in rows for flag in re.findall(r"--[a-z][a-z-]*", row.split(" | ")[0])]


def test_every_documented_flag_of_another_server_is_one_of_ours_or_has_a_hint() -> None:
    flags = documented_flags()
    assert len(flags) > 50
    assert [flag for flag in flags if flag not in KNOWN and not flag_hint(flag, KNOWN)] == []


@pytest.mark.parametrize(
    ("line", "cause", "remedy"),
    [
        (
            "serve m --max-model-len 8192",
            "No such option: --max-model-len",
            "use --max-total-tokens instead of vLLM's --max-model-len",
        ),
        (
            "warmup m --ctx-size 8192",
            "No such option: --ctx-size",
            "use --max-total-tokens instead of llama.cpp's --ctx-size",
        ),
        ("serve -m x.gguf", "No such option: -m", "`tgi serve FILE`"),
        ("serve m --n-gpu-layers 99", "No such option", "leave out llama.cpp's --n-gpu-layers"),
        ("serve m --device cpu", "No such option: --device", "CUDA_VISIBLE_DEVICES= hides them"),
        ("deploy docker --host ::", "No such option: --host", "use --hostname"),
        # What replaces it is no flag of this command.
        ("bench m --host ::", "No such option: --host", "see tgi bench --help"),
        ("serve --max-model 5", "Possible options", "see tgi serve --help"),
        ("chat m Hello!", "unexpected extra argument", "give the prompt with -p"),
        ("run llama3", "No such command 'run'", "`tgi chat MODEL`"),
        ("acme/model", "No such command 'acme/model'", "`tgi serve acme/model`"),
        ("serve-all", "No such command 'serve-all'", "see tgi --help"),
    ],
)
def test_unknown_words_have_a_remedy(
    line: str, cause: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == ExitCode.USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert cause in first
    assert remedy in second


@pytest.mark.parametrize("line", ["--model-id=a --model-id b --port x", "-p x", "--env --port x"])
def test_arguments_of_tgis_image_are_those_of_serve(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == ExitCode.USAGE
    assert "see tgi serve --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("--trust-remote-code=true", {"value": True, "name": "--trust-remote-code"}),
        ("--trust-remote-code False", {"value": False, "name": "--no-trust-remote-code"}),
        ("--disable-web-ui true m", {"value": True, "name": "--disable-web-ui"}),
        ("true", {"value": "true", "name": "MODEL"}),
    ],
)
def test_switches_may_have_a_value(
    line: str, setting: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", *line.split(), "--json-output"]) == ExitCode.OK
    assert {"source": "flag", **setting} in json.loads(capsys.readouterr().out).values()


def test_what_nothing_switches_off_takes_no_false(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--disable-web-ui", "false"]) == ExitCode.USAGE
    assert "'--disable-web-ui' does not take a value" in (text := capsys.readouterr().err)
    assert "see tgi env --help" in text


def test_other_flags_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--verson"]) == ExitCode.USAGE
    assert "see tgi --help" in capsys.readouterr().err
    assert run(["--version"]) == ExitCode.OK


@pytest.mark.parametrize(
    ("line", "usage"), [("help", "tgi COMMAND"), ("help bench", "tgi bench [MODEL]")]
)
def test_help_is_a_command_too(line: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == ExitCode.OK
    assert f"Usage: {usage}" in capsys.readouterr().out
