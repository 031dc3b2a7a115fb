"""What installing says: `make`, and the hint for an extra, which works for what is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.process.installation import install_command

ROOT = Path(__file__).parents[3]
METADATA = """Metadata-Version: 2.4
Name: tgi-cli
Version: 0.1.0
Requires-Dist: rich>=14
Requires-Dist: textual<9,>=8.2; extra == 'bench'
Requires-Dist: textual-plot<0.12,>=0.10; (sys_platform == 'linux') and extra == "bench"
Requires-Dist: pyarrow>=21; extra == 'quantize'
Provides-Extra: bench
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with pip, first in PATH."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    for name in ("pip", "python"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "prefix", str(folder.parent))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder.parent


def installed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, origin: dict[str, Any] | None, by: str = "pip"
) -> None:
    """Let the package be installed from an origin, as its direct_url.json has it."""
    metadata = folder / "tgi_cli-0.1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "INSTALLER").write_text(f"{by}\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: PathDistribution(metadata))


def test_from_a_clone(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    installed(monkeypatch, tmp_path, {"url": clone.as_uri(), "dir_info": {}})
    assert install_command("bench") == f"pip install '{clone}[bench]'"
    monkeypatch.chdir(clone)
    assert install_command("bench") == "pip install '.[bench]'"
    installed(monkeypatch, tmp_path, {"url": clone.as_uri(), "dir_info": {"editable": True}})
    assert install_command("bench") == "pip install -e '.[bench]'"


def test_from_a_wheel(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "tgi_cli-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed(monkeypatch, tmp_path, {"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("bench") == f"pip install '{wheel}[bench]'"
    wheel.unlink()
    expected = "pip install 'textual<9,>=8.2' 'textual-plot<0.12,>=0.10'"
    assert install_command("bench") == expected


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (
            {
                "url": "https://git.example.org/tgi.git",
                "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "ab"},
            },
            "'tgi-cli[bench] @ git+https://git.example.org/tgi.git@v1'",
        ),
        (
            {
                "url": "https://git.example.org/tgi.git",
                "vcs_info": {"vcs": "git", "commit_id": "ab"},
            },
            "'tgi-cli[bench] @ git+https://git.example.org/tgi.git'",
        ),
        (
            {"url": "https://example.org/tgi_cli-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'tgi-cli[bench] @ https://example.org/tgi_cli-0.1.0-py3-none-any.whl'",
        ),
        (None, "'tgi-cli[bench]'"),
    ],
)
def test_from_an_address_or_an_index(
    origin: dict[str, Any] | None,
    requirement: str,
    environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, tmp_path, origin)
    assert install_command("bench") == f"pip install {requirement}"


def test_by_other_installers(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment / "bin" / "python"
    installed(monkeypatch, tmp_path, None, by="uv")
    assert install_command("bench") == f"uv pip install --python {python} 'tgi-cli[bench]'"
    (environment / "uv-receipt.toml").touch()
    assert install_command("bench") == "uv tool install --force 'tgi-cli[bench]'"
    (environment / "uv-receipt.toml").unlink()
    (environment / "pipx_metadata.json").touch()
    assert install_command("bench") == "pipx install --force 'tgi-cli[bench]'"


def test_another_pip_in_the_path_is_not_named(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path, None)
    monkeypatch.setenv("PATH", "")
    python = environment / "bin" / "python"
    assert install_command("bench") == f"{python} -m pip install 'tgi-cli[bench]'"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cpu"])
def test_make_says_how_large_it_is_and_names_the_smaller_torch(index: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "serve"],
        cwd=ROOT,
        env={**os.environ, "PIP_EXTRA_INDEX_URL": index, "PIP_INDEX_URL": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "1.2 GB with PyTorch for CPUs" in done.stdout
    warned = "several gigabytes" in done.stdout
    assert warned == ("PIP_EXTRA_INDEX_URL=" in done.stdout) == (not index)


def test_every_extra_is_documented() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"].keys() - {"test"}
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = text.partition("| extra | for |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall("`(\\w+)`", row[:30])}
    assert named == extras
