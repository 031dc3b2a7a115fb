"""Folders in object stores (S3, Google Cloud Storage, Azure), by obstore.

https://developmentseed.org/obstore. Credentials, endpoints and regions come from the environment
variables that obstore documents, among them AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS and AZURE_STORAGE_ACCOUNT_NAME, and from the metadata services of
clouds. Its errors print URLs and answers of servers, which may have credentials in them: only what
:func:`_reason` finds in them goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tgi_cli.errors import ConfigError, GatedModelError, HubError
from tgi_cli.hub.parts_checksum import parts_etag
from tgi_cli.hub.remote_folder import (
    CHECKSUM_BYTES,
    CHECKSUMS,
    RemoteFile,
    TransferError,
    changed_error,
    names_below,
    not_found_error,
    read_small,
    with_checksums,
)
from tgi_cli.process.installation import install_command

MAX_OBJECTS = 20_000
"""Objects below a prefix; more are taken for a wrong prefix."""

_LEAST_BYTES = 1
"""Least size of a buffer: bytes that wait in one are lost when the connection is cut."""

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_STATUS = re.compile(r"status(?: code)?:? (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_VARIABLES = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a "
    "public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or "
    "AZURE_SKIP_SIGNATURE=true for a public container",
}
_KINDS = (
    ("incorrectly configured region", "the bucket is in another region: set AWS_REGION"),
    ("169.254.169.254", "no credentials are set"),
    ("metadata.google.internal", "no credentials are set"),
    ("dns error", "the host is unknown"),
    ("Connection refused", "the connection was refused"),
    ("certificate", "the server's certificate is not trusted"),
    ("timed out", "no answer in time"),
    ("TimedOut", "no answer in time"),
    ("URL scheme is not allowed", "AWS_ALLOW_HTTP=true is needed for a URL without https"),
)


class ObjectStoreFolder:
    """Implements :class:`tgi_cli.hub.remote_folder.RemoteFolder`.

    Raises:
        ConfigError: obstore is not installed, or does not accept the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._scheme = url.partition("://")[0].lower()
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise ConfigError(
                f"{url}: the package for object stores is not installed",
                install_command("remote"),
            ) from error
        self._obstore: Any = obstore
        options: Any = {"timeout": timedelta(hours=1), "read_timeout": timedelta(seconds=30)}
        endpoints = (name for name in os.environ if "ENDPOINT" in name.upper())
        if any(os.environ[name].startswith("http://") for name in endpoints):
            options["allow_http"] = True  # the user has named an endpoint without TLS
        retries: Any = {"max_retries": 0}  # they would repeat themselves without a line in the log
        try:
            self._store: Any = obstore.store.from_url(
                url, client_options=options, retry_config=retries
            )
        except Exception as error:  # obstore's, ValueError, or TypeError
            raise ConfigError(
                f"{url} cannot be opened: {_reason(error)}", _VARIABLES[self._scheme]
            ) from None

    def files(self) -> dict[str, RemoteFile]:
        found: dict[str, RemoteFile] = {}
        try:
            for objects in self._obstore.list(self._store, chunk_size=1000):
                for each in objects:
                    found[each["path"]] = self._file(each)
                if len(found) > MAX_OBJECTS:
                    raise HubError(
                        f"{self.url} has more than {MAX_OBJECTS} objects", "name a deeper prefix"
                    )
        except HubError:
            raise
        except Exception as error:
            raise self._translate(error, "") from None
        if not found:
            raise not_found_error(self.url)
        found = {name: found[name] for name in names_below(found)}
        if CHECKSUMS in found:
            text = read_small(self, found[CHECKSUMS], CHECKSUM_BYTES).decode("utf-8", "replace")
            found = with_checksums(found, text)
        return found

    def _file(self, about: Any) -> RemoteFile:
        tag = about["e_tag"] or str(about["last_modified"])
        # Only S3's are checksums.
        if self._scheme != "s3":
            return RemoteFile(about["path"], about["size"], tag)
        md5 = _MD5.fullmatch(tag)
        return RemoteFile(
            about["path"],
            about["size"],
            tag,
            md5=md5[1] if md5 else "",
            parts_md5=parts_etag(tag),
        )

    def stream(self, file: RemoteFile, start: int, end: int) -> Iterator[Any]:
        if start >= end:
            return
        options: Any = {"range": (start, end)}
        if file.validator.startswith('"') or self._scheme != "s3":
            options["if_match"] = file.validator
        try:
            result = self._obstore.get(self._store, file.name, options=options)
            tag = result.meta["e_tag"]
            if tag is not None and tag != file.validator:  # a store that ignores If-Match
                raise changed_error(self.url, file.name)
            yield from result.stream(min_chunk_size=_LEAST_BYTES)
        except HubError:
            raise
        except Exception as error:
            raise self._translate(error, file.name) from None

    def checks_md5(self, file: RemoteFile) -> bool:
        """Whether an ETag is the MD5: not where the store encrypts with a key of its own.

        https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
        """
        import httpx

        try:
            url = self._obstore.sign(self._store, "HEAD", file.name, timedelta(minutes=5))
            headers = httpx.head(url, timeout=30.0).headers
        except Exception:  # without credentials nothing can be signed
            return True
        kind = headers.get("x-amz-server-side-encryption", "")
        return not (
            kind.startswith("aws:") or "x-amz-server-side-encryption-customer-algorithm" in headers
        )

    def close(self) -> None:
        """Nothing: connections are dropped with the store."""

    def _translate(self, error: Exception, name: str) -> HubError | TransferError:
        exceptions = self._obstore.exceptions
        if isinstance(error, exceptions.PreconditionError):
            return changed_error(self.url, name)
        if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
            return changed_error(self.url, name) if name else not_found_error(self.url)
        reason = _reason(error)
        status = _STATUS.search(str(error))
        refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        if isinstance(error, refused) or (status and status[1] in ("401", "403")):
            return GatedModelError(
                f"{self.url}: access is denied ({reason})", _VARIABLES[self._scheme]
            )
        if "credentials" in reason:
            return GatedModelError(f"{self.url}: {reason}", _VARIABLES[self._scheme])
        if "region" in reason or "ALLOW_HTTP" in reason:
            return HubError(f"{self.url}: {reason}")
        return TransferError(reason)


def _reason(error: Exception) -> str:
    """What an error of obstore is about, without what may be secret."""
    text = str(error)
    for part, reason in _KINDS:
        if part in text:
            return reason
    code, status = _CODE.search(text), _STATUS.search(text)
    if status:
        return f"the server answered {status[1]}" + (f", {code[1]}" if code else "")
    return f"the transfer failed ({type(error).__name__})"
