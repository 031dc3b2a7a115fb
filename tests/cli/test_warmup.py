from __future__ import annotations

import json
from pathlib import Path

import pytest

from tgi_cli.cli import main
from tgi_cli.errors import ExitCode
from tgi_cli.kernels import build, library


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "supported", lambda: True)
    monkeypatch.setattr(library, "runnable_levels", lambda: ["avx2"])
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "lib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources that take no time."""
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path / "cpp"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_missing_kernels_are_compiled(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["warmup", "--json-output"]) == ExitCode.OK
    made = json.loads(capsys.readouterr().out)
    path = tmp_path / "lib" / build.file_name("avx2")
    assert made["kernels"] == "avx2"
    assert made["path"] == str(path)
    before = path.stat().st_mtime_ns
    assert main.run(["warmup"]) == ExitCode.OK
    assert path.stat().st_mtime_ns == before
    assert capsys.readouterr().out == f"kernels for avx2: {path}\n"


def test_kernels_are_compiled_into_the_cache_if_the_package_is_read_only(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_writable", lambda folder: False)
    assert main.run(["warmup"]) == ExitCode.OK
    assert (tmp_path / "cache" / "tgi" / "kernels" / build.file_name("avx2")).exists()
    assert not (tmp_path / "lib").exists()


def test_a_missing_compiler_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main.run(["warmup"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "no C++ compiler was found" in error
    assert "install g++" in error


def test_an_unsupported_processor_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "runnable_levels", list)
    assert main.run(["warmup"]) == ExitCode.USAGE
    assert "no kernels for this processor" in capsys.readouterr().err
