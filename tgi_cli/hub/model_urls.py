"""Model ids that are URLs."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from tgi_cli.errors import ConfigError
from tgi_cli.hub.gguf_files import GGUF

HUB_SCHEME = "hf://"
OBJECT_STORES = ("s3", "gs", "az")
WEB = ("https", "http")
_HUB_HOSTS = ("hf.co", "huggingface.co")
_TAG = re.compile(r"(?P<url>[a-z0-9]+://[^/]+/.*):(?P<tag>[^/:]+)")


def without_scheme(model_id: str, revision: str | None) -> tuple[str, str | None]:
    """Drop the ``hf://`` of ``hf://org/name[@revision]``, as huggingface_hub writes it."""
    if not model_id.startswith(HUB_SCHEME):
        return model_id, revision
    name, _, named = model_id.removeprefix(HUB_SCHEME).strip("/").partition("@")
    if named and revision not in (None, named):
        raise ConfigError(f"{model_id} names another revision than --revision {revision}")
    return name, named or revision


def is_remote(model_id: str) -> bool:
    """Whether a model id is the URL of an object store or a web server, and not of the hub.

    >>> is_remote("s3://bucket/model"), is_remote("https://huggingface.co/org/name")
    (True, False)
    """
    scheme, separator, rest = model_id.partition("://")
    if not separator or scheme.lower() not in (*OBJECT_STORES, *WEB):
        return False
    host = rest.partition("/")[0].lower().removeprefix("www.")
    return scheme.lower() in OBJECT_STORES or host not in _HUB_HOSTS


def split_url(model_id: str) -> tuple[str, str | None]:
    """Split the URL of a model into that of its folder and the GGUF file or tag, or None.

    >>> split_url("s3://bucket/model:Q4_K_M")
    ('s3://bucket/model', 'Q4_K_M')
    >>> split_url("https://host/model/file.gguf")
    ('https://host/model', 'file.gguf')

    Raises:
        ConfigError: the URL has a query or credentials, or no path on a host.
    """
    parts = urlsplit(model_id)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown} has credentials or a query, which logs and process lists would show",
            "leave them out: credentials come from environment variables, or ~/.netrc for https",
        )
    if not parts.netloc or (parts.scheme.lower() in WEB and not parts.path.strip("/")):
        raise ConfigError(f"{model_id} names no folder", "as in s3://BUCKET/PREFIX")
    if match := _TAG.fullmatch(model_id):
        return match["url"].rstrip("/"), match["tag"]
    folder, _, name = model_id.rstrip("/").rpartition("/")
    if name.lower().endswith(GGUF) and not folder.endswith("/"):
        return folder, name
    return model_id.rstrip("/"), None
