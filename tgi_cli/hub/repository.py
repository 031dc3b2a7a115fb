"""A repository at one commit: its files with sizes and checksums, as the hub lists them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tgi_cli.errors import GatedModelError, HubError, ModelNotFoundError
from tgi_cli.hub.client import (
    RETRYABLE_STATUSES,
    ErrorTranslator,
    HubEnvironment,
    call_with_retries,
    offline_mode_error,
)
from tgi_cli.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB_NAME = re.compile(r"\w[\w.-]*")

LIBRARY_NAME = "tgi"
"""Name of this program in requests to the hub."""


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        name: path in the repository.
        size: in bytes.
        checksum: sha256 of a large file, or a git blob's sha1; also its blob's name in the cache.
    """

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Repository:
    """A model repository at a commit.

    Attributes:
        model_id: id on the hub.
        revision: the requested branch, tag or commit.
        commit: the commit it resolves to.
        files: by name.
    """

    model_id: str
    revision: str
    commit: str
    files: dict[str, RepoFile]


def fetch_repository(model_id: str, revision: str | None, hub: HubEnvironment) -> Repository:
    """List the files of ``model_id`` at ``revision``. Default: main.

    Raises:
        ModelNotFoundError: the repository or revision does not exist, or not for this token.
        GatedModelError: access is not granted.
        OfflineError: the hub cannot be reached, or must not be contacted.
        HubError: any other refusal.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    if hub.offline:
        raise offline_mode_error()
    api = HfApi(
        endpoint=hub.endpoint,
        token=hub.token or False,
        library_name=LIBRARY_NAME,
        library_version=__version__,
    )

    def request() -> Any:
        return api.model_info(
            model_id, revision=revision, files_metadata=True, timeout=max(hub.timeout, 10.0)
        )

    to_error = error_translator(model_id, revision, hub)
    try:
        info = call_with_retries(request, hub, f"asking for {model_id}", to_error)
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{model_id!r} is neither a folder nor a model id", "a model id is ORGANIZATION/NAME"
        ) from error
    if not _COMMIT.fullmatch(info.sha or ""):
        raise _invalid_response_error(hub, f"the commit of {model_id} is {info.sha!r}")
    files = {}
    for sibling in info.siblings or []:
        name = sibling.rfilename
        checksum = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if sibling.size is not None and checksum:
            files[name] = RepoFile(name, sibling.size, checksum)
        else:
            files[name] = _fetch_metadata(api, model_id, info.sha, name, hub)
        if not _BLOB_NAME.fullmatch(files[name].checksum):  # it names a file of the cache
            checksum = files[name].checksum
            raise _invalid_response_error(hub, f"the checksum of {name} is {checksum!r}")
    return Repository(model_id, revision or "main", info.sha, files)


def _invalid_response_error(hub: HubEnvironment, cause: str) -> HubError:
    return HubError(
        f"{hub.endpoint} does not answer as a hub: {cause}",
        "check that HF_ENDPOINT is a Hugging Face hub or a mirror of one",
    )


def _fetch_metadata(
    api: HfApi, model_id: str, commit: str, name: str, hub: HubEnvironment
) -> RepoFile:
    """Request size and checksum of one file, for mirrors whose listing omits them."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model_id, name, revision=commit, endpoint=hub.endpoint)

    def request() -> Any:
        return get_hf_file_metadata(
            url, token=hub.token or False, timeout=hub.timeout, endpoint=hub.endpoint
        )

    to_error = error_translator(model_id, commit, hub)
    metadata = call_with_retries(request, hub, f"asking for {name}", to_error)
    if metadata.size is None or not metadata.etag:
        raise _invalid_response_error(hub, f"{name} has neither size nor checksum")
    return RepoFile(name, metadata.size, metadata.etag)


def error_translator(model_id: str, revision: str | None, hub: HubEnvironment) -> ErrorTranslator:
    """Build the translation of the hub's refusals of ``model_id`` into our errors."""
    sign_in = "set HF_TOKEN (https://huggingface.co/settings/tokens)"
    page = f"{hub.endpoint}/{model_id}"

    def to_error(status: int, code: str, message: str) -> HubError | None:
        if status in RETRYABLE_STATUSES:
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
                    f"no model {model_id!r} is visible without a token",
                    f"check the spelling; if it is private, {sign_in}; a folder is ./{model_id}",
                )
            return ModelNotFoundError(
                f"no model {model_id!r} is visible to this token",
                f"check the spelling and the token; a folder is written ./{model_id}",
            )
        if status == 403:
            return GatedModelError(
                f"this token may not read {model_id}", "give it read access, or use another one"
            )
        detail = f": {message}" if message else ""
        return HubError(f"{hub.endpoint} answered {status} for {model_id}{detail}")

    return to_error
