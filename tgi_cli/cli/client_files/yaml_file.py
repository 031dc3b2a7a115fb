"""YAML with values and lists of objects at the top level, edited in place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tgi_cli.cli.client_files.merging import merged
from tgi_cli.files import decode_yaml


def parse_yaml(text: str) -> Any:
    """Parse YAML. Raises ValueError."""
    return decode_yaml(text.encode())


def dump_yaml(new: Mapping[str, Any]) -> str:
    """Write settings as YAML."""
    import yaml

    text: str = yaml.safe_dump(dict(new), sort_keys=False, allow_unicode=True, width=10_000)
    return text


def merge_yaml(text: str, new: Mapping[str, Any]) -> str:
    """Merge settings into YAML: values and lists of objects at the top level.

    Raises:
        ValueError: the text is not YAML, or not a mapping.
    """
    import yaml  # takes a dozen milliseconds, and few clients need it

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is not a mapping")
    nodes = {key.value: node for key, node in root.value}
    edits: list[tuple[int, int, str]] = []
    missing = {key: value for key, value in new.items() if key not in nodes}
    for key, value in new.items():
        if key in nodes:
            edits += _yaml_edits(nodes[key], value, yaml)
    text = text if text.endswith("\n") else text + "\n"
    for start, end, replacement in sorted(edits, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text + (dump_yaml(missing) if missing else "")


def _yaml_edits(node: Any, new: Any, yaml: Any) -> Iterator[tuple[int, int, str]]:
    if not isinstance(new, list):
        yield node.start_mark.index, _yaml_end(node), json.dumps(new, ensure_ascii=False)
        return
    if not node.value:  # ``[]``, or nothing
        body = dump_yaml({"_": new}).partition("\n")[2].rstrip("\n")
        yield node.start_mark.index, node.end_mark.index, "\n" + body
        return
    pad = " " * node.start_mark.column
    for item in new:
        found = [old for old in node.value if _yaml_value(old, "name") == item["name"]]
        if found:
            item = merged(yaml.SafeLoader("").construct_document(found[0]), item)
        body = dump_yaml(item).rstrip("\n").replace("\n", f"\n{pad}  ")
        if found:
            yield found[0].start_mark.index, _yaml_end(found[0]), body
        else:  # before the first: a block's end is not marked exactly
            yield node.start_mark.index, node.start_mark.index, f"- {body}\n{pad}"


def _yaml_value(node: Any, key: str) -> Any:
    pairs = node.value if isinstance(node.value, list) else []
    return next((value.value for name, value in pairs if name.value == key), None)


def _yaml_end(node: Any) -> int:
    """Where the last value ends; the end mark of a block includes comments after it."""
    if isinstance(node.value, str) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _yaml_end(last[1] if isinstance(last, tuple) else last)
