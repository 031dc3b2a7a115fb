"""One repository at one commit: its files with sizes and checksums, as the hub lists them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tgi_cli import __version__
from tgi_cli.errors import GatedModelError, HubError, ModelNotFoundError
from tgi_cli.hub import client
from tgi_cli.hub.client import HubEnvironment

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB_NAME = re.compile(r"\w[\w.-]*")

LIBRARY_NAME = "tgi"
"""How this program names itself to the hub."""


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository. ``checksum`` is a sha256 (large files) or a git blob's sha1.

    The checksum is the file's name among the cache's blobs too.
    """

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Repository:
    """A model repository at a commit; ``revision`` is what the user asked for."""

    model_id: str
    revision: str
    commit: str
    files: dict[str, RepoFile]


def fetch_repository(model_id: str, revision: str | None, hub: HubEnvironment) -> Repository:
    """Ask the hub for the files of ``model_id`` at ``revision`` (None: main).

    Raises:
        ModelNotFoundError: no such repository or revision, or not for this token.
        GatedModelError: the terms are not accepted.
        OfflineError: the hub cannot be reached.
        HubError: it answers, and refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi(
        endpoint=hub.endpoint,
        token=hub.token or False,
        library_name=LIBRARY_NAME,
        library_version=__version__,
    )

    def ask() -> Any:
        return api.model_info(
            model_id, revision=revision, files_metadata=True, timeout=max(hub.timeout, 10.0)
        )

    try:
        info = client.call_with_retries(
            ask, hub, f"asking for {model_id}", error_translator(model_id, revision, hub)
        )
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{model_id!r} is neither a folder nor a model id", "a model id is ORGANIZATION/NAME"
        ) from error
    if not _COMMIT.fullmatch(info.sha or ""):
        raise invalid_response_error(hub, f"the commit of {model_id} is {info.sha!r}")
    files = {}
    for sibling in info.siblings or []:
        checksum = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        files[sibling.rfilename] = (
            RepoFile(sibling.rfilename, sibling.size, checksum)
            if sibling.size is not None and checksum
            else None
        )
    complete = {
        name: file or _ask_for_one(api, model_id, info.sha, name, hub)
        for name, file in files.items()
    }
    for file in complete.values():
        if not _BLOB_NAME.fullmatch(file.checksum):  # it names a file of the cache
            raise invalid_response_error(hub, f"the checksum of {file.name} is {file.checksum!r}")
    return Repository(model_id, revision or "main", info.sha, complete)


def invalid_response_error(hub: HubEnvironment, what: str) -> HubError:
    """The error for an endpoint whose answers make no sense."""
    return HubError(
        f"{hub.endpoint} does not answer as a hub: {what}",
        "check that HF_ENDPOINT is a Hugging Face hub or a mirror of one",
    )


def _ask_for_one(
    api: HfApi, model_id: str, commit: str, name: str, hub: HubEnvironment
) -> RepoFile:
    """Size and checksum of one file, for mirrors whose listing leaves them out."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model_id, name, revision=commit, endpoint=hub.endpoint)

    def ask() -> Any:
        return get_hf_file_metadata(
            url, token=hub.token or False, timeout=hub.timeout, endpoint=hub.endpoint
        )

    found = client.call_with_retries(
        ask, hub, f"asking for {name}", error_translator(model_id, commit, hub)
    )
    if found.size is None or not found.etag:
        raise invalid_response_error(hub, f"{name} has neither size nor checksum")
    return RepoFile(name, found.size, found.etag)


def error_translator(
    model_id: str, revision: str | None, hub: HubEnvironment
) -> Callable[[int, str, str], HubError | None]:
    """The error that a status, ``X-Error-Code`` and ``X-Error-Message`` of the hub stand for.

    The returned function answers None for a status that is worth another try.
    """
    sign_in = "set HF_TOKEN (https://huggingface.co/settings/tokens)"
    page = f"{hub.endpoint}/{model_id}"

    def to_error(status: int, code: str, message: str) -> HubError | None:
        if status in client.RETRYABLE_STATUSES:
            return None
        if code == "GatedRepo" or (status == 403 and "gated" in message.lower()):
            if hub.token is None:
                return GatedModelError(
                    f"{model_id} is gated and no token is set", f"accept its terms, {sign_in}"
                )
            return GatedModelError(
                f"{model_id} is gated and this token's owner has no access",
                f"ask for access at {page}, or use another HF_TOKEN",
            )
        if code == "RevisionNotFound":
            return ModelNotFoundError(
                f"{model_id} has no revision {revision!r}", f"see the branches and tags at {page}"
            )
        if "Invalid" in message and status == 401:
            return ModelNotFoundError(
                "the hub does not accept this token", f"{sign_in}, or unset it"
            )
        if code == "EntryNotFound":
            return HubError(f"{hub.endpoint} lists a file of {model_id} and does not have it")
        if status in (401, 404) or code == "RepoNotFound":
            if hub.token is None:
                return ModelNotFoundError(
                    f"no model {model_id!r} that can be seen without a token",
                    f"check the spelling; if it is private, {sign_in}; a folder is ./{model_id}",
                )
            return ModelNotFoundError(
                f"no model {model_id!r} that this token may see",
                f"check the spelling and the token; a folder is written ./{model_id}",
            )
        if status == 403:
            return GatedModelError(
                f"this token may not read {model_id}", "give it read access, or use another one"
            )
        detail = f": {message}" if message else ""
        return HubError(f"{hub.endpoint} answered {status} for {model_id}{detail}")

    return to_error
