"""Calibration text from files, the hub and the package."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tgi_cli import demo
from tgi_cli.errors import ConfigError, ModelError, OfflineError
from tgi_cli.process.installation import install_command
from tgi_cli.process.worker_pool import Limits
from tgi_cli.quantize import calibration
from tgi_cli.quantize.calibration import Calibration, choose_file, heldout_windows, load_calibration
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.text.chat_template import ChatTemplate
from tgi_cli.text.tokenizer import Tokenizer

WORDS = [f"number {i} is followed by number {i + 1}.\n" for i in range(400)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def draw(text: str | Path | None, *, context: int = 2048, **options: Any) -> Calibration:
    model = demo.model_path()
    options = {"samples": 8, "seq_len": 32, "calibration": text and str(text)} | options
    return load_calibration(model, QuantizeOptions(model_id=str(model), **options), context=context)


def text_of(ids: torch.Tensor) -> str:
    return Tokenizer.load(demo.model_path()).decode(ids.flatten().tolist())


def test_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_text("".join(WORDS))
    found = draw(file)
    assert found.ids.shape == (8, 32)
    assert found.source == "some.txt"
    assert "is followed by number" in text_of(found.ids)
    assert torch.equal(found.ids, draw(file).ids)
    assert found.digest == draw(file).digest
    assert found.digest != draw(file, seed=1).digest
    both = [tuple(row) for row in (*found.ids.tolist(), *found.rest.tolist())]
    assert len(both) == len(set(both)) > 8


def test_rows_of_json_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": word, "id": i} for i, word in enumerate(WORDS)]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, *others = (
        draw(tmp_path / name).ids for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.parquet")
    )
    assert all(torch.equal(first, other) for other in others)


def test_conversations_are_rendered_with_the_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "There"}]
    older = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "There"}]
    rows = [{"messages": turns}, {"conversations": older}] * 60
    file.write_text("\n".join(map(json.dumps, rows)))
    text = Tokenizer.load(demo.model_path()).decode(draw(file).ids[0].tolist(), False)
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThere<|im_end|>" in text


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("short.txt", "too short", "has . tokens: not one sample of 32"),
        ("broken.jsonl", "{", "cannot be read"),
        ("numbers.jsonl", '{"a": 1}', "a row without text"),
        ("broken.parquet", "no", "cannot be read"),
    ],
)
def test_unusable_files_are_refused(name: str, content: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=cause):
        draw(tmp_path / name)


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="requires pyarrow") as raised:
        draw(tmp_path / "a.parquet")
    assert raised.value.remedy == install_command("quantize")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        draw(tmp_path / "missing.txt")


def test_without_a_hub_the_bundled_text_is_used_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = draw(None, samples=128, seq_len=64)
    assert found.source == "the bundled text"
    assert "not with wikitext2" in caplog.text
    evaluated = heldout_windows(demo.model_path(), 64)
    assert len(evaluated) > 64
    calibrated = {tuple(row) for row in (*found.ids.tolist(), *found.rest.tolist())}
    assert calibrated.isdisjoint(map(tuple, evaluated.tolist()))


def test_a_requested_data_set_is_not_replaced() -> None:
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE"):
        draw("someone/texts")


def test_lengths_follow_the_text_and_the_context(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_text("".join(WORDS))
    tokens = len(Tokenizer.load(demo.model_path()).encode("".join(WORDS)))
    found = draw(file, samples=128, seq_len=None)
    length = found.ids.shape[1]
    assert tokens < 16 * 2 * length
    assert len(found.ids) >= 16
    with pytest.raises(ConfigError, match="more than the model's context of 16"):
        draw(file, context=16)


def test_the_first_training_file_of_a_data_set_is_chosen() -> None:
    files = ["README.md", "b/test-0.parquet", "b/train-1.parquet", "b/train-0.parquet", "a/x.txt"]
    assert choose_file(files, "") == "b/train-0.parquet"
    assert choose_file(files, "a") == "a/x.txt"
    assert choose_file(["README.md", "x.bin"], "") is None


def test_the_data_set_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"text": w}) for w in WORDS))
    asked = []

    def fetch(name: str) -> list[Path]:
        asked.append(name)
        return [tmp_path / "train.jsonl"]

    monkeypatch.setattr(calibration, "fetch_dataset", fetch)
    assert draw(None).source == "wikitext2"
    assert draw("someone/texts:part").source == "someone/texts:part"
    assert asked == ["wikitext2", "someone/texts:part"]


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: no listener
    with pytest.raises(OfflineError, match=r"127\.0\.0\.1:9 cannot be reached"):
        draw("someone/texts")


def test_a_chat_template_beyond_its_limits_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would, for each of thousands of conversations."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": loop}, {}, Limits(processes=1, seconds=0.3))
    monkeypatch.setattr(ChatTemplate, "load", lambda *arguments: template)
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": WORDS[0]}]
    file.write_text("\n".join([json.dumps({"messages": turns})] * 60))
    with pytest.raises(ModelError, match=r"chat template takes more than 0.3 s to render"):
        draw(file)
    template.close()
