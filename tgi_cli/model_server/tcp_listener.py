"""A TCP address of the model server, beside its unix socket: for a router on another machine.

Whoever may submit requests may also have adapters loaded from this machine's folders. So an
address that others reach demands client certificates, unless the user says that it need not.
"""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_cli.errors import AddressInUseError, ConfigError
from tgi_cli.rpc.endpoint import is_loopback, join_tcp, split_tcp
from tgi_cli.rpc.tls import TlsFiles, tls_files

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpListen:
    """A TCP address for the gRPC server; a :class:`~tgi_cli.model_server.grpc_service.GrpcService`.

    Attributes:
        host, port: port 0 takes a free one.
        tls: with the server's certificate; None: in the clear.
    """

    host: str
    port: int
    tls: TlsFiles | None = None

    @property
    def afar(self) -> bool:
        return True

    def claim(self) -> None:
        """Whether it can be listened on, before a model is loaded.

        Raises:
            AddressInUseError: somebody does, or this user may not.
            ConfigError: it is no address of this machine.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except socket.gaierror as error:
            raise ConfigError(f"--engine-listen {self.host}: {error.strerror}") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"--engine-listen {self.host} is not an address of this machine",
                    "0.0.0.0 listens on all of them",
                ) from error
            raise self._taken(error.strerror or str(error)) from error

    def add_to(self, server: grpc.Server) -> None:
        """Raises AddressInUseError."""
        target = join_tcp(self.host, self.port)
        try:
            if self.tls is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, self.tls.server_credentials())
        except RuntimeError as error:
            raise self._taken(str(error)) from error
        how = "in the clear" if self.tls is None else "with TLS"
        if self.tls is not None and self.tls.authority is not None:
            how = "with TLS, for clients with a certificate"
        scheme = "tcp" if self.tls is None else "grpcs"
        say = log.warning if self.tls is None and not is_loopback(self.host) else log.info
        say("listening on %s://%s, %s", scheme, join_tcp(self.host, port), how)

    def drain(self) -> None:
        """Nothing: the services refuse what is new."""

    def end(self, cause: str) -> None:
        """Nothing: the server closes it."""

    def _taken(self, why: str) -> AddressInUseError:
        return AddressInUseError(
            f"cannot listen on {join_tcp(self.host, self.port)}: {why}",
            "stop what listens there, or choose another port with --engine-listen",
        )


def tcp_listen(
    url: str | None,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    client_ca: Path | None = None,
    insecure: bool = False,
) -> TcpListen | None:
    """What the command line says; None where it says nothing.

    Args:
        url: ``tcp://HOST:PORT``, ``HOST:PORT``, or ``grpcs://HOST:PORT``, which needs a
            certificate.
        certificate, key: of the server.
        client_ca: signs certificates of clients, which are demanded then.
        insecure: let an address that others reach do without them.

    Raises:
        ConfigError: it is no such address, files cannot be used, or others would command the
            model.
    """
    tls = tls_files(certificate=certificate, key=key, authority=client_ca)
    if url is None:
        if tls is not None or insecure:
            raise ConfigError(
                "the --engine-tls flags and --insecure-tcp are about --engine-listen, which is "
                "not given",
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
        raise ConfigError(f"{url} speaks TLS, and has no certificate", "give --engine-tls-cert")
    if client_ca is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"whoever reaches {url} could command the model",
            "demand client certificates (--engine-tls-cert, --engine-tls-key and "
            "--engine-tls-client-ca), or say --insecure-tcp where the network keeps others away",
        )
    return TcpListen(host, port, tls)
