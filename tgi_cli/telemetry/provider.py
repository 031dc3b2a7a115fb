"""What traces and metrics have in common: the resource they come from, and their end."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any

from tgi_cli.version import __version__

_CLOSE_SECONDS = 2.0

Attributes = Mapping[str, Any]


def service_resource(name: str, more: Attributes | None = None) -> Any:
    """The SDK's resource of this process: service, version, and an instance id of its own.

    Without an id, a collector would take the metrics of several replicas for those of one:
    https://opentelemetry.io/docs/specs/semconv/resource/service/. OTEL_RESOURCE_ATTRIBUTES may
    name another one.

    Args:
        name: of the service.
        more: further attributes.
    """
    from opentelemetry.sdk.resources import (
        SERVICE_INSTANCE_ID,
        SERVICE_NAME,
        SERVICE_VERSION,
        Resource,
    )

    about = {**(more or {}), SERVICE_NAME: name, SERVICE_VERSION: __version__}
    resource = Resource.create(about)
    if SERVICE_INSTANCE_ID in resource.attributes:
        return resource
    return resource.merge(Resource({SERVICE_INSTANCE_ID: _instance_id()}))


@cache
def _instance_id() -> str:
    return str(uuid.uuid4())


def shut_down(*providers: Any) -> None:
    """Send what providers of the SDK still have, for two seconds at most.

    The SDK's own timeouts are longer than the shutdown of a server may take.
    """

    def close(provider: Any) -> None:
        with contextlib.suppress(Exception):  # it has logged what could not be sent
            provider.shutdown()

    threads = [
        threading.Thread(target=close, args=(provider,), name="telemetry", daemon=True)
        for provider in providers
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
