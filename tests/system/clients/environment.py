"""Environments of programs that cannot share the tests' own, and the running of scripts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_SECONDS = 540.0
SCRIPT_SECONDS = 240.0
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks a server on the Internet on import
    "NO_PROXY": "127.0.0.1",
}
OTHERS = (
    "ANTHROPIC_",
    "HF_",
    "HUGGING",
    "LANGCHAIN_",
    "LANGSMITH_",
    "LITELLM_",
    "OPENAI_",
    "PYTHON",
)


def make_environment(base: Path, requirements: Path = REQUIREMENTS) -> Path:
    """The Python of an environment with ``requirements``, made in ``base`` unless it is there.

    Raises AssertionError with pip's words if it cannot be made: what they ask for comes from the
    configured package index.
    """
    wanted = requirements.read_bytes() + sys.version.encode()
    folder = base / f"{requirements.stem}-{hashlib.sha256(wanted).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        options = ["--no-compile", "--disable-pip-version-check"]
        _run([*pip, *options, "--requirement", str(requirements)])
        complete.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    assert done.returncode == 0, f"cannot make an environment: {command}\n{said}"


def run_script(python: Path, name: str, url: str) -> dict[str, str | None]:
    """What became of each call of a script: why it failed, or None.

    The script must have said so of at least one call, and have ended as it should.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    inherited = {k: v for k, v in inherited.items() if k.upper() not in proxies}
    done = subprocess.run(
        [str(python), "-m", f"tests.system.clients.{name}_client", url],
        cwd=ROOT,
        env={**inherited, **QUIET},
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    results = {line["call"]: line["failure"] for line in lines}
    expected = 1 if any(results.values()) else 0
    assert results, done.stderr
    assert done.returncode == expected, f"after {list(results)[-1]}: {done.stderr}"
    return results
