"""A file of Docker Compose: https://docs.docker.com/reference/compose-file/"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tgi_cli.deploy.deployment import (
    DATA,
    SECRETS,
    USER_ID,
    Deployment,
    binary_size,
    health_command,
)
from tgi_cli.errors import ConfigError

LOAD_SECONDS = 1800
"""Time that downloading and loading a model may take."""


def render(deployment: Deployment) -> str:
    """YAML.

    Raises:
        ConfigError: Compose cannot bind memory to NUMA nodes.
    """
    if deployment.cpuset_mems:
        raise ConfigError(
            "Compose cannot bind memory to NUMA nodes (--cpuset-mems)",
            "bind the cores of one node by --cpuset-cpus, or use `tgi deploy docker`",
        )
    header = deployment.header(
        f"Start: docker compose up --detach (the image: docker build -t {deployment.image} "
        "-f docs/Dockerfile .)",
        *(
            f"The {name} is read from {path}, which user {USER_ID} must be able to read."
            for name, path in deployment.secrets.items()
        ),
    )
    document: dict[str, Any] = {
        "name": deployment.name,
        "services": {deployment.name: _service(deployment)},
    }
    if deployment.secrets:
        document["secrets"] = {
            name: {"file": _literal(path)} for name, path in deployment.secrets.items()
        }
    document["volumes"] = {"data": {}}
    text: str = yaml.safe_dump(document, sort_keys=False, width=100)
    return header + text


def _service(deployment: Deployment) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": deployment.image,
        "command": [_literal(word) for word in deployment.arguments],
        "user": f"{USER_ID}:{USER_ID}",
        "environment": deployment.environment(SECRETS, DATA),
        "ports": [_port(deployment)],
        "volumes": [
            {"type": "volume", "source": "data", "target": DATA},
            *(
                {"type": "bind", "source": _literal(p), "target": _literal(p), "read_only": True}
                for p in deployment.mounts
            ),
        ],
        "restart": "unless-stopped",
        "stop_grace_period": f"{deployment.stop_seconds}s",
        "healthcheck": {
            "test": ["CMD", *health_command(deployment.port)],
            "interval": "10s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{LOAD_SECONDS}s",
        },
        "read_only": True,
        "tmpfs": ["/tmp:size=256m"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}},
    }
    if deployment.secrets:
        service["secrets"] = list(deployment.secrets)
    if deployment.cpuset_cpus:
        service["cpuset"] = deployment.cpuset_cpus
    if deployment.gpus:
        service["shm_size"] = "1g"  # of NCCL
    if deployment.memory is not None:
        service["memswap_limit"] = binary_size(deployment.memory)  # the limit itself: no swap
    if resources := _resources(deployment):
        service["deploy"] = {"resources": resources}
    return service


def _resources(deployment: Deployment) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if deployment.cpus is not None and not deployment.cpuset_cpus:
        limits["cpus"] = str(deployment.cpus)
    if deployment.memory is not None:
        limits["memory"] = binary_size(deployment.memory)
    resources: dict[str, Any] = {"limits": limits} if limits else {}
    if deployment.gpus:
        gpu = {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [gpu]}
    return resources


def _port(deployment: Deployment) -> dict[str, Any]:
    port = {"target": deployment.port, "published": str(deployment.port)}
    return port if deployment.hostname == "0.0.0.0" else port | {"host_ip": deployment.hostname}


def _literal(value: str | Path) -> str:
    """A value in which Compose replaces no variables."""
    return str(value).replace("$", "$$")
