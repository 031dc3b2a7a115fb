"""Deploys a model on Ray and stays until a signal: on a cluster of its own, or on another one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tgi_cli import demo
from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.config.ray_variables import SERVE_VARIABLES
from tgi_cli.errors import ConfigError, ExitCode, ShardError
from tgi_cli.process import bind
from tgi_cli.process.installation import install_command
from tgi_cli.process.signals import delivered, exiting_on
from tgi_cli.process.spawn import child_environment, run_in_fork
from tgi_cli.ray_serve.config import RayConfig, bundle_of, check_ray
from tgi_cli.router.config import RouterConfig

log = logging.getLogger(__name__)

Locate = Callable[[ServeConfig], tuple[ServeConfig, Path]]

AUTH_MODE = "RAY_AUTH_MODE"
_OBJECT_STORE_BYTES = 256 << 20
"""Tokens do not pass through Ray's object store, only large requests do."""
_STATUS_SECONDS = 2.0
_LOST_SECONDS = 60.0
"""Time without an answer of the cluster after which it counts as lost."""
REMOVAL_SECONDS = 30.0
"""For Ray to remove replicas whose requests have ended."""
_CAUSE = re.compile(r"^(?:tgi_cli\.errors\.|\w+Error: )?(\w+Error): (.+)$", re.MULTILINE)


def run(config: RayConfig, model: ServeConfig, router: RouterConfig, locate: Locate) -> int:
    """Deploy a model and serve it until a signal; the application is removed with the command.

    Args:
        config: Configuration of the deployment.
        model: Configuration of the model servers; an empty id means the bundled model.
        router: Configuration of the replicas' HTTP applications, but for the model and the engine.
        locate: See :func:`tgi_cli.launcher.serve.serve`; called on the machine of each replica,
            and here first if the cluster is this machine.

    Returns:
        The exit code: 0 after a signal, 130 after a second one while requests end.

    Raises:
        TgiError: Settings contradict each other, Ray is missing, the port is taken, the model is
            unavailable, there is no cluster to join, or the deployment has failed.
    """
    began = time.monotonic()
    check_settings(model)
    check_ray(config, model, router)
    _set_up_environment()
    if find_spec("ray") is None:
        raise _not_installed()
    with exiting_on(signal.SIGTERM, signal.SIGINT):
        # In a fork, which Ray's threads would not survive: it is imported later.
        name = _prepare_here(config, model, locate) if config.own_cluster else model.model_id
    signals: SimpleQueue[signal.Signals] = SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cluster(config))
        # Ray replaces handlers of signals when it connects.
        stack.enter_context(delivered([signal.SIGTERM, signal.SIGINT], signals.put))
        deployment = RayDeployment(config, model, router, locate)
        failed = deployment.start()
        while failed.is_alive():
            with contextlib.suppress(Empty):
                log.info("%s: stopping", signals.get(timeout=_STATUS_SECONDS / 10).name)
                return deployment.remove(signals)
        deployment.raise_failure()
        tls = router.ssl_certfile is not None
        url = bind.url(model.hostname, model.port, tls)
        log.info(
            "ready: %s on %s in %.1f s",
            name or demo.MODEL_ID,
            url,
            time.monotonic() - began,
            extra=_counts(config) if model.json_output else {},
        )
        return deployment.watch(signals)


