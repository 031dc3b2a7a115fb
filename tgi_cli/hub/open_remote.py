"""Opens the folder behind a URL, whatever serves it."""

from __future__ import annotations

from tgi_cli.hub.model_urls import OBJECT_STORES
from tgi_cli.hub.object_store import ObjectStoreFolder
from tgi_cli.hub.remote_folder import RemoteFolder
from tgi_cli.hub.web_folder import WebFolder


def open_folder(url: str, gguf: str | None = None) -> RemoteFolder:
    """The folder behind a URL; nothing is requested yet.

    Args:
        url: as :func:`tgi_cli.hub.model_urls.split_url` returns it.
        gguf: the GGUF file that is wanted: a web server does not list its files.

    Raises:
        ConfigError: the package for object stores is not installed, or the URL is not one.
    """
    if url.partition("://")[0].lower() in OBJECT_STORES:
        return ObjectStoreFolder(url)
    return WebFolder(url, gguf)
