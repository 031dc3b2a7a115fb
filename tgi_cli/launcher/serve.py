"""``tgi serve``: the port, the model, the processes, the ready line."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.engine.common_limits import common_limits
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import ConfigError, RouterError
from tgi_cli.launcher.backoff import Restarts
from tgi_cli.launcher.banner import announce
from tgi_cli.launcher.child_process import ChildProcess, adopt_orphans
from tgi_cli.launcher.health_probe import HEALTH, HealthProbe
from tgi_cli.launcher.model_server import ModelServerParts
from tgi_cli.launcher.placement import place_replicas
from tgi_cli.launcher.start import start_command, start_model_server
from tgi_cli.launcher.supervisor import ServerParts, Supervisor
from tgi_cli.model_server.config import ModelServerConfig
from tgi_cli.process import bind
from tgi_cli.process.authenticated_channel import read_secret
from tgi_cli.process.control_channel import ControlChannel
from tgi_cli.process.heartbeat import SharedHeartbeat
from tgi_cli.process.parent_death import parent_pipe
from tgi_cli.process.resident_memory import release_file_pages, trim_heap
from tgi_cli.process.runtime_dir import SOCKET, VARIABLE, runtime_folder
from tgi_cli.process.signals import exiting_on
from tgi_cli.process.spawn import run_in_fork
from tgi_cli.process.unix_socket import remove_stale
from tgi_cli.router.config import RouterConfig

log = logging.getLogger(__name__)


def serve(
    config: ServeConfig,
    router: RouterConfig,
    locate: Callable[[ServeConfig], tuple[ServeConfig, Path]],
) -> int:
    """Serve ``config.model_id`` until a signal; an empty id means the bundled model.

    Args:
        config: Configuration of the model server.
        router: Of the router, but for the model and the engine's address, which are known later.
            Its socket is used, or bound if it has none.
        locate: Finds or downloads the model and its adapters; returns ``config`` with their full
            names, and the model's folder. Called in a process of its own.

    Returns:
        The exit code: 0 after SIGTERM or Ctrl-C, or that of a child which reported why it ended.

    Raises:
        TgiError: Settings contradict each other, the port is taken, the model is unavailable, a
            child died without a report, or the model server died too often.
    """
    began = time.monotonic()
    check_settings(config)
    # Announced by the process that has bound the socket.
    behind_parent = router.socket_fd is not None
    if router.may_sleep and config.shard_uds_path is not None:
        raise ConfigError(
            "a model server that sleeps cannot be driven on --shard-uds-path: its clients would "
            "find it gone",
            "leave off --sleep-idle-seconds and --enable-sleep-mode, or --shard-uds-path",
        )
    if config.nnodes > 1 and config.replicas > 1:
        raise ConfigError(
            f"--replicas {config.replicas} is not supported with --nnodes {config.nnodes}",
            "leave one of them off; on Ray, replicas have their stages on several nodes",
        )
    with (
        bind.bind_or_adopt(config.hostname, config.port, router.socket_fd) as sock,
        # Until the supervisor handles signals, there is nothing to finish.
        exiting_on(signal.SIGTERM, signal.SIGINT),
    ):
        config, model_path = run_in_fork(partial(locate, config))
        placements = place_replicas(config)
        host, port = bind.local_address(sock)
        bind.warn_if_open(config.hostname, port, router.api_key, router.cors_allow_origin)
        tls = router.ssl_certfile is not None
        control = ControlChannel() if router.may_sleep else None
        supervisor = Supervisor(
            config.graceful_termination_timeout,
            partial(Restarts, config.max_restarts),
            config.watchdog_timeout,
            control,
        )
        adopt_orphans()
        with (
            contextlib.ExitStack() as stack,
            runtime_folder() as folder,
            parent_pipe() as parent_fd,
            supervisor.handling_signals(),
        ):
            if config.nnodes > 1:
                stack.enter_context(_reserved_address(config))
            if (prefix := config.shard_uds_path) is not None:
                # A killed model server leaves TGI's socket behind.
                stack.callback(remove_stale, prefix.with_name(f"{prefix.name}-0"))
            replicas = config.replicas
            names = [SOCKET] if replicas == 1 else [f"engine-{i}.sock" for i in range(replicas)]
            uds_paths = [folder / name for name in names]
            fds = [parent_fd, sock.fileno()]
            if control is not None:
                stack.callback(control.close)
                fds.append(control.router_fd)
            router = replace(
                router,
                model_path=model_path,
                model_id=config.model_id,
                revision=config.revision or "",
                engine_url=f"unix:{uds_paths[0]}",
                replica_url=tuple(f"unix:{path}" for path in uds_paths[1:]),
                socket_fd=sock.fileno(),
                parent_fd=parent_fd,
                control_fd=None if control is None else control.router_fd,
            )
            variables = {VARIABLE: str(folder)}
            heartbeats: dict[int, SharedHeartbeat] = {}

            def start_server(replica: int) -> tuple[ChildProcess, SharedHeartbeat]:
                placement = placements[replica]
                server = ModelServerConfig(
                    serve=config,
                    model_path=model_path,
                    uds_path=uds_paths[replica],
                    parent_fd=parent_fd,
                    replica=replica if replicas > 1 else None,
                    cpus=placement.cpus,
                )
                child, heartbeats[replica] = start_model_server(
                    server, variables | placement.variables
                )
                return child, heartbeats[replica]

            def start_router() -> ChildProcess:
                child = start_command("router", RouterError, router, tuple(fds), variables, config)
                sock.close()  # only the router holds it from here on: it closes with the router
                if control is not None:
                    control.close_router_fd()
                return child

            probe = HealthProbe(host, port, tls)

            def usable(replica: int) -> bool:
                return probe.ask(f"{HEALTH}?replica={replica}") == 200

            def on_ready() -> None:
                published = [heartbeat.published() for heartbeat in heartbeats.values()]
                info = common_limits([EngineInfo.from_dict(each) for each in published if each])
                if behind_parent:
                    log.info("serving %s", config.model_id)
                else:
                    url = bind.url(host, port, tls)
                    seconds = time.monotonic() - began
                    announce(
                        config,
                        info,
                        url,
                        seconds,
                        key=router.api_key is not None,
                        web_ui=not router.disable_web_ui,
                        places=placements,
                    )
                trim_heap()
                release_file_pages()

            log.info("loading %s", config.model_id)
            parts = ServerParts(
                model_servers=[
                    ModelServerParts(
                        start=partial(start_server, replica), usable=partial(usable, replica)
                    )
                    for replica in range(replicas)
                ],
                start_router=start_router,
                probe=probe,
                on_ready=on_ready,
            )
            return supervisor.run(parts)


def _reserved_address(config: ServeConfig) -> socket.socket:
    """Bind the address for other nodes, on which each model server will listen for a while.

    Raises:
        TgiError: It cannot be bound, or the secret for the nodes cannot be read.
    """
    assert config.node_secret_file is not None
    read_secret(config.node_secret_file)
    return bind.bind(config.master_addr, config.master_port, "--master-addr", "--master-port")
