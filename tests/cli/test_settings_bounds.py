"""Every numeric setting of the table, given what no server should be started with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tgi_cli.cli import main
from tgi_cli.config.settings import SETTINGS
from tgi_cli.config.settings.setting import SERVE, Setting
from tgi_cli.config.settings.values import LARGEST, LARGEST_RATIO, MAX_SIZES
from tgi_cli.errors import ExitCode

SIGNED = ("frequency_penalty", "groupsize", "group_size")
NUMERIC = [
    setting
    for setting in SETTINGS
    if setting.kind.type in (int, float, tuple) and setting.name not in SIGNED
]
ABSURD = ("0", "-1", str(10**18), "NaN", "inf", "1e308", "1" * 5000, "", "x", "1,2," * 10_000)


@pytest.mark.parametrize("setting", NUMERIC, ids=lambda setting: setting.name)
def test_numbers_are_bounded_when_parsed(setting: Setting) -> None:
    for word in ABSURD:
        try:
            value = setting.kind.read(word)
        except ValueError:
            continue
        if setting.kind.type is tuple:
            assert len(value) <= max(MAX_SIZES, 20_001)
            assert all(isinstance(part, str) or 0 <= part <= MAX_SIZES for part in value)
        else:
            assert 0 <= value <= (LARGEST if setting.kind.type is int else LARGEST_RATIO)
            assert math.isfinite(value)


@pytest.mark.parametrize(
    "setting",
    [
        setting
        for setting in NUMERIC
        if SERVE in setting.commands and setting.kind.metavar != "LIST"
    ],
    ids=lambda setting: setting.name,
)
def test_an_absurd_value_is_a_usage_error(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in (str(10**18), "NaN", "1e308"):
        assert main.run(["env", f"{setting.flag}={word}"]) == ExitCode.USAGE, word
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert len(error) < 500


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_no_value_has_a_nul_character(setting: Setting) -> None:
    """As one in a configuration file may."""
    with pytest.raises(ValueError, match=r"has a NUL character|is not one of"):
        setting.kind.read("a\0b")


@pytest.mark.parametrize(
    "setting",
    [setting for setting in SETTINGS if setting.kind.type is Path],
    ids=lambda setting: setting.name,
)
def test_an_empty_path_is_not_the_current_folder(setting: Setting) -> None:
    with pytest.raises(ValueError, match="the path is empty"):
        setting.kind.read("")


def test_an_empty_path_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["env", "--kv-cache-dir="]) == ExitCode.USAGE
    assert "the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting",
    [setting for setting in NUMERIC if setting.kind.metavar == "SIZE"],
    ids=lambda setting: setting.name,
)
def test_a_size_that_is_taken_is_taken_again_in_bytes(setting: Setting) -> None:
    """As other processes get it."""
    for word in ("1MiB", "1.5 tb", "909494TiB"):
        size = setting.kind.read(word)
        assert setting.kind.read(str(size)) == size
    for word in ("909495TiB", "999999TiB"):
        with pytest.raises(ValueError, match=f"{word} is not at most 909494TiB"):
            setting.kind.read(word)


def test_too_many_shards_are_rejected_before_any_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(["serve", "--port", "0", "--num-shard", "99999"]) == ExitCode.USAGE
    assert "99999 is not from 1 to 256" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LOG_LEVEL", "LOGGER_LEVEL"])
@pytest.mark.parametrize(
    "words", ["zzz,=,,=x", "info,=,,=x", "info,zzz", "info,=debug", "info,a=b=c", "info,x=loud"]
)
def test_an_invalid_log_filter_is_a_usage_error(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.setenv(name, words)
    assert main.run(["router", "--engine-url", "unix:/nowhere"]) == ExitCode.USAGE
    assert "--logger-level" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "large", "deep", "bomb", "merges"])
def test_an_unbounded_configuration_file_is_rejected(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import os

    from tgi_cli import files

    monkeypatch.setattr(files, "PIPE_SECONDS", 0.2)
    path = tmp_path / "settings.yaml"
    if kind == "device":
        path = Path("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"#" * (1 << 20))
    elif kind == "deep":
        path.write_text("port: " + "[" * 100_000)
    else:
        item, entry = ("*{0}", "[{1}]") if kind == "bomb" else ("*{0}", "{{<<: [{1}]}}")
        lines = ["a0: &a0 " + ("[x, x]" if kind == "bomb" else "{x: 1, y: 2}")]
        for level in range(1, 12):
            parts = ", ".join([item.format(f"a{level - 1}")] * 5)
            lines.append(f"a{level}: &a{level} " + entry.format("", parts))
        path.write_text("\n".join(lines))
    assert main.run(["env", "--config", str(path)]) == ExitCode.USAGE
    error = capsys.readouterr().err
    # PyYAML bounds merges itself from 6.0.4 on, so that the file is read.
    expected = ("cannot be read", "is not YAML", *(["is not a setting"] * (kind == "merges")))
    assert any(cause in error for cause in expected)
    assert len(error) < 1000


def test_a_configuration_file_may_come_through_a_pipe(
    capfd: pytest.CaptureFixture[str],
) -> None:
    import os

    reading, writing = os.pipe()
    os.write(writing, b"max-best-of: 3\n")
    os.close(writing)
    assert main.run(["env", "--config", f"/dev/fd/{reading}"]) == ExitCode.OK
    os.close(reading)
    assert "/dev/fd/" in capfd.readouterr().out
