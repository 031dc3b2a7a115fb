"""What is deployed, independent of where: the command line, its limits and its secrets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tgi_cli.errors import ConfigError

USER_ID = 10001
"""User and group of docs/Dockerfile."""

DATA = "/data"
"""Folder of models, profiles and compiled kernels in a container."""

SECRETS = "/run/secrets"
"""Folder of secrets in a container, as Docker has it."""

API_KEY, HF_TOKEN = "api-key", "hf-token"
"""Names of the secrets."""

DRAIN_MARGIN = 10
"""Seconds from the end of the drain to SIGKILL, for processes to exit."""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}")
_CPU_LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A server to be deployed.

    Attributes:
        arguments: arguments of ``tgi``, beginning with ``serve``.
        name: name of the container, the service or the Kubernetes objects.
        image: image of the container.
        port: on which it listens, and is published.
        hostname: address on which it is published.
        drain_seconds: that requests in flight get to finish.
        memory: limit in bytes, or None for none.
        cpus: limit in cores, or None for none.
        cpuset_cpus: cores that it is bound to, as ``0-7``; empty: any.
        cpuset_mems: NUMA nodes whose memory it takes, as ``0``; empty: any.
        gpus: number of NVIDIA GPUs.
        storage: bytes of the volume for models.
        api_key_file: file on the host that holds the API keys, or None if requests need none.
        hf_token_file: file on the host that holds a token of the Hugging Face hub, or None.
        mounts: files and folders of the host that the arguments name.
        notes: lines on where the limits come from.
    """

    arguments: tuple[str, ...]
    name: str
    image: str
    port: int
    hostname: str
    drain_seconds: int
    memory: int | None
    cpus: int | None
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    gpus: int = 0
    storage: int
    api_key_file: Path | None = None
    hf_token_file: Path | None = None
    mounts: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validate what is written without quotes. Raises ConfigError."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r} is not a name of containers and services",
                "use up to 40 lower-case letters, digits and dashes, a letter first",
            )
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(f"--image {self.image!r} is not an image", "as tgi-cli:latest")
        for flag, value in (("cpus", self.cpuset_cpus), ("mems", self.cpuset_mems)):
            if value and not _CPU_LIST.fullmatch(value):
                raise ConfigError(f"--cpuset-{flag} {value!r} is not a list", "as 0-7 or 0,2,4")

    @property
    def stop_seconds(self) -> int:
        """Time from SIGTERM to SIGKILL."""
        return self.drain_seconds + DRAIN_MARGIN

    @property
    def secrets(self) -> dict[str, Path]:
        """Files of the host by the names of secrets."""
        files = {API_KEY: self.api_key_file, HF_TOKEN: self.hf_token_file}
        return {name: file for name, file in files.items() if file is not None}

    def environment(self, secrets: str, data: str) -> dict[str, str]:
        """Environment variables.

        Args:
            secrets: folder in which the server finds its secrets.
            data: folder that it may write to.
        """
        variables = {"HOME": data, "HF_HOME": data}
        paths = {API_KEY: "API_KEY_FILE", HF_TOKEN: "HF_TOKEN_PATH"}
        return variables | {paths[name]: f"{secrets}/{name}" for name in self.secrets}

    def header(self, *lines: str) -> str:
        """Comment lines that begin a file: how it was made, ``lines``, and the notes."""
        made = f"Made by: tgi deploy ... {' '.join(self.arguments[1:])}".rstrip()
        return "".join(f"# {printable(line)}\n" for line in (made, *lines, *self.notes))


def printable(text: str) -> str:
    """Text on one line: characters that could end the line are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def health_command(port: int) -> list[str]:
    """A command that fails unless the server is ready; an image may have no curl."""
    url = f"http://127.0.0.1:{port}/health"
    return ["python", "-c", f"from urllib.request import urlopen; urlopen('{url}', timeout=5)"]


def binary_size(count: int) -> str:
    """Bytes as Docker, systemd and (with an ``i``) Kubernetes write them: whole MiB."""
    return f"{-(-count >> 20)}M"


def existing_paths(values: Sequence[object]) -> tuple[Path, ...]:
    """The absolute paths among setting values that exist on this machine."""
    found: dict[Path, None] = {}
    for value in values:
        for word in value if isinstance(value, (list, tuple)) else (value,):
            text = str(word)
            # An adapter is NAME=PATH, ID@REVISION or a path.
            for part in (text, text.partition("=")[2]):
                path = Path(part).expanduser() if part else None
                if path is not None and _exists(path):
                    found[path.resolve()] = None
    return tuple(found)


def with_link_targets(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Paths to mount, with the folders that links in them lead to, as in the hub's cache."""
    found = dict.fromkeys(paths)
    for path in paths:
        links = [each for each in path.iterdir() if each.is_symlink()] if path.is_dir() else []
        found |= dict.fromkeys(link.resolve().parent for link in links)
    return tuple(found)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False
