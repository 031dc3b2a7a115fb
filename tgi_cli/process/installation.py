"""The command that adds an extra to this installation, whatever it was installed from and by."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tgi_cli.files import decode_json

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAME = "tgi-cli"


def install_command(extra: str) -> str:
    """The command line that installs the packages of ``extra`` for the running Python.

    It installs from where this package came from (PEP 610: a clone, a wheel, a git address), or,
    if that is gone, the packages of the extra by their names.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # servers need none of it

    try:
        found: Distribution | None = distribution(_NAME)
    except PackageNotFoundError:
        found = None
    return f"{_installer(found)} {_requirement(found, extra)}"


def _requirement(found: Distribution | None, extra: str) -> str:
    """The arguments of the installer."""
    if found is None:  # a clone that was not installed
        return _folder(Path(__file__).parents[2], extra)
    text = found.read_text("direct_url.json")
    if text is None:  # an index has it
        return shlex.quote(f"{_NAME}[{extra}]")
    origin = decode_json(text.encode())
    url = origin["url"]
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        revision = vcs.get("requested_revision")
        at = f"@{revision}" if revision else ""
        return shlex.quote(f"{_NAME}[{extra}] @ {vcs['vcs']}+{url}{at}")
    if urlsplit(url).scheme != "file":
        return shlex.quote(f"{_NAME}[{extra}] @ {url}")
    from urllib.request import url2pathname

    path = Path(url2pathname(urlsplit(url).path))
    if path.exists():
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return editable + _folder(path, extra)
    return " ".join(map(shlex.quote, _packages(found, extra)))


def _folder(path: Path, extra: str) -> str:
    """A requirement of a folder or a wheel, as short as it can be written."""
    shown = "." if path == Path.cwd() else str(path)
    return shlex.quote(f"{shown}[{extra}]")


def _packages(found: Distribution, extra: str) -> list[str]:
    """The requirements of an extra."""
    packages = []
    for requirement in found.requires or []:
        package, _, marker = requirement.partition(";")
        if f"extra == '{extra}'" in marker.replace('"', "'"):
            packages.append(package.strip())
    return packages


def _installer(found: Distribution | None) -> str:
    """The installer whose work this environment is, with its command."""
    prefix = Path(sys.prefix)
    if (prefix / "uv-receipt.toml").exists():
        return "uv tool install --force"
    if (prefix / "pipx_metadata.json").exists():
        return "pipx install --force"
    by = (found.read_text("INSTALLER") or "").strip() if found is not None else "pip"
    if by == "uv":
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    first = shutil.which("pip")
    if first is not None and Path(first).parent == Path(sys.executable).parent:
        return "pip install"
    return f"{shlex.quote(sys.executable)} -m pip install"
