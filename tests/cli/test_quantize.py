"""``tgi quantize``: the options that flags, aliases and a file set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_cli.cli import main, tgi_aliases
from tgi_cli.errors import ExitCode
from tgi_cli.quantize import command
from tgi_cli.quantize.options import QuantizeOptions

Started = list[tuple[QuantizeOptions, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The options and the command line of each run that would have started."""
    runs: Started = []
    monkeypatch.setattr(command, "run", lambda *run: runs.append(run))
    return runs


def test_unset_options_have_the_defaults_of_the_api(started: Started) -> None:
    assert main.run(["quantize", "org/m", "/out"]) == ExitCode.OK
    options = QuantizeOptions(model_id="org/m", output_dir=Path("/out"))
    assert started == [(options, "tgi quantize org/m /out")]


def test_aliases_set_the_same_options(started: Started) -> None:
    assert main.run(["quantize", "m", "/o", "--groupsize", "32", "--act-order"]) == ExitCode.OK
    assert main.run(["quantize", "m", "/o", "--group-size", "32", "--desc-act"]) == ExitCode.OK
    (first, line), (second, _) = started
    assert first == second
    assert (first.group_size, first.act_order) == (32, True)
    assert line == "tgi quantize m /o --groupsize 32 --act-order"
    both = ["--groupsize", "32", "--group-size", "64"]
    assert main.run(["quantize", "m", "/o", *both]) == ExitCode.USAGE


def test_the_command_line_can_be_repeated(started: Started) -> None:
    words = ["m", "/o", "--asym", "--no-group-aware", "--exclude", "a*", "--exclude", "b"]
    assert main.run(["quantize", *words]) == ExitCode.OK
    (options, line) = started[0]
    assert (options.sym, options.group_aware, options.exclude) == (False, False, ("a*", "b"))
    assert line == "tgi quantize m /o --asym --no-group-aware --exclude 'a*' --exclude b"


def test_a_configuration_file_sets_options(started: Started, tmp_path: Path) -> None:
    path = tmp_path / "tgi.yaml"
    path.write_text(
        "port: 8080\nquantize:\n  model-id: org/m\n  output_dir: /out\n  include: [a, b]\n"
        "  bits: 8\n"
    )
    assert main.run(["quantize", "--config", str(path), "--bits", "4"]) == ExitCode.OK
    options = started[0][0]
    assert (options.model_id, options.output_dir) == ("org/m", Path("/out"))
    assert (options.include, options.bits) == (("a", "b"), 4)


def test_tgis_negative_switches_are_accepted(started: Started) -> None:
    words = ["quantize", "m", "/o", "--no-trust-remote-code", "--no-json-output"]
    assert tgi_aliases.server(words) == ExitCode.OK
    options = started[0][0]
    assert (options.trust_remote_code, options.json_output) == (False, False)
