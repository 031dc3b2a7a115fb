"""The check by hand of custom resources, with a definition made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.published_crds import main


def definition(spec: dict[str, Any]) -> dict[str, Any]:
    """One of an InferencePool with these fields in its spec."""
    fields = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": {"type": "object", "properties": spec},
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": fields}}
    return {
        "kind": "CustomResourceDefinition",
        "spec": {
            "group": "inference.networking.k8s.io",
            "names": {"kind": "InferencePool"},
            "versions": [{"name": "v1", "schema": schema}],
        },
    }


ANY: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"selector": ANY, "targetPorts": ANY, "endpointPickerRef": ANY}, None),
        ({"selector": ANY, "targetPorts": ANY}, "'endpointPickerRef' was unexpected"),
        (
            {"selector": {"type": "string"}, "targetPorts": ANY, "endpointPickerRef": ANY},
            "$.spec.selector",
        ),
    ],
)
def test_faults_are_found(
    fields: dict[str, Any], fault: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(definition(fields)))
    assert main(tmp_path) == 1, "other kinds have no definition"
    said = capsys.readouterr().out
    assert "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet: no definition" in said
    faults = [line for line in said.splitlines() if line.startswith("InferencePool: ")]
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]
    assert "inference.networking.k8s.io/v1 InferencePool: 1 objects" in said
