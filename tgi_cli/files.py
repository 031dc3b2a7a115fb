"""Reads untrusted files within limits on kind, size, depth and number of values.

A path may lead to an endless device, a pipe without a writer, text that nests until a parser's
stack overflows, or a few aliases that expand to billions of values. All files of checkpoints,
adapters and tokenizers, and all files named by flags, are read here, which
tests/unit/test_architecture.py enforces.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG_BYTES = 16 << 20
"""Limit for config.json and similar files. The largest published ones have a few hundred KB."""

INDEX_BYTES = 64 << 20
"""Limit for model.safetensors.index.json: 100 bytes per tensor, and 200,000 tensors in the largest
mixtures of experts."""

TOKENIZER_BYTES = 256 << 20
"""Limit for a tokenizer's files. Gemma 3's tokenizer.json, with 262,144 tokens, has 33 MB."""

TEXT_BYTES = 4 << 20
"""Limit for chat templates, model cards and similar files."""

WORKLOAD_BYTES = 2 << 30
"""Limit for a benchmark's prompts and saved runs. ShareGPT, as published, has 640 MB."""

SETTINGS_BYTES = 256 << 10
"""Limit for a YAML file of settings, which is parsed at a few hundred KB per second."""

MAX_DEPTH = 64
"""Maximum nesting of arrays and objects. serde_json, which parses tokenizers, allows 128; the
deepest files of published models have 10."""

MAX_VALUES = 2_000_000
"""Maximum number of values in a JSON file: at most 150 MB of objects."""

PIPE_SECONDS = 10.0
"""Timeout of reading from a pipe."""

_HAS_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_MAX_ALIASES = 64
_MAX_YAML_VALUES = 10_000


class FileRefusedError(ValueError):
    """A file of a kind, size or depth that is not read."""


def read_bytes(path: Path, limit: int = CONFIG_BYTES, *, pipes: bool = False) -> bytes:
    """Read a file.

    Args:
        path: a regular file, or a link to one.
        limit: maximum size in bytes.
        pipes: whether to accept pipes (``<(...)`` of a shell).

    Raises:
        OSError: the file cannot be opened or read; nothing was written to a pipe for ten seconds.
        FileRefusedError: the file is of another kind, or too large.
    """
    _check(path.stat(), limit, pipes)  # devices are not even opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        _check(found, limit, pipes)
        is_pipe = not stat.S_ISREG(found.st_mode)
        parts: list[bytes] = []
        size = 0
        while size <= limit:
            if is_pipe:
                _wait(descriptor)
            part = os.read(descriptor, min(1 << 20, limit + 1 - size))
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
    finally:
        os.close(descriptor)
    raise FileRefusedError(_too_large(limit))


def read_text(path: Path, limit: int = TEXT_BYTES, *, errors: str = "strict") -> str:
    """Read a UTF-8 file. Raises as :func:`read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, limit).decode("utf-8", errors)


def read_json(path: Path, limit: int = CONFIG_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not valid JSON, or exceeds a limit (a FileRefusedError).
    """
    return decode_json(read_bytes(path, limit))


def decode_json(data: bytes, max_values: int | None = MAX_VALUES) -> Any:
    """Parse JSON with at most ``max_values`` values. Raises ValueError."""
    if max_values is not None:
        # An upper bound: commas and brackets within strings count as well.
        count = data.count(b",") + data.count(b"[") + data.count(b"{")
        if count > max_values:
            raise FileRefusedError(f"it has more than {max_values} values")
    too_deep = f"it nests more than {MAX_DEPTH} arrays and objects"
    try:
        value = json.loads(data)
    except RecursionError:
        raise FileRefusedError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return value
    raise FileRefusedError(too_deep)


def read_yaml(path: Path) -> Any:
    """Read a YAML file of settings. Raises OSError and ValueError as :func:`read_json`."""
    return decode_yaml(read_bytes(path, SETTINGS_BYTES, pipes=True))


def decode_yaml(data: bytes) -> Any:
    """Parse YAML of settings, within limits on depth, aliases and values. Raises ValueError."""
    import yaml  # takes a dozen milliseconds, and few commands need it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """SafeLoader, with limits on nesting and on aliases."""

        depth = 0
        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise FileRefusedError(f"it nests more than {MAX_DEPTH} levels")
            if self.aliases > _MAX_ALIASES:
                raise FileRefusedError(f"it has more than {_MAX_ALIASES} aliases")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            _require_few(len(node.value))

    try:
        value = yaml.load(data, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (RecursionError, OverflowError) as error:
        raise FileRefusedError("it refers to itself, or has an overlong number") from error
    for count, _ in enumerate(_values(value)):
        _require_few(count)
    return value


def require_file(path: Path, limit: int) -> None:
    """Require a regular file of at most ``limit`` bytes, before a library reads it.

    Raises:
        OSError: the file does not exist.
        FileRefusedError: the file is of another kind, or too large.
    """
    _check(path.stat(), limit, pipes=False)


def require_tokenizer(path: Path) -> None:
    """Require a tokenizer.json that the tokenizers library can read without ending the process.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is refused, or is not valid JSON.
    """
    check_tokenizer(read_bytes(path, TOKENIZER_BYTES))


def check_tokenizer(data: bytes) -> None:
    """The same for the content of a tokenizer.json.

    The library cuts ``continuing_subword_prefix`` off the right part of each merge, and aborts if
    it is not there.

    Raises:
        ValueError: the content is refused, or is not valid JSON.
    """
    if not _HAS_PREFIX.search(data):
        return
    model = decode_json(data, max_values=None).get("model", {})
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges") or []
    for merge in merges if prefix else ():
        right = merge.split(" ")[-1] if isinstance(merge, str) else merge[-1]
        if not right.startswith(prefix):
            raise FileRefusedError(f"the merge {merge!r:.80} lacks `continuing_subword_prefix`")


def _check(found: os.stat_result, limit: int, pipes: bool) -> None:
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise FileRefusedError(f"it is {kind}, not a regular file")
    if found.st_size > limit:
        raise FileRefusedError(_too_large(limit))


def _too_large(limit: int) -> str:
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
    return f"it has more than {size}"


def _wait(descriptor: int) -> None:
    """Wait until a pipe has data or has been closed by its writer."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    if not poller.poll(PIPE_SECONDS * 1000):
        raise TimeoutError(errno.ETIMEDOUT, f"nothing was written to it for {PIPE_SECONDS:g} s")


def _values(value: Any) -> Iterator[Any]:
    """All values; aliased ones once per alias."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(value)


def _require_few(count: int) -> None:
    if count > _MAX_YAML_VALUES:
        raise FileRefusedError(f"it has more than {_MAX_YAML_VALUES} values")
