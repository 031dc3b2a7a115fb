"""Options of ``tgi quantize``, one field per flag. Imports no torch: the command line uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tgi_cli.config.settings import default
from tgi_cli.config.settings.setting import QUANTIZE

Method = Literal["gptq", "awq", "rtn", "fp8", "int8"]
Layout = Literal["gptq", "gptq_v2", "awq", "compressed-tensors", "gguf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Options of one command. None leaves the choice to the method, or to the model.

    Attributes:
        model_id: a model id on the hub, or a folder.
        output_dir: the folder to create, or a GGUF file; required unless ``inspect`` is set.
        inspect: describe the checkpoint and write nothing.
        method: how weights are quantized. Default: ``gptq``, and ``rtn`` for GGUF.
        bits: 2, 3, 4 or 8. Default: 4, or 8 for fp8 and int8.
        group_size: inputs that share a scale; -1 for whole rows. Default: 128, or -1 for fp8 and
            int8.
        sym: symmetric grid. Default: only awq is asymmetric.
        act_order: gptq processes columns in order of importance.
        static_groups: gptq fixes all scales before rounding.
        group_aware: gptq reorders columns within and among groups. Default: unless ``act_order``.
        mse: search scales with the least squared error.
        percdamp: share of the mean diagonal that is added to the Hessian's diagonal.
        format: layout of the checkpoint. Default: the method's own.
        calibration: a file, a data set on the hub, or ``bundled``.
        samples, seq_len, seed: number, length and random seed of the calibration samples.
        include, exclude: shell patterns for names of layers.
        evaluate: compare the result with the original.
        resume: continue an interrupted run.
        device: ``cpu`` or ``cuda``. Default: CUDA if available.
        backend: implementation of the arithmetic.
        upload_to_model_id: repository on the hub that receives the result.
        revision: branch, tag, commit or ``refs/pr/N`` of the model.
        trust_remote_code: run code from the checkpoint.
        json_output: print the report as JSON.
    """

    model_id: str
    output_dir: Path | None = None
    inspect: bool = False
    method: Method | None = None
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    act_order: bool = False
    static_groups: bool = False
    group_aware: bool | None = None
    mse: bool = False
    percdamp: float = default("percdamp", QUANTIZE)
    format: Layout | None = None
    calibration: str | None = None
    samples: int = default("samples", QUANTIZE)
    seq_len: int | None = None
    seed: int = default("seed", QUANTIZE)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    evaluate: bool = False
    resume: bool = False
    device: Literal["cpu", "cuda"] | None = None
    backend: Literal["builtin", "gptqmodel"] = default("backend", QUANTIZE)
    upload_to_model_id: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    json_output: bool = False
