"""Resolves model ids to local folders: download, resume, verify, convert, merge adapters.

Importing this package is cheap: its modules import their libraries when they are called.
"""

from tgi_cli.hub.download import download_progress
from tgi_cli.hub.lora_files import LocalAdapter, resolve_adapter, resolve_adapters
from tgi_cli.hub.resolve import LocalModel, resolve_model

__all__ = [
    "LocalAdapter",
    "LocalModel",
    "download_progress",
    "resolve_adapter",
    "resolve_adapters",
    "resolve_model",
]
