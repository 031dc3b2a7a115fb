"""The reference of settings is that of today's settings, and they are what the commands take."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tgi_cli.cli import commands, reference
from tgi_cli.config import ServeConfig
from tgi_cli.config.settings import SETTINGS, settings_of
from tgi_cli.config.settings.setting import (
    COMMANDS,
    COMPARE,
    COMPLETION,
    DEPLOY,
    SERVE,
    VIEW,
)
from tgi_cli.router.config import RouterConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_reference_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert reference.updated(text) == text, "run `make reference`"
    for setting in SETTINGS:
        assert setting.hidden or setting.argument or f"`{setting.flag}`" in text


@pytest.mark.parametrize("command", [*COMMANDS, VIEW, COMPARE, DEPLOY, COMPLETION])
def test_names_flags_and_variables_are_unique_within_a_command(command: str) -> None:
    settings = settings_of(command)
    names = [setting.name for setting in settings]
    assert len(names) == len(set(names))
    flags = [flag for setting in settings for flag in setting.flags if not setting.argument]
    assert len(flags) == len(set(flags))
    variables = [name for setting in settings for name in setting.all_variables]
    assert len(variables) == len(set(variables))


def test_aliases_name_settings_of_the_same_command() -> None:
    for command in COMMANDS:
        names = {setting.name for setting in settings_of(command)}
        assert {s.alias_of for s in settings_of(command)} - {""} <= names, command


def test_configurations_have_the_defaults_of_the_table() -> None:
    table = {setting.name: setting.default for setting in settings_of(SERVE)}
    known_later = {"model_id", "model_path", "revision"}
    known_later |= {"engine_url", "replica_url", "engine_tls"}
    descriptors = {"socket_fd", "parent_fd", "control_fd"}
    lists = {"cors_allow_origin", "served_model_name", "allowed_media_domains"}
    for kind in (ServeConfig, RouterConfig):
        for field in fields(kind):
            if field.name in known_later | descriptors:
                continue
            default = table[field.name]
            assert field.default == (() if field.name in lists else default), field.name


def test_every_default_is_a_valid_value() -> None:
    for setting in SETTINGS:
        if setting.default not in (None, (), ""):
            word = str(setting.default)
            assert setting.kind.read(word) == setting.default, setting.name


def test_the_list_of_commands_matches_their_help() -> None:
    for entry in commands.COMMANDS:
        function, _ = entry.load()
        first = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        assert first == entry.help, entry.name
