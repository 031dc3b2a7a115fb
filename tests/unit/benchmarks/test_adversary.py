"""Tests of the adversarial benchmark: it covers every field, and its values are as described."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from tests.benchmarks import overload, soak
from tests.benchmarks.adversary import (
    checkpoints,
    combined,
    models,
    protocol,
    report,
    several_models,
    starts,
    values,
    web_ui,
)
from tests.benchmarks.adversary.client import Response
from tests.benchmarks.adversary.fields import Target, targets
from tests.benchmarks.adversary.measure import Result
from tests.benchmarks.adversary.served_starts import ServedStarts, Start
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.models_file import read_models
from tgi_cli.config.settings.setting import SERVE
from tgi_cli.errors import CorruptFileError
from tgi_cli.gguf.reader import read_gguf
from tgi_cli.router.api.web_ui import assets
from tgi_cli.router.app import ROUTES, schema

LIMIT = 20_000
POSTS = [target for target in targets() if target.bodies]


def decoded() -> Iterator[Any]:
    """Yield the types that the routes decode from bodies."""
    for endpoint in ROUTES:
        yield from (*endpoint.operation.body, *endpoint.operation.referenced)


def structs(type_: Any, known: set[type] | None = None) -> Iterator[type]:
    """Yield the structs within a type of :func:`msgspec.inspect.type_info`, including itself."""
    known = set() if known is None else known
    if isinstance(type_, inspect.StructType) and type_.cls not in known:  # some are recursive
        known.add(type_.cls)
        yield type_.cls
        for field in type_.fields:
            yield from structs(field.type, known)
    for name in ("type", "item_type", "value_type"):
        if (inner := getattr(type_, name, None)) is not None:
            yield from structs(inner, known)
    for inner in getattr(type_, "types", ()):
        yield from structs(inner, known)


def test_every_field_that_any_route_decodes_is_covered() -> None:
    covered = {each.owner for target in targets() for each in target.fields()}
    found = {
        f"{struct.__name__}.{field.encode_name}"
        for kind in decoded()
        for struct in structs(inspect.type_info(kind))
        for field in msgspec.structs.fields(struct)
    }
    assert len(found) > 100
    assert found <= covered


def test_every_route_of_the_document_is_a_target() -> None:
    found = {
        (method.upper(), path.replace("{model}", "a").replace("{version}", "1"))
        for path, methods in json.loads(schema())["paths"].items()
        for method in methods
    }
    assert found == {(target.method, target.path) for target in targets()}


@pytest.mark.parametrize("target", POSTS, ids=lambda target: target.name)
def test_samples_are_valid_and_bodies_are_json_around_any_value(target: Target) -> None:
    for body, sample in zip(target.bodies, target.samples(), strict=True):
        msgspec.json.decode(sample, type=body)
    for field in target.fields():
        body = json.loads(field.around(b'"the value"'))
        assert "the value" in json.dumps(body), field.path


@pytest.mark.parametrize("full", [True, False])
def test_values_fit_and_are_of_the_types_that_a_field_accepts(full: bool) -> None:
    kinds: set[str] = set()
    for target in POSTS[:4]:
        for field in target.fields():
            for value_set in values.value_sets(field.type, LIMIT, field.items, full):
                kinds.add(value_set.kind)
                if not value_set.separate:  # those have fixed sizes
                    assert all(len(value) <= LIMIT for value in value_set.values()), value_set
    assert {"deep", "long: letters", "numbers", "many keys", 'many "a"'} <= kinds


def test_values_are_as_large_as_they_may_be() -> None:
    assert len(values.string(b"abc", 1000)) in range(998, 1001)
    assert len(json.loads(values.items(b'"a"', 1000))) == 249
    assert len(json.loads(values.keys(1000))) == 83
    assert json.loads(values.nested(3)) == [[[1]]]
    for unit in values.alphabets().values():
        json.loads(values.string(unit, 50_000))


def test_bodies_without_a_schema_and_combined_ones_keep_to_the_limit() -> None:
    for name, make in protocol.BODIES.items():
        over = name == "one byte too long"
        assert len(make(LIMIT)) <= LIMIT + over, name
    for _path, _name, body in combined.bodies(2_000_000):
        json.loads(body)


def test_attacks_on_several_models_have_their_own_names_and_the_last_ones_unload() -> None:
    attacks = list(several_models.attacks(LIMIT))
    names = [attack.name for attack in attacks]
    assert len(names) == len(set(names)) > 150
    unload = [attack.unloads for attack in attacks]
    assert unload == sorted(unload)
    assert any(unload)


def test_the_file_of_several_models_is_one_that_the_command_takes(tmp_path: Path) -> None:
    (file, *_) = several_models.flags(tmp_path, LIMIT)
    found = read_models(Path(file.partition("=")[2]), set())
    assert list(found) == [several_models.FIRST, several_models.SECOND]
    folders = {Path(str(values["model"])) for values in found.values()}
    assert len(folders) == 2
    assert all((folder / "config.json").is_file() for folder in folders)


def test_attacks_on_the_web_ui_have_their_own_names_and_no_path_is_that_of_a_file() -> None:
    names = [attack.name for attack in web_ui.attacks(LIMIT)]
    assert len(names) == len(set(names)) > 100
    assert not {path.removeprefix("/web-ui/") for path in web_ui.TRAVERSALS} & (
        assets().keys() - {"index.html"}
    )


def test_every_field_of_a_file_is_changed_alone() -> None:
    config = {"a": 1, "b": {"c": [1, 2]}, "d": []}
    paths = list(checkpoints.field_paths(config))
    assert paths == [("a",), ("b",), ("b", "c"), ("b", "c", 0), ("d",)]
    changed = json.loads(checkpoints.with_field(config, ("b", "c", 0), "1e3"))
    assert changed == {"a": 1, "b": {"c": [1000.0, 2]}, "d": []}


def test_every_flag_that_takes_a_value_is_covered() -> None:
    given = dict.fromkeys(flag for flag, _ in starts.of_settings())
    wanted = [
        setting.flag
        for setting in settings_of(SERVE)
        if not (setting.hidden or setting.argument or setting.alias_of or setting.kind.choices)
        and setting.kind.type is not bool
    ]
    assert set(wanted) - given.keys() <= {"--quantize-head-bits"}, "one of a few numbers"


def served(seconds: dict[str, list[float]], log: Path) -> ServedStarts:
    """Starts that take so many seconds, by the name of their folder; a negative one hangs."""

    def serve(folder: Path, flags: Sequence[str], log: Path, limit: float) -> Start:
        log.write_text(f"{folder} {flags}")
        one = seconds[folder.name].pop(0)
        return Start(-1 if one < 0 else 2, abs(one), 100)

    def normal(folder: Path, flags: Sequence[str], log: Path, limit: float) -> Start:
        return replace(serve(folder, flags, log, limit), code=0)

    found = ServedStarts(Path("/normal"), log, 15.0, normal)
    found.serve = serve
    return found


@pytest.mark.parametrize(
    ("late", "normal", "expected"),
    [
        ([10.0], [5.0], (2, 10.0, 5.0, 1)),
        ([30.0], [5.0, 20.0], (2, 30.0, 10.0, 1)),
        ([40.0, 12.0], [5.0, 6.0], (2, 12.0, 7.0, 2)),
        ([40.0, 50.0, 41.0], [5.0, 6.0, 7.0, 4.0], (2, 40.0, 34.0, 3)),
        ([-60.0, 12.0], [5.0], (2, 12.0, 7.0, 2)),
        ([-60.0, -60.0, -60.0], [5.0], (-1, 60.0, 55.0, 3)),
    ],
    ids=["at once", "beside a busy machine", "the second time", "late", "hung once", "hung"],
)
def test_a_late_start_is_repeated_beside_a_normal_one(
    late: list[float],
    normal: list[float],
    expected: tuple[int, float, float, int],
    tmp_path: Path,
) -> None:
    seconds = {"normal": normal, "late": late}
    one = served(seconds, tmp_path / "log").start(Path("/late"), ("--flag",))
    assert (one.code, one.seconds, one.more, one.runs) == expected
    assert seconds == {"normal": [], "late": []}
    assert (tmp_path / "log").read_text() == "/late ('--flag',)"


def test_keys_of_gguf_files_are_covered_whether_a_file_has_them_or_not(tmp_path: Path) -> None:
    subject = next(models.subjects(["gguf"]))
    subject.make(tmp_path / "base")
    cases = list(subject.cases(tmp_path / "base"))
    fields = {case.field for case in cases}
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.pre", "tokenizer.chat_template"} <= fields
    assert {"llama.block_count", "llama.rope.freq_base", "(tensors)"} <= fields
    contents = {case.kind: case for case in cases if case.field == "(header)"}
    assert len(contents) > 200
    linked = checkpoints.linked_copy(tmp_path / "base", tmp_path / "copy")
    contents["keys: 1048576"].write(linked)
    with pytest.raises(CorruptFileError, match="1048576 keys"):
        read_gguf(linked / "model.gguf")
    case = next(each for each in cases if (each.field, each.kind) == ("llama.block_count", "-1"))
    case.write(linked)
    assert read_gguf(linked / "model.gguf").metadata["llama.block_count"] == -1
    assert read_gguf(tmp_path / "base" / "model.gguf").metadata["llama.block_count"] == 1


def test_a_field_that_several_models_have_is_varied_once(tmp_path: Path) -> None:
    first, second, *_ = models.subjects(["images"])
    for subject in (first, second):
        subject.make(tmp_path / subject.name)
    fields = [{case.field for case in each.cases(tmp_path / each.name)} for each in (first, second)]
    assert {"scale_factor", "size.longest_edge", "vision_config.patch_size"} <= fields[0]
    assert not fields[0] & fields[1]


def test_the_worst_of_each_route_is_shown() -> None:
    first = Result("a", "x", "long", {"422": 1}, stall=0.01, growth={"router": 5 << 20})
    second = Result("a", "y", "deep", {"500": 2}, stall=0.2, violations=["slow"])
    third = Result("b", "z", "odd", {"200": 1}, gap=0.3, growth={"worker": 1 << 40})
    rows = report.rows([first, second, third])
    assert rows[0] == ["a", "2", "200", "y deep", "0", "x long", "5", "x long", "1"]
    assert rows[1][6] == "0", "workers bound themselves"
    found = report.summary([first, second, third])
    assert "3 cases: worst stall 200 ms (a y deep)" in found
    assert "2 responses blame the server" in found
    assert "1 exceeded the budget" in found


@pytest.mark.parametrize(
    ("status", "blames"), [(200, False), (422, False), (500, True), (424, True), (503, False)]
)
def test_responses_that_blame_the_server(status: int, blames: bool) -> None:
    assert Response(status, 0.0, 0, "").blames_server is blames


def samples(memory: list[float], files: int = 0) -> list[soak.Sample]:
    return [
        soak.Sample(3.0 * n, int(size * 2**20), 10 + files * n // len(memory), 5)
        for n, size in enumerate(memory)
    ]


def test_a_leak_is_distinguished_from_noise() -> None:
    leak = soak.Growth.of(samples([100 + n / 5 for n in range(100)]))
    assert leak.grown(4 * 2**20) == ["memory"]
    assert leak.slope == pytest.approx(240 * 2**20, rel=0.01)
    noise = soak.Growth.of(samples([100 + n % 7 for n in range(100)]))
    assert noise.grown(4 * 2**20) == []
    assert soak.Growth.of(samples([100.0] * 99, files=9)).grown(1e9) == ["files"]
    with pytest.raises(ValueError, match="show no growth"):
        soak.Growth.of(samples([1.0] * 5))


def test_percentiles_are_of_what_was_measured() -> None:
    hundred = [n / 100 for n in range(1, 101)]
    assert [overload.percentile(hundred, share) for share in (0.5, 0.99, 1.0)] == [0.5, 0.99, 1.0]
    assert overload.percentile([3.0], 0.5) == 3.0
    assert overload.percentile([], 0.5) == 0.0
