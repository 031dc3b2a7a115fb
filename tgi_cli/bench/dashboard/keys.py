"""The screen that lists the keys."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = (
    ("← →, Tab, Shift+Tab", "previous and next step"),
    ("f", "follow the running step again"),
    ("1 2 3 4 5", "steps, percentiles, requests, server, compare"),
    ("+ -", "zoom charts, histograms and the timeline"),
    ("↑ ↓, PgUp, PgDn", "scroll tables and the timeline"),
    ("d", "dark or light background"),
    ("?", "this list"),
    ("q, Ctrl-C", "quit; a running benchmark saves what it has"),
)
"""Keys and their meanings. A click opens a step or a view, too."""


class KeysScreen(ModalScreen[None]):
    """A list of the keys above the dashboard, until any key or click."""

    DEFAULT_CSS = """
    KeysScreen { align: center middle; }
    KeysScreen Static {
        width: auto;
        height: auto;
        padding: 1 2;
        border: round $foreground 50%;
        background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """Implement Textual's hook."""
        yield Static(key_table(), id="keys-table")

    def on_key(self) -> None:
        """Close the list."""
        self.dismiss()

    def on_click(self) -> None:
        """Close the list."""
        self.dismiss()


def key_table() -> Text:
    """The keys, a line each."""
    longest = max(len(key) for key, _ in KEYS)
    text = Text(no_wrap=True)
    for key, meaning in KEYS:
        text.append(f"{key:<{longest}}", style="bold")
        text.append(f"  {meaning}\n")
    text.append("\nAny key closes this.", style="dim")
    return text
