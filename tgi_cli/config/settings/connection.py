"""Settings of the connection between router and model server, and of their supervision."""

from __future__ import annotations

from tgi_cli.config.settings.setting import ROUTER, SERVE, SERVER, Setting, panel
from tgi_cli.config.settings.values import SECONDS, SWITCH, path, text, whole

CONNECTION_SETTINGS = (
    *panel(
        "Between router and model server",
        (ROUTER,),
        Setting(
            "engine_url",
            text("URL"),
            None,
            "Address of the model server: unix:/PATH, tcp://HOST:PORT, or grpcs://HOST:PORT (TLS). "
            "Default: the socket of the user's model server.",
        ),
        Setting(
            "master_shard_uds_path",
            path(),
            None,
            "Unix socket of the model server, by the name of TGI's router.",
            alias_of="engine_url",
        ),
        Setting(
            "engine_listen",
            text("URL"),
            None,
            "Also listen on TCP, for a router on another machine: tcp://HOST:PORT. See the TLS "
            "flags.",
            (SERVER,),
        ),
        Setting(
            "insecure_tcp",
            SWITCH,
            False,
            "Allow --engine-listen on addresses beyond this machine without client certificates. "
            "Any client that reaches the port controls the model.",
            (SERVER,),
        ),
        Setting(
            "engine_tls_cert",
            path("PEM"),
            None,
            "TLS certificate chain of this side of the connection.",
            (SERVER, ROUTER),
        ),
        Setting(
            "engine_tls_key",
            path("PEM"),
            None,
            "Private key of the certificate.",
            (SERVER, ROUTER),
        ),
        Setting(
            "engine_tls_client_ca",
            path("PEM"),
            None,
            "Require client certificates signed by one of these authorities.",
            (SERVER,),
        ),
        Setting(
            "engine_tls_ca",
            path("PEM"),
            None,
            "Certificate authorities of model servers. Default with grpcs://: the system's.",
        ),
        Setting(
            "engine_tls_server_name",
            text("NAME"),
            None,
            "Expected name in the model server's certificate. Default: the URL's host.",
        ),
    ),
    *panel(
        "Supervision",
        (SERVE,),
        Setting(
            "max_restarts",
            whole(0),
            5,
            "Restarts of a model server that exited or hung, within ten minutes; the next failure "
            "ends the command with code 7. 0: never restart.",
        ),
        Setting(
            "watchdog_timeout",
            SECONDS,
            60.0,
            "Seconds without a step, while requests are waiting, after which the model server "
            "counts as hung (longer if its steps take longer). 0: never.",
            (SERVE, ROUTER),
        ),
        Setting(
            "config_fd",
            whole(0),
            None,
            "File descriptor of the configuration of a child of `tgi serve`.",
            (SERVER, ROUTER),
            hidden=True,
            variables=(),
        ),
        Setting(
            "parent_fd",
            whole(0),
            None,
            "File descriptor of a pipe that closes when the parent of `tgi serve` is gone.",
            (SERVE,),
            hidden=True,
            variables=(),
        ),
    ),
)
