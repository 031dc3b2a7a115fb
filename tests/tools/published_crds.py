"""Validates what `tgi deploy k8s` prints against custom resource definitions as published.

python -m tests.tools.published_crds FOLDER

FOLDER has the YAML files of the definitions, such as config/crd/bases of their repositories. Fields
that a definition does not have are errors. Rules in CEL (x-kubernetes-validations) are not run.
Exits with 1 if a manifest is invalid, or if a kind of ours has no definition there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.unit.deploy.custom_resources import SCHEMAS
from tests.unit.deploy.test_files import PLAIN
from tests.unit.deploy.test_kubernetes import GPU, objects, variants
from tgi_cli.deploy.kubernetes.options import KubernetesOptions

Schema = dict[str, Any]


def published(folder: Path) -> dict[tuple[str, str], Schema]:
    """The schemas of the definitions in a folder, by version and kind."""
    found = {}
    for path in sorted(folder.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if not isinstance(document, dict) or document["kind"] != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}/{version['name']}"
                schema = closed(version["schema"]["openAPIV3Schema"])
                found[name, spec["names"]["kind"]] = schema
    return found


def closed(schema: Any) -> Any:
    """The schema, without room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(each) for name, each in schema.items()}
    named = isinstance(schema.get("properties"), dict)
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def manifests() -> Iterator[dict[str, Any]]:
    """Our objects of custom kinds, in all variants."""
    for options in variants():
        yield from (each for each in objects(GPU, options) if each["kind"] in SCHEMAS)
    staged = KubernetesOptions(nodes=2, namespace="llm")
    yield from (each for each in objects(PLAIN, staged) if each["kind"] in SCHEMAS)


def main(folder: Path) -> int:
    """Validate; print one line for each kind, and each fault."""
    schemas = published(folder)
    counts: dict[tuple[str, str], int] = {}
    faults = 0
    for manifest in manifests():
        kind = manifest["apiVersion"], manifest["kind"]
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in schemas:
            continue
        for error in jsonschema.Draft202012Validator(schemas[kind]).iter_errors(manifest):
            faults += 1
            print(f"{kind[1]}: {error.json_path}: {error.message[:200]}")
    for (version, name), count in sorted(counts.items()):
        there = (version, name) in schemas
        faults += not there
        print(f"{version} {name}: {f'{count} objects' if there else 'no definition'}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
