"""``tgi quantize`` as a command: end to end, stopped and gone on with, and within its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tgi_cli import demo
from tgi_cli.cli.main import run
from tgi_cli.errors import ExitCode
from tgi_cli.llm.llm import LLM
from tgi_cli.process.progress import ProgressReporter

MODEL = str(demo.model_path())
FEW = ("--calibration", "bundled", "--samples", "6", "--seq-len", "64", "--device", "cpu")


def test_a_process_makes_what_can_be_served(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tgi_cli", "quantize", MODEL, str(out), *FEW]
    command += ["--evaluate", "--json-output", "--groupsize", "32", "--act-order"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["path"] == str(out)
    assert len(result["layers"]) == 35
    assert 0 < result["evaluation"]["kl"] < 0.1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert any("calibrating with 6 samples" in line["fields"]["message"] for line in lines)
    assert "--groupsize 32" in (out / "README.md").read_text()
    with LLM(str(out), max_total_tokens=64) as llm:
        [answer] = llm.generate(["import os\n\n\ndef "], max_new_tokens=12)
    assert answer.text
    stated = json.loads((out / "quantize_config.json").read_text())
    assert (stated["bits"], stated["group_size"], stated["desc_act"]) == (4, 32, True)


def test_a_resumed_run_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", MODEL, str(tmp_path / "whole"), *FEW]) == 0
    out = tmp_path / "out"
    update = ProgressReporter.update

    def stop(self: ProgressReporter, completed: float, **options: Any) -> None:
        update(self, completed, **options)
        if completed == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressReporter, "update", stop)
        assert run(["quantize", MODEL, str(out), *FEW]) == ExitCode.INTERRUPTED
    said = capsys.readouterr().err
    assert f"to go on: tgi quantize {MODEL} {out}" in said
    assert said.rstrip().endswith("--resume")
    assert not out.exists()
    assert run(["quantize", MODEL, str(out), *FEW]) == ExitCode.USAGE
    assert run(["quantize", MODEL, str(out), *FEW, "--seed", "1", "--resume"]) == ExitCode.USAGE
    assert "had other calibration" in capsys.readouterr().err
    assert run(["quantize", MODEL, str(out), *FEW, "--resume"]) == 0
    for file in sorted((tmp_path / "whole").iterdir()):
        if file.name != "README.md":  # it names the command, and the folder
            assert file.read_bytes() == (out / file.name).read_bytes(), file.name
    assert not (tmp_path / "out.partial").exists()


def test_interrupted_before_anything_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tgi_cli.quantize.command.resolve_model", stop)
    assert run(["quantize", "someone/model", str(tmp_path / "out")]) == ExitCode.INTERRUPTED
    assert "nothing was made" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rtn", "fp8", "int8"])
def test_inspection(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["quantize", MODEL, str(out), "--method", method, "--exclude", "*.4.*"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    assert run(["quantize", "--inspect", str(out), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = {"rtn": "gptq", "fp8": "compressed-tensors", "int8": "compressed-tensors"}[method]
    assert lines[0].startswith(f"LlamaForCausalLM, {wanted}")
    assert any("28 weights in" in line for line in lines)
    assert run(["quantize", "--inspect", str(out), "--json-output", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == wanted
    [kept] = found["quantized"]
    assert len(kept["modules"]) == 28
    assert kept["kernel"]
    assert found["bytes"] < 0.8 * sum(f.stat().st_size for f in Path(MODEL).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--inspect", MODEL, "out"], ExitCode.USAGE, "--inspect writes nothing"),
        ([MODEL], ExitCode.USAGE, "OUTPUT_DIR is missing"),
        ([MODEL, "out", "--bits", "5"], ExitCode.USAGE, "'5' is not one of 2, 3, 4, 8"),
        ([MODEL, "out", "--method", "awq", "--bits", "8"], ExitCode.USAGE, "4 bits, not 8"),
        ([MODEL, "out", "--method", "fp8", "--format", "gptq"], ExitCode.USAGE, "format gptq"),
        ([MODEL, "out", "--act-order", "--group-aware"], ExitCode.USAGE, "not both"),
        ([MODEL, "out", "--resume", *FEW], ExitCode.USAGE, "no unfinished run"),
        ([MODEL, "out", "--include", "x", *FEW], ExitCode.USAGE, "matches no layer"),
        (["./nowhere", "out"], ExitCode.MODEL_UNAVAILABLE, "there is no folder"),
        ([MODEL, "out", "--upload-to-model-id", "a/b/c"], ExitCode.USAGE, "not a valid model id"),
    ],
)
def test_invalid_combinations_are_reported(
    arguments: list[str],
    code: ExitCode,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["quantize", *arguments]) == code
    assert said in capsys.readouterr().err
    assert not Path("out").exists()


MEASURED = """
import sys
from pathlib import Path
from typing import Any
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.pipeline import QuantizeJob, quantize
from tgi_cli.quantization.algorithms.recipe import Recipe

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

for model in sys.argv[1:]:
    options = QuantizeOptions(
        model_id=model, calibration="bundled", samples=4, seq_len=64, device="cpu",
        include=("*.v_proj",),
    )
    quantize(QuantizeJob(Path(model), Path(model + "-out"), Recipe(method="gptq"), options))
    print(peak())
"""


def test_memory_is_that_of_blocks_not_of_the_model(tmp_path: Path) -> None:
    models = [
        make_llama(
            tmp_path / str(blocks),
            dtype=torch.bfloat16,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=blocks,
            vocab_size=4096,
            head_dim=64,
            num_key_value_heads=8,
            tokenizer=demo.model_path(),
        )
        for blocks in (4, 20)
    ]
    small, large = ((each / "model.safetensors").stat().st_size / 2**20 for each in models)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    arguments = [sys.executable, "-c", MEASURED, *map(str, models)]
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    block = (large - small) / 16 * 2  # in float32
    # The heap's leftovers come to one to three blocks; all sixteen more would be 16.
    assert second - first < 5 * block, (
        f"{second - first:.0f} MiB more for {large - small:.0f} MiB more of weights"
    )
