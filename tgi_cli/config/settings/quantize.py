"""Settings of ``tgi quantize``, and of ``tgi completion``."""

from __future__ import annotations

from tgi_cli.config.settings.setting import COMPLETION, QUANTIZE, Setting, panel
from tgi_cli.config.settings.values import (
    RATIO,
    SWITCH,
    ValueKind,
    one_of,
    path,
    text,
    whole,
    words,
)


def _parse_group_size(word: str) -> int:
    try:
        size = int(word)
    except ValueError:
        size = -2
    if size < -1:
        raise ValueError(f"{word!r} is neither a number of inputs nor -1")
    return size


def _parse_bits(word: str) -> int:
    if word not in ("2", "3", "4", "8"):
        raise ValueError(f"{word!r} is not one of 2, 3, 4, 8")
    return int(word)


_GROUP_SIZE = ValueKind(int, "N", _parse_group_size)
_BITS = ValueKind(int, "N", _parse_bits)

QUANTIZE_SETTINGS = (
    *panel(
        "Checkpoints",
        (QUANTIZE,),
        Setting(
            "model_id",
            text("MODEL_ID"),
            None,
            "Model id on the hub, or a local folder.",
            argument=True,
            required=True,
        ),
        Setting("output_dir", path("OUTPUT_DIR"), None, "Folder to create.", argument=True),
        Setting("inspect", SWITCH, False, "Describe the checkpoint instead of quantizing it."),
        Setting(
            "upload_to_model_id", text("MODEL_ID"), None, "Upload the result to this repository."
        ),
        variables=(),
    ),
    *panel(
        "Quantization",
        (QUANTIZE,),
        Setting(
            "method",
            one_of("METHOD", "gptq", "awq", "rtn", "fp8", "int8"),
            "gptq",
            "Algorithm: gptq or awq (with calibration), rtn (round to nearest), fp8 or int8.",
        ),
        Setting("bits", _BITS, None, "2, 3, 4 or 8. Default: 4, with fp8 and int8 8."),
        Setting(
            "groupsize",
            _GROUP_SIZE,
            None,
            "Inputs per scale; -1: one scale per row; fp8 also 0: one scale per weight. Default: "
            "128, with fp8 and int8 -1.",
            alias_of="group_size",
        ),
        Setting(
            "group_size",
            _GROUP_SIZE,
            None,
            "The same as --groupsize.",
            hidden=True,
        ),
        Setting(
            "sym",
            SWITCH,
            None,
            "Symmetric quantization, or asymmetric with zero points. Default: --sym, with awq "
            "--asym.",
            negative="--asym",
        ),
        Setting(
            "act_order",
            SWITCH,
            False,
            "gptq: quantize columns by decreasing activation size; costs a gather when serving.",
            negative=True,
        ),
        Setting(
            "desc_act",
            SWITCH,
            False,
            "The same as --act-order.",
            negative=True,
            alias_of="act_order",
            hidden=True,
        ),
        Setting(
            "static_groups", SWITCH, False, "gptq: compute all scales before quantizing columns."
        ),
        Setting(
            "group_aware",
            SWITCH,
            None,
            "gptq: reorder within and among groups, at no cost when serving. Default: without "
            "--act-order.",
            negative=True,
        ),
        Setting("mse", SWITCH, False, "Search for the scales with the least squared error."),
        Setting(
            "percdamp",
            RATIO,
            0.01,
            "gptq: dampening, as a share of the Hessian's mean diagonal.",
        ),
        Setting(
            "format",
            one_of("FORMAT", "gptq", "gptq_v2", "awq", "compressed-tensors"),
            None,
            "Checkpoint format: gptq, gptq_v2, awq or compressed-tensors (fp8 and int8). Default: "
            "the method's, with --asym gptq_v2.",
        ),
        variables=(),
    ),
    *panel(
        "Calibration",
        (QUANTIZE,),
        Setting(
            "calibration",
            text("FILE|DATASET"),
            None,
            "Calibration text: .txt, .jsonl, .parquet, a data set on the hub (NAME or "
            "NAME:SUBSET), or bundled. Default: wikitext2, or the bundled text if the hub is "
            "unavailable.",
        ),
        Setting("samples", whole(1), 128, "Number of calibration samples."),
        Setting(
            "seq_len",
            whole(2),
            None,
            "Tokens per sample. Default: 2048, less for short texts and contexts.",
        ),
        Setting("seed", whole(0), 0, "Random seed of the samples."),
        variables=(),
    ),
    *panel(
        "Layers",
        (QUANTIZE,),
        Setting(
            "include",
            words("PATTERN"),
            None,
            "Quantize only layers that match, as '*.down_proj'; may be repeated.",
        ),
        Setting(
            "exclude", words("PATTERN"), None, "Do not quantize layers that match; may be repeated."
        ),
        variables=(),
    ),
    *panel(
        "Execution",
        (QUANTIZE,),
        Setting(
            "evaluate",
            SWITCH,
            False,
            "Compare with the original afterwards: perplexity, KL divergence, top-1 agreement.",
        ),
        Setting("resume", SWITCH, False, "Resume an interrupted run."),
        Setting(
            "device",
            one_of("DEVICE", "cpu", "cuda"),
            None,
            "Device to compute on: cpu or cuda. Default: cuda if available.",
        ),
        Setting(
            "backend",
            one_of("BACKEND", "builtin", "gptqmodel"),
            "builtin",
            "Implementation of the algorithms: builtin or gptqmodel.",
        ),
        variables=(),
    ),
)

COMPLETION_SETTINGS = panel(
    "Completion",
    (COMPLETION,),
    Setting(
        "shell",
        one_of("SHELL", "bash", "zsh", "fish", "powershell"),
        None,
        "Shell to print the script for.",
        argument=True,
        required=True,
    ),
    variables=(),
)
