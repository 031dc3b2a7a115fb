"""Names and labels that the objects of a deployment find each other by."""

from __future__ import annotations

from typing import Any

import yaml

from tgi_cli.deploy.deployment import Deployment
from tgi_cli.deploy.kubernetes.options import KubernetesOptions

SERVER = "tgi"
"""``app.kubernetes.io/name`` of the pods that run the server."""

SECURITY_CONTEXT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of containers that run other projects' images, which may write to their root."""


def labels(deployment: Deployment, program: str = SERVER) -> dict[str, str]:
    """Labels of one program's objects: https://kubernetes.io/docs/concepts/overview/
    working-with-objects/common-labels/"""
    return {"app.kubernetes.io/name": program, "app.kubernetes.io/instance": deployment.name}


def metadata(
    deployment: Deployment, options: KubernetesOptions, suffix: str = "", program: str = SERVER
) -> dict[str, Any]:
    """Metadata of an object whose name is the deployment's and ``suffix``."""
    found: dict[str, Any] = {"name": deployment.name + suffix}
    if options.namespace:
        found["namespace"] = options.namespace
    return found | {"labels": labels(deployment, program)}


def non_root(user: int) -> dict[str, Any]:
    """The security context of a pod whose processes are ``user``'s."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def role_to_read(
    deployment: Deployment,
    options: KubernetesOptions,
    suffix: str,
    program: str,
    resources: tuple[tuple[str, tuple[str, ...]], ...],
) -> list[dict[str, Any]]:
    """A service account that may read ``resources``, (API group, plurals), of its namespace."""
    meta = metadata(deployment, options, suffix, program)
    rbac = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [group], "resources": list(plurals), "verbs": ["get", "list", "watch"]}
        for group, plurals in resources
    ]
    subject = {
        "kind": "ServiceAccount",
        "name": meta["name"],
        "namespace": options.namespace,
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "subjects": [subject],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": meta["name"]},
        },
    ]


def to_yaml(*documents: dict[str, Any], explicit_start: bool = False) -> str:
    """YAML documents, with texts of several lines as blocks."""
    text: str = yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=explicit_start
    )
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """Write shared values as often as they occur: not all tools read anchors."""
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    block = "\n" in value and all(line.isprintable() for line in value.split("\n"))
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if block else None)


_Dumper.add_representer(str, _represent_text)
