"""The deployment that receives HTTP requests from Ray's proxies."""

from __future__ import annotations

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from tgi_cli import logging
from tgi_cli.ray_serve.front import FrontApp, ReplicaStream
from tgi_cli.ray_serve.messages import ForwardedRequest, WholeResponse


class RayReplicas:
    """The replicas behind a handle; see :class:`tgi_cli.ray_serve.front.Replicas`."""

    full = BackPressureError
    lost = RayError

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._respond = handle.options(method_name="respond", stream=True)

    def send(self, request: ForwardedRequest) -> ReplicaStream:
        """See :class:`tgi_cli.ray_serve.front.Replicas`."""
        stream: ReplicaStream = self._respond.remote(request)
        return stream

    async def send_to_all(self, request: ForwardedRequest, seconds: float) -> list[WholeResponse]:
        """See :class:`tgi_cli.ray_serve.front.Replicas`."""
        try:
            answers = await self._handle.broadcast("respond_whole", request).results_async(
                timeout_s=seconds, return_exceptions=True
            )
        except (RayServeException, TimeoutError):
            return []
        return [answer for answer in answers if isinstance(answer, WholeResponse)]


@serve.ingress()
class Front:
    """See :class:`tgi_cli.ray_serve.front.FrontApp`.

    Args:
        engine: Handle of the replicas' deployment.
        body_limit: Bytes of a body that are read.
        keys: API keys, one of which clients must send; may be empty.
        log_level: As ``--logger-level``.
        json_output: Whether log lines are JSON.
    """

    def __init__(
        self,
        engine: DeploymentHandle,
        body_limit: int,
        keys: tuple[str, ...],
        log_level: str,
        json_output: bool,
    ) -> None:
        logging.setup("front", log_level, json_output)
        self._engine = engine
        self._body_limit = body_limit
        self._keys = keys

    def __serve_build_asgi_app__(self) -> FrontApp:
        return FrontApp(RayReplicas(self._engine), self._body_limit, self._keys)
