"""Files of a data set on the hub: those of its training split, as many as are needed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tgi_cli.errors import ConfigError, HubError, ModelNotFoundError, OfflineError
from tgi_cli.hub.environment import HubEnvironment
from tgi_cli.hub.retry import transport_errors

log = logging.getLogger(__name__)

_KNOWN = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "c4": ("allenai/c4", "en"),
}
"""Names that papers use: data set and subset."""

_KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz", ".json", ".txt")
_SECONDS = 10
_INSTEAD = "give --calibration a file, or 'bundled'"


def fetch(name: str) -> list[Path]:
    """One file of the training split of ``ORGANIZATION/NAME`` or ``ORGANIZATION/NAME:SUBSET``.

    It comes from the hub's cache where it is there.

    Raises:
        OfflineError: the hub cannot be reached, or may not be.
        ModelNotFoundError: no such data set.
        ConfigError: it has no files that can be read as text.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub = HubEnvironment.read()
    repository, subset = _KNOWN.get(name) or (*name.split(":", 1), "")[:2]
    if hub.offline:
        raise OfflineError(f"{name} is on the hub, and HF_HUB_OFFLINE is set")
    lost: tuple[type[Exception], ...] = (*transport_errors(), OSError)
    api = HfApi(endpoint=hub.endpoint, token=hub.token or False)
    try:
        info: Any = api.dataset_info(repository, timeout=_SECONDS)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        chosen = _choose(files, subset)
        if chosen is None:
            raise ConfigError(
                f"the data set {name} has no file of text that could be read",
                f"kinds that can be: {', '.join(_KINDS)}; a subset is NAME:SUBSET",
            )
        log.info("calibration: %s of %s", chosen, repository)
        return [
            Path(
                hf_hub_download(
                    repository,
                    chosen,
                    repo_type="dataset",
                    revision=info.sha,
                    cache_dir=hub.cache,
                    endpoint=hub.endpoint,
                    token=hub.token or False,
                    etag_timeout=_SECONDS,
                )
            )
        ]
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file and no data set {name!r}", "check the path, or its spelling"
        ) from error
    except HFValidationError as error:
        raise ConfigError(
            f"--calibration {name!r} is no file, and no name of a data set"
        ) from error
    except LocalEntryNotFoundError as error:
        raise OfflineError(f"{hub.endpoint} cannot be reached", _INSTEAD) from error
    except HfHubHTTPError as error:
        raise HubError(f"{hub.endpoint} refuses the data set {name}: {error}") from error
    except lost as error:
        raise OfflineError(
            f"{hub.endpoint} cannot be reached ({type(error).__name__})", _INSTEAD
        ) from error


def _choose(files: list[str], subset: str) -> str | None:
    """Of the subset where one is named: the first file of the training split, else of all."""
    inside = [file for file in files if f"{subset}/" in f"{file}/" or not subset]
    for kind in _KINDS:
        found = sorted(file for file in inside if file.endswith(kind))
        training = [file for file in found if "train" in file.lower()]
        if found:
            return (training or found)[0]
    return None
