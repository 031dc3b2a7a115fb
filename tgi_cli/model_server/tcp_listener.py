"""A TCP address of the model server besides its unix socket, for a router on another machine.

Clients that may submit requests may also load adapters from this machine's folders. An address
that others reach therefore requires client certificates, unless the user waives them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tgi_cli.errors import AddressInUseError, ConfigError
from tgi_cli.model_server.grpc_service import GrpcService
from tgi_cli.process.bind import bind, format_address
from tgi_cli.rpc.endpoint import is_loopback, split_tcp
from tgi_cli.rpc.tls import TlsFiles, tls_files

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpListener(GrpcService):
    """A TCP address of the server.

    Attributes:
        host, port: Port 0 takes a free one.
        tls: The server's certificate, or None for unencrypted connections.
    """

    remote: ClassVar[bool] = True
    host: str
    port: int
    tls: TlsFiles | None = None

    def claim(self) -> None:
        """Check before a model is loaded that the address can be bound.

        Raises:
            AddressInUseError: The port is taken, or may not be bound.
            ConfigError: It is not an address of this machine.
        """
        bind(self.host, self.port, "--engine-listen", "--engine-listen").close()

    def add_to(self, server: grpc.Server) -> None:
        """Add the address to the server. Raises AddressInUseError."""
        target = format_address(self.host, self.port)
        try:
            if self.tls is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, self.tls.server_credentials())
        except RuntimeError as error:
            raise AddressInUseError(
                f"cannot listen on {target}: {error}",
                "stop what listens there, or choose another port with --engine-listen",
            ) from error
        how = "unencrypted" if self.tls is None else "with TLS"
        if self.tls is not None and self.tls.authority is not None:
            how = "with TLS, for clients with a certificate"
        scheme = "tcp" if self.tls is None else "grpcs"
        exposed = self.tls is None and not is_loopback(self.host)
        level = logging.WARNING if exposed else logging.INFO
        log.log(level, "listening on %s://%s, %s", scheme, format_address(self.host, port), how)


def tcp_listener(
    url: str | None,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    client_ca: Path | None = None,
    insecure: bool = False,
) -> TcpListener | None:
    """Return the listener that the flags ask for, or None if there is no ``url``.

    Args:
        url: ``tcp://HOST:PORT``, ``HOST:PORT``, or ``grpcs://HOST:PORT``, which needs a
            certificate.
        certificate, key: Of the server.
        client_ca: Signs the certificates that clients need then.
        insecure: Let other machines connect without client certificates.

    Raises:
        ConfigError: The address is invalid, files are unusable, or others could command the
            model.
    """
    tls = tls_files(certificate=certificate, key=key, authority=client_ca)
    if url is None:
        if tls is not None or insecure:
            raise ConfigError(
                "the --engine-tls flags and --insecure-tcp need --engine-listen",
                "give it, or leave them off: a unix socket needs neither",
            )
        return None
    scheme, host, port = split_tcp(url, "a model server on TCP")
    if tls is not None:
        if certificate is None:
            raise ConfigError(
                "--engine-tls-client-ca has no certificate of the server", "give --engine-tls-cert"
            )
        tls.check(server=True)
    elif scheme == "grpcs":
        raise ConfigError(f"{url} needs a certificate for TLS", "give --engine-tls-cert")
    if client_ca is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"whoever reaches {url} could command the model",
            "require client certificates (--engine-tls-cert, --engine-tls-key and "
            "--engine-tls-client-ca), or give --insecure-tcp on a network that keeps others away",
        )
    return TcpListener(host, port, tls)
