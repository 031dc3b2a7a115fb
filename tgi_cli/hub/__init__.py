"""Model ids to local folders: download, resume, verify, convert, merge adapters.

``resolve_model`` is the whole of it for everybody else; the submodules import their libraries
when they are called, so importing this package costs nothing.
"""

from tgi_cli.hub.lora_files import LocalAdapter, resolve_adapter, resolve_adapters
from tgi_cli.hub.progress import LineProgress, Progress, TerminalProgress, pick_progress
from tgi_cli.hub.resolve import LocalModel, resolve_model

__all__ = [
    "LineProgress",
    "LocalAdapter",
    "LocalModel",
    "Progress",
    "TerminalProgress",
    "pick_progress",
    "resolve_adapter",
    "resolve_adapters",
    "resolve_model",
]
