"""A finished checkpoint onto the hub."""

from __future__ import annotations

import logging
from pathlib import Path

from tgi_cli.errors import ConfigError, GatedModelError, HubError, OfflineError
from tgi_cli.hub.environment import HubEnvironment
from tgi_cli.hub.retry import transport_errors

log = logging.getLogger(__name__)


def check_upload(model_id: str) -> None:
    """Raise what :func:`upload` would raise that can be known before there is anything to upload.

    Raises:
        ConfigError: no name of a repository.
        HubError: no token, or no hub.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    hub = HubEnvironment.read()
    try:
        validate_repo_id(model_id)
    except HFValidationError as error:
        raise ConfigError(f"--upload-to-model-id {model_id!r} is no name of a model") from error
    if hub.offline:
        raise OfflineError("--upload-to-model-id: HF_HUB_OFFLINE is set", "unset one of them")
    if hub.token is None:
        raise GatedModelError(f"uploading to {model_id} takes a token", "set HF_TOKEN")


def upload(folder: Path, model_id: str) -> str:
    """Put the files of ``folder`` into the hub's repository ``model_id``, made if need be.

    Returns its address.

    Raises:
        ConfigError: no name of a repository.
        HubError: no token, or the hub refuses, or cannot be reached. The folder stays.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    hub = HubEnvironment.read()
    check_upload(model_id)
    stays = f"{folder} is complete: `hf upload {model_id} {folder}` tries again"
    lost: tuple[type[Exception], ...] = (*transport_errors(), OSError)
    api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=hub.token)
    try:
        address = api.create_repo(model_id, exist_ok=True)
        api.upload_folder(
            repo_id=model_id, folder_path=folder, commit_message="Upload a quantized checkpoint"
        )
    except HfHubHTTPError as error:
        raise HubError(f"{hub.endpoint} refuses {model_id}: {error}", stays) from error
    except lost as error:
        raise OfflineError(
            f"{hub.endpoint} cannot be reached ({type(error).__name__})", stays
        ) from error
    return str(address)
