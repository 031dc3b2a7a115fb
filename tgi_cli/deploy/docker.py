"""A script that runs a container: https://docs.docker.com/reference/cli/docker/container/run/"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator

from tgi_cli.deploy.deployment import DATA, SECRETS, USER_ID, Deployment, binary_size


def render(deployment: Deployment) -> str:
    """A POSIX shell script."""
    header = deployment.header(
        "Build the image from a clone first: docker build -t "
        f"{deployment.image} -f docs/Dockerfile .",
        *(f"The {name} is read from {path}." for name, path in deployment.secrets.items()),
    )
    words = [shlex.join(option) for option in _options(deployment)]
    words += [shlex.quote(deployment.image), shlex.join(deployment.arguments)]
    command = " \\\n  ".join(words)
    return f"#!/bin/sh\n{header}exec docker run \\\n  {command}\n"


def _options(deployment: Deployment) -> Iterator[list[str]]:
    yield ["--detach"]
    yield ["--name", deployment.name]
    yield ["--restart", "unless-stopped"]
    yield ["--stop-timeout", str(deployment.stop_seconds)]
    yield ["--publish", f"{_address(deployment.hostname)}{deployment.port}:{deployment.port}"]
    yield ["--user", f"{USER_ID}:{USER_ID}"]
    yield ["--read-only"]
    yield ["--tmpfs", "/tmp:size=256m"]
    yield ["--cap-drop", "ALL"]
    yield ["--security-opt", "no-new-privileges"]
    if deployment.memory is not None:
        size = binary_size(deployment.memory).lower()
        yield ["--memory", size]
        yield ["--memory-swap", size]  # the same: no swap
    if deployment.cpuset_cpus:
        yield ["--cpuset-cpus", deployment.cpuset_cpus]
    elif deployment.cpus is not None:
        yield ["--cpus", str(deployment.cpus)]
    if deployment.cpuset_mems:
        yield ["--cpuset-mems", deployment.cpuset_mems]
    if deployment.gpus:
        yield ["--gpus", str(deployment.gpus)]
        yield ["--shm-size", "1g"]  # of NCCL
    for name, value in deployment.environment(SECRETS, DATA).items():
        yield ["--env", f"{name}={value}"]
    yield ["--env", f"PORT={deployment.port}"]  # for the image's health check
    yield ["--mount", _mount(type="volume", source=f"{deployment.name}-data", target=DATA)]
    for name, path in deployment.secrets.items():
        yield ["--mount", _mount(type="bind", source=path, target=f"{SECRETS}/{name}")]
    for path in deployment.mounts:
        yield ["--mount", _mount(type="bind", source=path, target=path)]


def _address(hostname: str) -> str:
    if hostname == "0.0.0.0":
        return ""
    return f"[{hostname}]:" if ":" in hostname else f"{hostname}:"


def _mount(**fields: object) -> str:
    """A value of ``--mount``, which Docker reads as a record of CSV."""
    words = [f"{name}={value}" for name, value in fields.items()]
    if fields["type"] == "bind":
        words.append("readonly")
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(words)
    return line.getvalue()
