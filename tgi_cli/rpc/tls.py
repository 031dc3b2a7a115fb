"""TLS between router and model server: PEM files, checked before anything slow happens."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_cli.errors import ConfigError
from tgi_cli.files import TEXT_BYTES, FileRefusedError, read_bytes

if TYPE_CHECKING:
    import ssl

    import grpc

_MAX_ROUNDS = 8
"""Rounds of a handshake in memory; three are enough."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The TLS files of one end, in PEM format.

    Attributes:
        certificate: Its own certificate, with the chain up to an authority.
        key: Key of the certificate, or None if it is in the same file.
        authority: Authorities of the other end's certificate. If None, a server requires no
            certificate, and a client trusts the system's authorities.
        server_name: Expected name in a server's certificate. Default: the host of the connection.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    server_name: str | None = None

    def check(self, server: bool) -> None:
        """Check that a server, or a client, can use the files.

        Raises:
            ConfigError: A file is unreadable or invalid, the files do not match, other users may
                read the key, or the certificate has expired.
        """
        if self.key is not None and self.certificate is None:
            raise ConfigError("--engine-tls-key has no certificate", "give --engine-tls-cert too")
        context = self.context(server)
        if self.certificate is not None:
            _check_mode(self.key or self.certificate)
            problem = self._refused_because(context, server)
            if problem:
                raise ConfigError(
                    f"--engine-tls-cert {self.certificate}: {problem}", "have a new one issued"
                )

    def context(self, server: bool) -> ssl.SSLContext:
        """Create a context of Python's own TLS, 1.2 or newer (RFC 8996). Raises ConfigError."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate is not None:
            key = self.key or self.certificate
            flags = f"--engine-tls-cert {self.certificate}"
            flags += "" if self.key is None else f" --engine-tls-key {self.key}"
            for flag, path in (("cert", self.certificate), ("key", key)):
                _read(f"--engine-tls-{flag}", path)
            try:
                # Without a password, an encrypted key would ask for one on the terminal.
                context.load_cert_chain(self.certificate, key, password="")
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{flags}: {_reason(error)}",
                    "give a PEM file of the certificate and its chain, and its unencrypted key",
                ) from error
        if self.authority is not None:
            flag = "--engine-tls-client-ca" if server else "--engine-tls-ca"
            _read(flag, self.authority)
            try:
                context.load_verify_locations(self.authority)
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{flag} {self.authority}: {_reason(error)}",
                    "give a PEM file of the authority's certificate",
                ) from error
        elif not server:
            context.load_default_certs()
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Create gRPC's credentials; with ``authority``, every client needs a certificate."""
        import grpc

        assert self.certificate is not None, "servers have one"
        return grpc.ssl_server_credentials(
            [
                (
                    read_bytes(self.key or self.certificate, TEXT_BYTES),
                    read_bytes(self.certificate, TEXT_BYTES),
                )
            ],
            root_certificates=_content(self.authority),
            require_client_auth=self.authority is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Create gRPC's credentials."""
        import grpc

        own = self.certificate
        return grpc.ssl_channel_credentials(
            root_certificates=_content(self.authority),
            private_key=_content(self.key or own),
            certificate_chain=_content(own),
        )

    def _refused_because(self, own: ssl.SSLContext, server: bool) -> str:
        """Return why a peer that trusts the certificate would refuse it, or an empty string.

        Found by a handshake in memory with such a peer.
        """
        import ssl

        other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if server else ssl.PROTOCOL_TLS_SERVER)
        assert self.certificate is not None
        if server:
            other.check_hostname = False
        else:
            other.load_cert_chain(self.certificate, self.key, password="")
            own.check_hostname = False
        own.verify_mode = ssl.CERT_NONE
        other.verify_mode = ssl.CERT_REQUIRED
        other.load_verify_locations(self.certificate)
        other.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            own.wrap_bio(there, back, server_side=server),
            other.wrap_bio(back, there, server_side=not server),
        )
        for end in ends * _MAX_ROUNDS:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return str(error.verify_message)
            except ssl.SSLError as error:
                return _reason(error)
        return ""


def tls_files(
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    server_name: str | None = None,
) -> TlsFiles | None:
    """Return the given files, or None if there are none."""
    files = TlsFiles(certificate, key, authority, server_name)
    return None if files == TlsFiles() else files


def _content(path: Path | None) -> bytes | None:
    return None if path is None else read_bytes(path, TEXT_BYTES)


def _read(flag: str, path: Path) -> bytes:
    try:
        return read_bytes(path, TEXT_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except FileRefusedError as error:
        raise ConfigError(f"{flag} {path}: {error}") from error


def _check_mode(key: Path) -> None:
    """Check that only its owner, and perhaps a group, may read the key. Raises ConfigError."""
    mode = stat.S_IMODE(key.stat().st_mode)
    if mode & 0o027:
        raise ConfigError(
            f"other users may {'write' if mode & 0o022 else 'read'} the key {key}, of mode "
            f"{mode:04o}",
            f"chmod 600 {key} (of a Kubernetes secret: defaultMode: 0400)",
        )


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in plain words."""
    reason = error.reason or ("PEM_LIB" if "PEM lib" in str(error) else str(error))
    return {
        "KEY_VALUES_MISMATCH": "the key is of another certificate",
        "BAD_DECRYPT": "the key is encrypted",
        "NO_START_LINE": "it is not a PEM file",
        "PEM_LIB": "it is not a PEM file, or the key is encrypted",
        "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it",
    }.get(reason, reason.replace("_", " ").lower())
