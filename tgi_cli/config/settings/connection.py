"""Settings of the connection between router and model server, and of their supervision."""

from __future__ import annotations

from tgi_cli.config.settings.setting import ROUTER, SERVE, SERVER, Setting, panel
from tgi_cli.config.settings.values import SECONDS, SWITCH, path, text, whole, words

CONNECTION_SETTINGS = (
    *panel(
        "Between router and model server",
        (ROUTER,),
        engine_url=Setting(
            text("URL"),
            "Address of the model server: unix:/PATH, tcp://HOST:PORT, or grpcs://HOST:PORT (TLS). "
            "Default: the socket of the user's model server.",
            brief="Address of the model server.",
        ),
        replica_url=Setting(
            words("URL"),
            "Address of another model server with the same model: requests are divided among it "
            "and that of --engine-url. Repeat the flag or separate by commas.",
        ),
        master_shard_uds_path=Setting(
            path(),
            "Unix socket of the model server, by the name of TGI's router.",
            alias_of="engine_url",
        ),
        engine_listen=Setting(
            text("URL"),
            "Also listen on TCP, for a router on another machine: tcp://HOST:PORT. See the TLS "
            "flags.",
            commands=(SERVER,),
            brief="Also listen on tcp://HOST:PORT.",
        ),
        insecure_tcp=Setting(
            SWITCH,
            "Allow --engine-listen on addresses beyond this machine without client certificates. "
            "Any client that reaches the port controls the model.",
            commands=(SERVER,),
        ),
        engine_tls_cert=Setting(
            path("PEM"),
            "TLS certificate chain of this side of the connection.",
            commands=(SERVER, ROUTER),
        ),
        engine_tls_key=Setting(
            path("PEM"), "Private key of the certificate.", commands=(SERVER, ROUTER)
        ),
        engine_tls_client_ca=Setting(
            path("PEM"),
            "Require client certificates signed by one of these authorities.",
            commands=(SERVER,),
        ),
        engine_tls_ca=Setting(
            path("PEM"),
            "Certificate authorities of model servers. Default with grpcs://: the system's.",
        ),
        engine_tls_server_name=Setting(
            text("NAME"),
            "Expected name in the model server's certificate. Default: the URL's host.",
        ),
    ),
    *panel(
        "Supervision",
        (SERVE,),
        max_restarts=Setting(
            whole(0),
            "Restarts of a model server that exited or hung, within ten minutes; the next failure "
            "ends the command with code 7. 0: never restart.",
            5,
        ),
        watchdog_timeout=Setting(
            SECONDS,
            "Seconds without a step, while requests are waiting, after which the model server "
            "counts as hung (longer if its steps take longer). 0: never.",
            60.0,
            commands=(SERVE, ROUTER),
        ),
        sleep_idle_seconds=Setting(
            SECONDS,
            "Stop the model server after this many seconds without a request, which returns its "
            "memory. The next request starts it again and waits for it. 0: never.",
            0.0,
        ),
        enable_sleep_mode=Setting(
            SWITCH,
            "Let clients stop and start the model server: POST /sleep and /wake_up, as in vLLM. "
            "Implied by --sleep-idle-seconds where there is an API key.",
        ),
        config_fd=Setting(
            whole(0),
            "File descriptor of the configuration of a child of `tgi serve`.",
            commands=(SERVER, ROUTER),
            hidden=True,
            variables=(),
        ),
        socket_fd=Setting(
            whole(0),
            "File descriptor of a bound socket to serve on, in place of a port.",
            commands=(SERVE,),
            hidden=True,
            variables=(),
        ),
        parent_fd=Setting(
            whole(0),
            "File descriptor of a pipe that closes when the parent of `tgi serve` is gone.",
            commands=(SERVE,),
            hidden=True,
            variables=(),
        ),
    ),
)
