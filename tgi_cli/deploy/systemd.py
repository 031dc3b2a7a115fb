"""A unit of systemd: https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tgi_cli.deploy.deployment import Deployment, binary_size
from tgi_cli.errors import ConfigError, ExitCode

_KEEP_STOPPED = (
    ExitCode.USAGE,
    ExitCode.MODEL_UNAVAILABLE,
    ExitCode.MODEL_UNUSABLE,
    ExitCode.ADDRESS_IN_USE,
    ExitCode.OUT_OF_MEMORY,
)
"""Exit codes that recur until the configuration changes."""


def render(deployment: Deployment, executable: Path) -> str:
    """A service unit.

    Args:
        deployment: what it runs; ``image`` and ``mounts`` have no effect.
        executable: the program ``tgi``.

    Raises:
        ConfigError: a path that systemd cannot name.
    """
    if not re.fullmatch(r"/[A-Za-z0-9._/+@-]+", str(executable)):
        raise ConfigError(
            f"systemd cannot start {str(executable)!r}", "install tgi in a folder such as /opt/tgi"
        )
    for name, path in deployment.secrets.items():
        if not re.fullmatch(r"/[^\s:%\\\"']+", str(path)):
            raise ConfigError(
                f"systemd cannot load the {name} from {str(path)!r}",
                f"put it into a file such as /etc/{deployment.name}/{name}",
            )
    header = deployment.header(
        f"Save as /etc/systemd/system/{deployment.name}.service, then: "
        f"systemctl enable --now {deployment.name}",
        "The service has a user of its own, which must be able to read tgi's folder"
        " and a local model.",
        *(f"The {name} is read from {path}." for name, path in deployment.secrets.items()),
    )
    command = " ".join([str(executable), *map(quoted, deployment.arguments)])
    sections = {
        "Unit": _unit(deployment),
        "Service": [f"ExecStart={command}", *_service(deployment)],
        "Install": ["WantedBy=multi-user.target"],
    }
    parts = [f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items()]
    return header + "\n" + "\n".join(parts)


def quoted(word: str) -> str:
    """A word of ``ExecStart``, in which systemd replaces neither specifiers nor variables."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escapes = (c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode()) for c in word)
    return f'"{"".join(escapes)}"' if not re.fullmatch(r"[\w./:=,@+-]+", word) else word


def _unit(deployment: Deployment) -> list[str]:
    return [
        f"Description=tgi serve ({deployment.name})",
        "After=network-online.target",
        "Wants=network-online.target",
    ]


def _service(deployment: Deployment) -> Iterator[str]:
    name = deployment.name
    yield "Restart=on-failure"
    yield "RestartSec=5"
    yield "RestartPreventExitStatus=" + " ".join(str(int(code)) for code in _KEEP_STOPPED)
    yield "# SIGTERM goes to the launcher alone, SIGKILL to all processes after the drain."
    yield "KillMode=mixed"
    yield f"TimeoutStopSec={deployment.stop_seconds}"
    yield "DynamicUser=yes"
    yield f"CacheDirectory={name}"
    yield f"RuntimeDirectory={name}"
    yield "RuntimeDirectoryMode=0700"
    variables = deployment.environment("%d", f"%C/{name}") | {"XDG_RUNTIME_DIR": f"%t/{name}"}
    for variable, value in variables.items():
        yield f"Environment={variable}={value}"
    for secret, path in deployment.secrets.items():
        yield f"LoadCredential={secret}:{path}"
    if deployment.memory is not None:
        yield f"MemoryMax={binary_size(deployment.memory)}"
        yield "MemorySwapMax=0"
    if deployment.cpuset_cpus:
        yield f"CPUAffinity={deployment.cpuset_cpus}"
    elif deployment.cpus is not None:
        yield f"CPUQuota={100 * deployment.cpus}%"
    if deployment.cpuset_mems:
        yield "NUMAPolicy=bind"
        yield f"NUMAMask={deployment.cpuset_mems}"
    yield "LimitNOFILE=65536"
    yield "NoNewPrivileges=yes"
    yield "ProtectSystem=strict"
    yield "ProtectHome=read-only"
    yield "PrivateTmp=yes"
    if not deployment.gpus:
        yield "PrivateDevices=yes"
    yield "ProtectClock=yes"
    yield "ProtectControlGroups=yes"
    yield "ProtectHostname=yes"
    yield "ProtectKernelLogs=yes"
    yield "ProtectKernelModules=yes"
    yield "ProtectKernelTunables=yes"
    yield "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK"
    yield "RestrictNamespaces=yes"
    yield "RestrictSUIDSGID=yes"
    yield "LockPersonality=yes"
    yield "CapabilityBoundingSet="
