"""Settings are merged into clients' files in place: nothing else in a file changes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.cli.client_files import FORMATS
from tgi_cli.cli.client_files.merging import merged
from tgi_cli.cli.client_files.write import ClientFileError, merge_into
from tgi_cli.errors import ConfigError

JSON = """\
// my settings
{
  "theme": "dark", /* as at night */
  "provider": {
    "other": {"models": ["a", "b"]} // keep
  },
  "list": [
    {"id": "x", "baseUrl": "http://one", "extra": 1},
  ],
  "empty": {},
  "nothing": null,
  "model": "old" // changes
}
"""


def test_json_keeps_comments_and_other_settings() -> None:
    new = {
        "model": "new",
        "provider": {"tgi": {"url": "u"}},
        "empty": {"a": {"b": 1}},
        "list": [
            {"id": "x", "baseUrl": "http://two"},
            {"id": "x", "baseUrl": "http://one", "n": 2},
        ],
        "more": True,
    }
    text = FORMATS["json"].merge(JSON, new)
    assert FORMATS["json"].parse(text) == merged(FORMATS["json"].parse(JSON), new)
    for kept in (
        "// my settings\n{",
        '"dark", /* as at night */',
        '["a", "b"]}, // keep\n    "tgi"',
    ):
        assert kept in text
    assert '"model": "new", // changes\n  "more": true\n}' in text
    assert FORMATS["json"].parse(text)["list"] == [
        {"id": "x", "baseUrl": "http://two"},
        {"id": "x", "baseUrl": "http://one", "extra": 1, "n": 2},
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', '{"a": 1, "b": {"c": "d"}}'),
        ("{}", '{\n  "b": {\n    "c": "d"\n  }\n}'),
        ('{\n\t"a": 1,\n}', '{\n\t"a": 1,\n\t"b": {\n\t  "c": "d"\n\t},\n}'),
        ('{"b": {"c": "//", "e": "\\""}}', '{"b": {"c": "d", "e": "\\""}}'),
    ],
)
def test_json_follows_the_files_layout(text: str, expected: str) -> None:
    assert FORMATS["json"].merge(text, {"b": {"c": "d"}}) == expected


@pytest.mark.parametrize(
    "text",
    ['{"a" 1}', '{"a": 1', "{a: 1}", '{"a": 1 "b": 2}', '{"a": 1]', "{} {}", "[" * 100, "/*"],
)
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        FORMATS["json"].parse(text)


TOML = """\
# mine
model = "old" # gone
approval = "never"

[model_providers.tgi]
base_url = "http://old"
query = { a = "b" }

[projects."/home/me"]
trust = "yes"
model = "not this one"
"""


def test_toml_removes_what_is_none() -> None:
    new = {"approval": None, "absent": None, "model_providers": {"tgi": {"query": None}}}
    text = FORMATS["toml"].merge(TOML, new)
    assert FORMATS["toml"].parse(text) == merged(FORMATS["toml"].parse(TOML), new)
    assert "approval" not in text
    assert "query" not in text
    assert "absent" not in FORMATS["toml"].dump(new)


def test_toml_sets_values_at_the_top_and_in_tables() -> None:
    new = {
        "model": "new",
        "window": 4096,
        "model_providers": {"tgi": {"base_url": "http://new", "wire": "responses"}},
        "other": {"tgi": {"x": "y"}},
    }
    text = FORMATS["toml"].merge(TOML, new)
    assert FORMATS["toml"].parse(text) == merged(FORMATS["toml"].parse(TOML), new)
    assert text.startswith('# mine\nmodel = "new"\napproval = "never"\nwindow = 4096\n\n[model')
    assert 'query = { a = "b" }\nwire = "responses"\n\n[projects."/home/me"]' in text
    assert FORMATS["toml"].parse(FORMATS["toml"].dump(new)) == new


YAML = """\
# mine
name: Work
models:
  # the big one
  - name: big
    provider: openai
    # its key
    apiKey: ${{ secrets.BIG }}
  - name: mine
    provider: openai
    requestOptions:
      timeout: 5
# behind
rules: [short]
"""


@pytest.mark.parametrize(
    "models", [[{"name": "new", "roles": ["chat"]}], [{"name": "mine", "a": 1}]]
)
def test_yaml_merges_a_list_of_models(models: list[dict[str, Any]]) -> None:
    new = {"models": models, "schema": "v1"}
    text = FORMATS["yaml"].merge(YAML, new)
    assert FORMATS["yaml"].parse(text) == merged(FORMATS["yaml"].parse(YAML), new)
    for kept in ("# mine\n", "# the big one\n", "    # its key\n", "# behind\nrules: [short]\n"):
        assert kept in text


def test_yaml_adds_to_an_empty_list() -> None:
    new = {"models": [{"name": "new", "provider": "openai"}]}
    text = FORMATS["yaml"].merge("models: []\nname: Work\n", new)
    assert FORMATS["yaml"].parse(text) == {**new, "name": "Work"}


def test_env_replaces_and_appends_variables() -> None:
    text = FORMATS["env"].merge("# mine\nexport A=1\nB=2", {"A": "3", "C": "${D}"})
    assert text == "# mine\nA=3\nB=2\nC=${D}\n"


def test_a_file_is_replaced_with_a_backup_and_keeps_its_mode_and_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text(JSON, encoding="utf-8")
    real.chmod(0o640)
    link.symlink_to(real)
    backup = merge_into(link, FORMATS["json"], {"model": "new"}, {"theme": "light", "$schema": "s"})
    assert backup is not None
    assert backup.read_text(encoding="utf-8") == JSON
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == stat.S_IMODE(backup.stat().st_mode) == 0o640
    found = FORMATS["json"].parse(real.read_text(encoding="utf-8"))
    assert (found["model"], found["theme"], found["$schema"]) == ("new", "dark", "s")
    before = sorted(tmp_path.iterdir())
    assert merge_into(link, FORMATS["json"], {"model": "new"}, {}) is None
    assert sorted(tmp_path.iterdir()) == before  # nothing to change: no backup, no leftovers


def test_backups_do_not_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.env"
    path.write_text("A=0\n", encoding="utf-8")
    backups = [merge_into(path, FORMATS["env"], {"A": str(n)}, {}) for n in range(1, 4)]
    texts = [backup.read_text(encoding="utf-8") for backup in backups if backup]
    assert texts == ["A=0\n", "A=1\n", "A=2\n"]


def test_a_new_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "config.toml"
    assert merge_into(path, FORMATS["toml"], {"model": "new"}, {}) is None
    assert path.read_text(encoding="utf-8") == 'model = "new"\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("toml", 'x = """\n[model_providers.tgi]\n"""\n'),  # a header within a string
        ("toml", "model_providers.tgi = 3\n"),
        ("toml", "model = "),
        ("json", "[]"),
        ("json", "{,}"),
        ("yaml", "model_providers: &a {tgi: *a"),
        ("yaml", "- a\n"),
    ],
)
def test_files_that_cannot_be_edited_stay_as_they_are(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        merge_into(path, FORMATS[name], {"model_providers": {"tgi": {"base_url": "u"}}}, {})
    assert path.read_text(encoding="utf-8") == text
    assert [*tmp_path.iterdir()] == [path]


def test_unreadable_files_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClientFileError):
        merge_into(tmp_path, FORMATS["json"], {"a": "b"}, {})
