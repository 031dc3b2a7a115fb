"""TLS on the HTTP port."""

from __future__ import annotations

import ssl
from pathlib import Path

from tgi_cli.errors import ConfigError
from tgi_cli.files import TEXT_BYTES, FileRefusedError, require_file


def server_context(certfile: Path, keyfile: Path | None) -> ssl.SSLContext:
    """A server's context for PEM files, with TLS 1.2 or newer (RFC 8996).

    Raises ConfigError if a file is unreadable or encrypted, or the key does not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files = f"--ssl-certfile {certfile}" + (f" --ssl-keyfile {keyfile}" if keyfile else "")
    try:
        for path in (certfile, keyfile):
            if path is not None:
                require_file(path, TEXT_BYTES)
        # With an empty password, OpenSSL does not prompt for that of an encrypted key.
        context.load_cert_chain(certfile, keyfile, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{files}: {error.reason or error}",
            "give a PEM file of the certificate and its chain, and the unencrypted key of it",
        ) from error
    except FileRefusedError as error:
        raise ConfigError(f"{files}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{files}: {error.strerror}") from error
    return context
