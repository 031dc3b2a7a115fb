"""--speculate and --speculative-config on the command line, in variables and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tgi_cli.cli import main
from tgi_cli.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], 3), (["--speculate", "auto"], None), (["--speculate", "0"], 0)],
)
def test_a_flag_overrides_the_variable_also_with_auto(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, words: list[str], expected: int | None
) -> None:
    monkeypatch.setenv("SPECULATE", "3")
    assert main.run(["serve", *words]) == ExitCode.OK
    assert served["config"].speculate == expected


def test_vllms_object_is_passed_on(served: dict[str, Any], tmp_path: Path) -> None:
    word = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert main.run(["serve", "--speculative-config", word]) == ExitCode.OK
    assert served["config"].speculative_config == word
    path = tmp_path / "settings.yaml"
    path.write_text("speculative-config: {method: ngram, num_speculative_tokens: 4}\n")
    assert main.run(["serve", "--config", str(path)]) == ExitCode.OK
    assert served["config"].speculative_config == word


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--speculate", "many"], "nor auto"),
        (["--speculate=-1"], "not at least 0"),
        (["--speculative-config", '{"method": "eagle"}'], "'eagle' is not supported"),
        (["--speculative-config", "x"], "is not JSON"),
        (["--speculative-config="], "is not JSON"),
    ],
)
def test_what_cannot_be_honoured_is_a_usage_error(
    served: dict[str, Any], capsys: pytest.CaptureFixture[str], words: list[str], cause: str
) -> None:
    assert main.run(["serve", *words]) == ExitCode.USAGE
    assert not served
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert cause in error
    assert words[0].partition("=")[0] in error