def _set_up_environment() -> None:
    """Set what Ray reads from the environment when it is imported."""
    if os.environ.setdefault(AUTH_MODE, "token").lower() != "token":
        log.warning(
            "%s=%s: whoever reaches Ray's ports can run programs on its machines",
            AUTH_MODE,
            os.environ[AUTH_MODE],
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in SERVE_VARIABLES.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Workers of a cluster that starts here find the package where this process has it.
    os.environ.update(child_environment())


def _not_installed() -> ConfigError:
    return ConfigError("Ray Serve is not installed", f"`{install_command('ray')}`")


def _prepare_here(config: RayConfig, model: ServeConfig, locate: Locate) -> str:
    """Find the model and check the port, before Ray starts; returns the model's name."""
    with bind.bind(model.hostname, model.port):
        pass
    found, _ = run_in_fork(partial(locate, model))
    return found.model_id


@contextlib.contextmanager
def _cluster(config: RayConfig) -> Iterator[None]:
    """Be connected to the cluster, which ends with the block if it is the own one.

    Raises:
        ConfigError: There is no cluster to join, it does not accept this user, or Ray Serve is not
            installed.
    """
    try:
        import ray
        from ray import serve  # noqa: F401 (an extra of Ray's)
        from ray.exceptions import RayError
    except ImportError as error:
        raise _not_installed() from error
    common = {"include_dashboard": False, "configure_logging": True, "logging_level": "WARNING"}
    try:
        if config.own_cluster:
            _make_token()
            log.info("starting Ray %s on this machine", ray.__version__)
            ray.init(
                address="local",
                num_cpus=config.cluster_cpus,
                num_gpus=config.cluster_gpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                **common,
            )
        else:
            del common["include_dashboard"]
            ray.init(address=config.ray_address, **common)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster can be used: {_first_line(error)}",
            "`tgi deploy ray` starts one on this machine"
            if not config.own_cluster
            else "see Ray's log in /tmp/ray/session_latest/logs",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _make_token() -> None:
    """Write a token for Ray where it looks for one, readable by this user alone.

    Ray would write one that the user's mask decides about.
    """
    if os.environ[AUTH_MODE].lower() != "token":
        return
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))


