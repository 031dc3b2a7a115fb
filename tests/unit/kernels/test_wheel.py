"""What the build of a wheel adds to it: the libraries, and the tag of their platform."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tgi_cli.kernels import build


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that hatchling loads, in an environment that has no hatchling."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin", ModuleType("plugin"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    path = Path(build.__file__).with_name("hatch_build.py")
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(hook: Any, version: str = "standard", target: str = "wheel") -> dict[str, Any]:
    made = hook.KernelsHook()
    made.target_name = target
    made.app = SimpleNamespace(display_warning=lambda text: None)
    data: dict[str, Any] = {"force_include": {}}
    made.initialize(version, data)
    return data


@pytest.mark.usefixtures("compiled")
def test_a_wheel_has_every_level_under_the_name_that_is_looked_for(hook: Any) -> None:
    data = built(hook)
    names = [f"tgi_cli/kernels/lib/{build.file_name(level)}" for level in build.LEVELS]
    assert sorted(data["force_include"].values()) == sorted(names)
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-manylinux_2_")
    assert data["tag"].endswith("_x86_64")
    assert built(hook, version="editable")["force_include"] == {}


def test_without_a_compiler_the_wheel_is_pure(
    hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    module = Path(build.__file__).with_name("build.py").read_text()
    lone = tmp_path / "kernels"
    (lone / "cpp").mkdir(parents=True)
    (lone / "cpp" / "one.cpp").write_text("int one;")
    (lone / "build.py").write_text(module)
    monkeypatch.setattr(hook, "_HERE", lone)
    assert built(hook) == {"force_include": {}}
    monkeypatch.setenv("TGI_BUILD_KERNELS", "1")
    with pytest.raises(Exception, match=r"no C\+\+ compiler|no kernels for"):
        built(hook)


def test_the_platform_is_glibc_from_the_newest_symbol_on(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-x86_64")
    first, second = tmp_path / "a.so", tmp_path / "b.so"
    first.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBCXX_3.4.29\0")
    second.write_bytes(b"\0GLIBC_2.28\0GLIBC_2.3\0")
    assert hook.platform_tag([first, second]) == "manylinux_2_28_x86_64"
    second.write_bytes(b"musl")
    assert hook.platform_tag([second]) == "linux_x86_64"
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "macosx-14.0-arm64")
    assert hook.platform_tag([first]) == "macosx_14_0_arm64"
