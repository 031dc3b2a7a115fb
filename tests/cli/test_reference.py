"""The reference of settings is that of today's settings, and they are what the commands take."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from tgi_cli.cli import reference
from tgi_cli.cli.commands import COMMANDS
from tgi_cli.config import ServeConfig
from tgi_cli.config.settings import SERVE, SETTINGS, settings_of
from tgi_cli.router.config import RouterConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert reference.updated(text) == text, "run `make reference`"
    for setting in SETTINGS:
        assert setting.hidden or setting.argument or f"`{setting.flag}`" in text


def test_no_name_and_no_variable_stands_for_two_things() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    variables = [name for setting in SETTINGS for name in setting.all_variables]
    assert len(variables) == len(set(variables))


def test_the_table_has_the_defaults_of_the_contracts() -> None:
    table = {setting.name: setting.default for setting in settings_of(SERVE)}
    known_later = {"model_id", "model_path", "revision", "engine_url", "engine_tls"}
    descriptors = {"socket_fd", "parent_fd"}
    for kind in (ServeConfig, RouterConfig):
        for field in fields(kind):
            if field.name in known_later | descriptors:
                continue
            default = table[field.name]
            assert field.default == (() if field.name == "cors_allow_origin" else default), (
                field.name
            )


def test_every_default_can_be_said() -> None:
    for setting in SETTINGS:
        if setting.default not in (None, ()):
            word = str(setting.default)
            assert setting.kind.read(word) == setting.default, setting.name


def test_the_list_of_commands_says_what_their_help_says() -> None:
    for entry in COMMANDS:
        function, _ = entry.load()
        first = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        assert first == entry.help, entry.name