class RayDeployment:
    """One application on a cluster that this process is connected to."""

    def __init__(
        self, config: RayConfig, model: ServeConfig, router: RouterConfig, locate: Locate
    ) -> None:
        self._config = config
        self._model = model
        self._router = router
        self._locate = locate
        self._failure: Exception | None = None

    def start(self) -> threading.Thread:
        """Deploy in a thread, which ends when the replicas serve, or none will."""
        thread = threading.Thread(target=self._start, name="deploying", daemon=True)
        thread.start()
        return thread

    def raise_failure(self) -> None:
        """Raise why the deployment has failed, if it has, and remove what there is of it."""
        if self._failure is not None:
            self._delete()
            raise self._failure

    def _start(self) -> None:
        try:
            self._deploy()
        except Exception as error:  # the main thread raises it
            self._failure = error

    def _deploy(self) -> None:
        import ray
        from ray import serve
        from ray.serve.context import _get_global_client

        from tgi_cli.ray_serve.application import make_application, quiet_logs

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        config, model, router = self._config, self._model, self._router
        stages = model.pipeline_parallel_size
        bundle = bundle_of(config, model.num_shard, stages, ray.cluster_resources())
        options: dict[str, Any] = {"host": model.hostname, "port": model.port}
        if router.ssl_certfile is not None:
            options["ssl_certfile"] = str(router.ssl_certfile)
            options["ssl_keyfile"] = str(router.ssl_keyfile or router.ssl_certfile)
        serve.start(http_options=options, logging_config=quiet_logs())
        # Ray ignores the options if its proxies run already.
        there = _get_global_client().http_config
        if (there.host, there.port) != (model.hostname, model.port):
            raise ConfigError(
                f"Ray Serve of this cluster listens on {there.host} port {there.port}",
                f"give --hostname {there.host} --port {there.port}, or `serve shutdown` it",
            )
        log.info(
            "deploying %d replicas, each %s%s",
            config.replicas,
            f"of {stages} stages with " if stages > 1 else "",
            ", ".join(f"{count:g} {name}" for name, count in bundle.resources.items()),
        )
        application = make_application(config, bundle, model, router, self._locate)
        try:
            serve.run(
                application,
                name=config.ray_application,
                route_prefix="/",
                logging_config=quiet_logs(),
            )
        except RuntimeError as error:
            raise ShardError(
                f"the deployment has failed: {_cause(str(error))}", "see the replicas' log above"
            ) from error

    def watch(self, signals: SimpleQueue[signal.Signals]) -> int:
        """Log how many replicas serve until a signal, then remove the application.

        Returns:
            The exit code.

        Raises:
            ShardError: The cluster is gone, or the application was removed.
        """
        answers: SimpleQueue[Any] = SimpleQueue()
        ended = threading.Event()
        threading.Thread(
            target=self._ask, args=(answers, ended), name="status", daemon=True
        ).start()
        try:
            return self._watch(signals, answers)
        finally:
            ended.set()

    def _watch(self, signals: SimpleQueue[signal.Signals], answers: SimpleQueue[Any]) -> int:
        before: Mapping[str, int] = {}
        answered, why = time.monotonic(), "no answer"
        while True:
            with contextlib.suppress(Empty):
                received = signals.get(timeout=_STATUS_SECONDS)
                log.info("%s: finishing what is in flight (again: stop now)", received.name)
                return self.remove(signals)
            if time.monotonic() - answered > _LOST_SECONDS:
                raise ShardError(f"the Ray cluster is gone: {why}", "see its logs")
            if answers.empty():
                continue
            found = answers.get()
            if isinstance(found, Exception):
                why = _first_line(found)
                log.warning("the Ray cluster does not answer: %s", why)
                continue
            answered = time.monotonic()
            if found is None:
                raise ShardError(
                    f"the application {self._config.ray_application!r} was removed "
                    "from the cluster",
                    "deploy it again",
                )
            now = _replica_states(found)
            if now != before:
                states = ", ".join(f"{count} {state}" for state, count in now.items())
                log.info("replicas: %s", states)
            before = now

    def _ask(self, answers: SimpleQueue[Any], ended: threading.Event) -> None:
        """Put the application's status, None if it was removed, or the error of asking, at
        intervals: the call has no timeout, and signals are not to wait for it."""
        from ray import serve

        while not ended.wait(_STATUS_SECONDS):
            try:
                answers.put(serve.status().applications.get(self._config.ray_application))
            except Exception as error:  # Ray has no common class of what its calls raise
                answers.put(error)

    def remove(self, signals: SimpleQueue[signal.Signals]) -> int:
        """Remove the application once its requests have ended; returns the exit code."""
        removing = threading.Thread(target=self._delete, name="removing", daemon=True)
        removing.start()
        while removing.is_alive():
            with contextlib.suppress(Empty):
                signals.get(timeout=_STATUS_SECONDS / 10)
                return ExitCode.INTERRUPTED
        log.info("stopped")
        return ExitCode.OK

    def _delete(self) -> None:
        """Remove the application; returns when its requests have ended, or their time is up."""
        from ray import serve

        end = time.monotonic() + self._model.graceful_termination_timeout + REMOVAL_SECONDS
        with contextlib.suppress(Exception):  # the cluster may be gone
            while True:
                try:
                    serve.delete(self._config.ray_application)
                    break
                except TimeoutError:  # Ray waits for a minute
                    if time.monotonic() > end:
                        break
            if self._config.own_cluster:
                serve.shutdown()


def _replica_states(application: Any) -> dict[str, int]:
    """The number of model replicas by state, in lower case."""
    from tgi_cli.ray_serve.application import ENGINE

    deployment = application.deployments.get(ENGINE)
    states = {} if deployment is None else deployment.replica_states
    return {str(getattr(state, "value", state)).lower(): n for state, n in states.items() if n}


def _counts(config: RayConfig) -> dict[str, int]:
    return {"min_replicas": config.lowest, "max_replicas": config.highest}


def _cause(text: str) -> str:
    """The cause within a traceback of a replica, in one line."""
    found = _CAUSE.findall(text)
    return f"{found[-1][1]}" if found else text.strip().splitlines()[-1]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
