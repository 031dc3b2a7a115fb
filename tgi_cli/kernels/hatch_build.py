"""Compiles the kernels while the package is built, where there is a compiler.

Not part of the running program: hatchling loads this file by its path (see pyproject.toml), in an
environment that has neither torch nor this package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_HERE = Path(__file__).parent


class KernelsHook(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
    """Adds the libraries to a wheel, and makes it one for this platform if there are any.

    The libraries have a C interface, so that the wheel is one for every version of Python.

    ``TGI_BUILD_KERNELS=0`` leaves them out; ``1`` makes it an error that they cannot be compiled.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("TGI_BUILD_KERNELS", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        spec = importlib.util.spec_from_file_location("_tgi_build", _HERE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        try:
            paths = module.build(module.INSTALLED).values()
        except (module.BuildError, OSError) as error:
            if wanted == "1":
                raise
            self.app.display_warning(f"kernels for the CPU are left out: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(paths)}"
        if version != "editable":
            for path in paths:
                build_data["force_include"][str(path)] = f"tgi_cli/kernels/lib/{path.name}"


def platform_tag(libraries: Iterable[Path]) -> str:
    """The platform that the libraries run on: glibc from the version whose symbols they need.

    https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/#manylinux
    """
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    symbols = rb"GLIBC_2\.(\d+)"
    versions = [
        int(found) for path in libraries for found in re.findall(symbols, path.read_bytes())
    ]
    if not versions or not platform.startswith("linux_"):
        return platform
    return platform.replace("linux_", f"manylinux_2_{max(versions)}_", 1)
