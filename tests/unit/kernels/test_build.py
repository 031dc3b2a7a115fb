from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tgi_cli.kernels import build, cpp_library, library, without_cpp_kernels


def test_libraries_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: dict[str, ctypes.CDLL]
) -> None:
    """Of small sources: the kernels' own are those of ``compiled``."""
    sources, folder = tmp_path / "cpp", tmp_path / "lib"
    sources.mkdir()
    (sources / "one.cpp").write_text("int one() { return 1; }\n")
    exported = '__attribute__((visibility("default")))'
    (sources / "two.cpp").write_text(
        f'int one();\nextern "C" {exported} int two() {{ return one() + 1; }}\n'
    )
    monkeypatch.setattr(build, "SOURCES", sources)
    progress: list[tuple[int, int]] = []
    first = build.build(folder, ["avx2"], lambda *counts: progress.append(counts))["avx2"]
    assert progress == [(1, 2), (2, 2)]
    made = first.stat().st_mtime_ns
    assert build.build(folder, ["avx2"]) == {"avx2": first}
    assert first.stat().st_mtime_ns == made
    assert list(folder.iterdir()) == [first]  # nothing else is left behind
    assert ctypes.CDLL(str(first)).two() == 2


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.cpp").write_text("int one;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    before = build.file_name("avx2")
    assert build.file_name("avx2") == before
    (tmp_path / "one.cpp").write_text("int two;")
    assert build.file_name("avx2") != before


def test_the_name_is_the_same_in_every_process() -> None:
    code = "from tgi_cli.kernels.build import file_name; print(file_name('avx2'))"
    command = [sys.executable, "-c", code]
    names = {subprocess.check_output(command, env={"PYTHONHASHSEED": s}) for s in ("1", "2")}
    assert names == {f"{build.file_name('avx2')}\n".encode()}


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported", lambda: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.build(tmp_path)


def test_the_compilers_message_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: dict[str, ctypes.CDLL]
) -> None:
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int one = nothing_of_that_name;\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(build.BuildError, match="nothing_of_that_name"):
        build.build(tmp_path / "lib", ["avx2"])
    assert list((tmp_path / "lib").iterdir()) == []


def test_the_levels_of_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(library, "_CPUINFO", info)
    modern = "avx2 fma f16c bmi2 avx512f avx512bw avx512vl avx512dq avx512cd avx512_vnni"
    for flags, levels in (
        (f"{modern} avx512_bf16", ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        (modern, ["avx512_vnni", "avx512", "avx2"]),
        (modern.replace(" avx512_vnni", ""), ["avx512", "avx2"]),
        ("sse4_2 avx2 fma f16c bmi2 avx_vnni", ["avx2_vnni", "avx2"]),
        ("sse4_2 avx2 fma f16c bmi2", ["avx2"]),
        ("sse4_2 avx", []),
    ):
        info.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        assert library.runnable_levels() == levels
    info.unlink()
    assert library.runnable_levels() == []


def old_compiler(folder: Path) -> str:
    """g++, or whichever there is, as before it knew AVX512-BF16, VNNI and AVX-VNNI."""
    path, real = folder / "old-g++", build.compiler()
    refuses = "case $a in -mavx512bf16|-mavx512vnni|-mavxvnni) exit 1;; esac"
    path.write_text(f'#!/bin/sh\nfor a; do {refuses}; done\nexec {real} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_what_an_old_compiler_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: dict[str, ctypes.CDLL]
) -> None:
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "cpp")
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "lib")
    monkeypatch.setenv("CXX", old_compiler(tmp_path))
    assert list(build.build(tmp_path / "lib")) == ["avx512", "avx2"]
    assert build.build_for_use(["avx512_bf16", "avx2"])[0] == "avx2"
    with pytest.raises(build.BuildError, match=r"old-g\+\+ is too old for avx512_bf16"):
        build.build_for_use(["avx512_bf16"])


def test_a_library_that_is_there_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    there = tmp_path / build.file_name("avx2")
    there.touch()
    assert build.build_for_use(["avx512", "avx2"]) == ("avx2", there)


def test_torch_does_where_nothing_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library._load.__wrapped__() is None


@pytest.mark.parametrize(("compiler", "says"), [("sh", ""), ("no-such-compiler", "install g++")])
def test_what_computes_is_told_with_the_remedy(
    compiler: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "supported", lambda: True)
    monkeypatch.setattr(library, "runnable_levels", lambda: ["avx512_vnni", "avx2"])
    monkeypatch.setattr(library, "cpp_library", lambda: None)
    monkeypatch.setenv("CXX", compiler)
    told = library.describe_kernels()
    assert told.startswith("torch: slower;")
    assert "tgi warmup compiles them" in told
    assert says in told
    loaded = SimpleNamespace(_name=f"/lib/{build.file_name('avx512_vnni')}")
    monkeypatch.setattr(library, "cpp_library", lambda: loaded)
    assert library.describe_kernels() == "avx512 vnni"
    monkeypatch.setattr(library, "runnable_levels", list)
    assert library.describe_kernels() == "torch: there are none for this processor"


def test_an_unloadable_library_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "supported", lambda: True)
    monkeypatch.setattr(library, "runnable_levels", lambda: ["avx2"])
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    (tmp_path / build.file_name("avx2")).write_bytes(b"not a library")
    assert library._load.__wrapped__() is None
    assert "torch's operations are" in caplog.text


def test_without_cpp_kernels_there_is_no_library(compiled: dict[str, ctypes.CDLL]) -> None:
    assert cpp_library() is not None
    with without_cpp_kernels():
        assert cpp_library() is None
    assert cpp_library() is not None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_ticket_is_run_once(level: str, threads: int) -> None:
    lib = cpp_library()
    assert lib is not None
    for total in (0, 1, 2, 3, 1000):
        counts = (ctypes.c_int64 * 64)()
        lib.tgi_count_tickets(threads, ctypes.c_int64(total), counts)
        assert sum(counts) == total
        assert not any(counts[threads:])
