"""The scripts in completions/ know today's flags, and the shells that are here can read them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tgi_cli.cli import completions, main
from tgi_cli.errors import ExitCode

FOLDER = Path(__file__).resolve().parents[2] / "completions"


def test_the_scripts_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tgi_cli.cli.completions", str(tmp_path)], check=True, timeout=60
    )
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert kept == written, "run `make completions`"
    assert set(written) == set(completions.SCRIPTS.values())


@pytest.mark.parametrize("shell", list(completions.SCRIPTS))
def test_every_script_contains_every_visible_flag(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run(["completion", shell]) == ExitCode.OK
    script = capsys.readouterr().out
    for command in ("serve", "download-weights", "warmup", "model-server", "router", "bench"):
        main.run([command, "--help-all"])
        for word in capsys.readouterr().out.split():
            if word.startswith("--") and word[2:].replace("-", "").isalpha():
                flag = word[2:] if shell == "fish" else word
                assert flag in script, (command, word)
    assert "config-fd" not in script


BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_tgi
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tgi se", ["serve"]),
        ("tgi --ver", ["--version"]),
        ("tgi serve --max-batch-s", ["--max-batch-size"]),
        ("tgi serve --dtype b", ["bfloat16"]),
        ("tgi serve --dtype = b", ["bfloat16"]),
        ("tgi serve --port 3", []),
        ("tgi completion f", ["fish"]),
        ("tgi serve --help-", ["--help-all"]),
        ("tgi serve m", ["models"]),
        ("tgi serve --chat-template chat", ["chat.jinja"]),
        ("tgi bench ''", ["view", "compare", "models"]),
        ("tgi bench v", ["view"]),
        ("tgi bench --conc", ["--concurrency"]),
        ("tgi bench view ''", ["chat.jinja", "models", "my run.json", "run.json"]),
        ("tgi bench view run.json m", ["models", "my run.json"]),
        ("tgi bench view --ui p", ["plain"]),
        ("tgi bench compare r", ["run.json"]),
        ("tgi bench compare --", ["--markdown", "--fail-on", "--help", "--help-all"]),
        ("tgi bench compare run.json run.json --f", ["--fail-on"]),
        ("tgi bench compare --markdown r", ["run.json"]),
        ("tgi quantize m", ["models"]),
    ],
)
def test_bash_completes(words: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("run.json", "my run.json", "chat.jinja"):
        (tmp_path / name).touch()
    code = BASH.format(script=FOLDER / "tgi.bash", words=words)
    done = subprocess.run(
        ["bash", "--norc", "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=tmp_path,
    )
    assert sorted(filter(None, done.stdout.splitlines())) == sorted(expected)


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        ("tgi se", {"serve"}, {"bench"}),
        ("tgi serve --dtype b", {"bfloat16"}, {"float16"}),
        ("tgi serve --chat-template chat", {"chat.jinja"}, set()),
        ("tgi bench ", {"view", "compare", "models/"}, {"chat.jinja"}),
        ("tgi bench --conc", {"--concurrency"}, set()),
        ("tgi bench compare r", {"run.json"}, set()),
        ("tgi bench compare --", {"--fail-on", "--markdown"}, {"--concurrency", "--rate"}),
        ("tgi bench view run.json m", {"models/"}, set()),
    ],
)
def test_fish_completes(words: str, expected: set[str], absent: set[str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("run.json", "chat.jinja"):
        (tmp_path / name).touch()
    code = f"source {FOLDER / 'tgi.fish'}; complete -C '{words}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    found = {line.partition("\t")[0] for line in done.stdout.splitlines()}
    assert expected <= found
    assert not absent & found


@pytest.mark.parametrize(
    ("shell", "command"),
    [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-n"])],
)
def test_installed_shells_can_parse_the_scripts(shell: str, command: list[str]) -> None:
    if shutil.which(shell):
        path = FOLDER / completions.SCRIPTS[shell]
        subprocess.run([*command, str(path)], check=True, timeout=60)
