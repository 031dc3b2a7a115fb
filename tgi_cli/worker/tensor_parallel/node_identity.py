"""What the nodes of a model must have in common: versions, the model's files, and settings."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of_package
from pathlib import Path

import msgspec

from tgi_cli.config import ServeConfig
from tgi_cli.files import require_file
from tgi_cli.hub.streamed_model import MARKER
from tgi_cli.version import __version__
from tgi_cli.worker.tensor_parallel.node_messages import JoinNode, Refused

_OF_EACH_NODE = frozenset(
    [
        *("model_id", "revision", "model_gguf", "tokenizer_name"),  # the files are compared
        *("node_rank", "master_addr", "node_secret_file"),
        *("hostname", "port", "max_concurrent_requests", "graceful_termination_timeout"),
        *("shard_uds_path", "watermark_gamma", "watermark_delta"),
        *("logger_level", "json_output", "otlp_endpoint", "otlp_service_name"),
        *("max_restarts", "watchdog_timeout"),
    ]
)
"""Settings that concern node 0 alone, or that nodes may have values of their own for."""

_FILES = ("config.json", MARKER, "*.safetensors", "*.bin", "*.gguf", "*quant*config.json", "*.py")
_PART_BYTES = 1 << 20
_MAX_BYTES = 1 << 62
"""No limit: a file of weights is as long as it is, and parts of it are read."""


def describe_node(serve: ServeConfig, model_path: Path) -> JoinNode:
    """What this node has, of the model in ``model_path``."""
    settings = msgspec.json.decode(msgspec.json.encode(serve, enc_hook=str))  # as it arrives
    return JoinNode(
        version=__version__,
        torch=_torch_version(),
        rank=serve.node_rank,
        revision=serve.revision or "",
        files=_describe_files(model_path),
        settings={name: settings[name] for name in settings.keys() - _OF_EACH_NODE},
    )


def refusal(own: JoinNode, other: JoinNode) -> Refused | None:
    """Why a node that has ``other`` cannot serve with node 0, which has ``own``, or None."""
    node = f"node {other.rank}"
    if own.torch != other.torch:
        return Refused(
            f"{node} has PyTorch {other.torch}, and node 0 has {own.torch}",
            "install the same version on all nodes",
        )
    if own.settings != other.settings:
        return Refused(*_different_settings(own, other))
    if own.revision != other.revision:
        return Refused(
            f"{node} has revision {other.revision or 'unknown'} of the model, and node 0 has "
            f"{own.revision or 'unknown'}",
            "give all nodes the same --revision",
        )
    names = own.files.keys() | other.files.keys()
    different = sorted(name for name in names if own.files.get(name) != other.files.get(name))
    if different:
        return Refused(
            f"{node} has other files of the model than node 0: {_shortened(different)}",
            "give all nodes the same model",
        )
    return None


def other_version(version: str | None) -> Refused:
    """The answer to a node with another version of this package, unknown if that is None."""
    has = "another version" if version is None else f"version {version}"
    return Refused(
        f"a node has {has} of this package, and node 0 has {__version__}",
        "install the same version on all nodes",
    )


def _different_settings(own: JoinNode, other: JoinNode) -> tuple[str, str]:
    names = sorted(own.settings.keys() | other.settings.keys())
    shown = []
    for name in names:
        ours, theirs = own.settings.get(name), other.settings.get(name)
        if ours != theirs:
            flag = "--" + name.replace("_", "-")
            shown.append(f"{flag} {_word(theirs)} instead of {_word(ours)}")
    return (
        f"node {other.rank} was started with other settings than node 0: {_shortened(shown)}",
        "give all nodes the same flags and variables, except for --node-rank",
    )


def _word(value: object) -> str:
    return "unset" if value is None else str(value)[:60]


def _shortened(words: list[str], most: int = 4) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _torch_version() -> str:
    """Of the installed package, which is not imported."""
    try:
        return version_of_package("torch")
    except PackageNotFoundError:
        return ""


def _describe_files(folder: Path) -> dict[str, str]:
    """Names of a model's files, with their sizes and a hash of their first and last MiB.

    Models of the same shapes differ there; to read all of their weights takes minutes.
    """
    found = {}
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
        require_file(path, _MAX_BYTES)
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_PART_BYTES))
            file.seek(max(0, size - _PART_BYTES))
            digest.update(file.read(_PART_BYTES))
        found[path.name] = f"{size} {digest.hexdigest()}"
    return found
