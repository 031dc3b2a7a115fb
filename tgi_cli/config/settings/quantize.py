"""Settings of ``tgi quantize``, and of ``tgi completion``."""

from __future__ import annotations

from tgi_cli.config.settings.setting import COMPLETION, QUANTIZE, Setting, panel
from tgi_cli.config.settings.values import (
    OPTIONAL_SWITCH,
    RATIO,
    SWITCH,
    ValueKind,
    one_of,
    one_of_numbers,
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


_GROUP_SIZE = ValueKind(int, "N", _parse_group_size)

QUANTIZE_SETTINGS = (
    *panel(
        "Checkpoints",
        (QUANTIZE,),
        variables=(),
        model_id=Setting(
            text("MODEL_ID"),
            "Model id on the hub, or a local folder.",
            argument=True,
            required=True,
        ),
        output_dir=Setting(
            path("OUTPUT_DIR"),
            "Folder to create, or with --format gguf the file.",
            argument=True,
        ),
        inspect=Setting(
            SWITCH,
            "Describe the checkpoint instead of quantizing it.",
            brief="Describe the checkpoint.",
        ),
        upload_to_model_id=Setting(
            text("REPO"), "Upload the result to this repository.", brief="Upload the result."
        ),
    ),
    *panel(
        "Quantization",
        (QUANTIZE,),
        variables=(),
        method=Setting(
            one_of("METHOD", "gptq", "awq", "rtn", "fp8", "int8"),
            "Algorithm: gptq or awq (with calibration), rtn (round to nearest), fp8 or int8. "
            "Default: gptq, with --format gguf rtn.",
            brief="gptq, awq, rtn, fp8 or int8.",
        ),
        bits=Setting(
            one_of_numbers(2, 3, 4, 8),
            "2, 3, 4 or 8. Default: 4, with fp8 and int8 8.",
            brief="2, 3, 4 or 8. Default: 4, with fp8 and int8 8.",
        ),
        groupsize=Setting(
            _GROUP_SIZE,
            "Inputs per scale; -1: one scale per row; fp8 also 0: one scale per weight. Default: "
            "128, with fp8 and int8 -1.",
            alias_of="group_size",
            brief="Inputs per scale. Default: 128.",
        ),
        group_size=Setting(_GROUP_SIZE, "The same as --groupsize.", hidden=True),
        sym=Setting(
            OPTIONAL_SWITCH,
            "Symmetric quantization, or asymmetric with zero points. Default: --sym, with awq "
            "--asym.",
            negative="--asym",
            brief="Symmetric, or with zero points.",
        ),
        act_order=Setting(
            SWITCH,
            "gptq: quantize columns by decreasing activation size; costs a gather when serving.",
            negative=True,
            brief="gptq: order columns by activation.",
        ),
        desc_act=Setting(
            SWITCH, "The same as --act-order.", negative=True, alias_of="act_order", hidden=True
        ),
        static_groups=Setting(SWITCH, "gptq: compute all scales before quantizing columns."),
        group_aware=Setting(
            OPTIONAL_SWITCH,
            "gptq: reorder within and among groups, at no cost when serving. Default: without "
            "--act-order.",
            negative=True,
        ),
        mse=Setting(SWITCH, "Search for the scales with the least squared error."),
        percdamp=Setting(
            RATIO, "gptq: dampening, as a share of the Hessian's mean diagonal.", 0.01
        ),
        format=Setting(
            one_of("FORMAT", "gptq", "gptq_v2", "awq", "compressed-tensors", "gguf"),
            "Checkpoint format: gptq, gptq_v2, awq, compressed-tensors (fp8, int8) or gguf (Q4_0 "
            "or, with --bits 8, Q8_0). Default: the method's, with --asym gptq_v2.",
            brief="Checkpoint format. Default: the method's.",
        ),
    ),
    *panel(
        "Calibration",
        (QUANTIZE,),
        variables=(),
        calibration=Setting(
            text("FILE|DATASET"),
            "Calibration text: .txt, .jsonl, .parquet, a data set on the hub (NAME or "
            "NAME:SUBSET), or bundled. Default: wikitext2, or the bundled text if the hub is "
            "unavailable.",
            brief="Text file or data set. Default: wikitext2.",
        ),
        samples=Setting(
            whole(1), "Number of calibration samples.", 128, brief="Calibration samples."
        ),
        seq_len=Setting(
            whole(2),
            "Tokens per sample. Default: 2048, less for short texts and contexts.",
            brief="Tokens per sample. Default: 2048.",
        ),
        seed=Setting(whole(0), "Random seed of the samples.", 0),
    ),
    *panel(
        "Layers",
        (QUANTIZE,),
        variables=(),
        include=Setting(
            words("PATTERN"), "Quantize only layers that match, as '*.down_proj'; may be repeated."
        ),
        exclude=Setting(
            words("PATTERN"),
            "Do not quantize layers that match; may be repeated.",
            brief="Do not quantize layers that match.",
        ),
    ),
    *panel(
        "Execution",
        (QUANTIZE,),
        variables=(),
        evaluate=Setting(
            SWITCH,
            "Compare with the original afterwards: perplexity, KL divergence, top-1 agreement.",
            brief="Compare with the original afterwards.",
        ),
        resume=Setting(SWITCH, "Resume an interrupted run.", brief="Resume an interrupted run."),
        device=Setting(
            one_of("DEVICE", "cpu", "cuda"),
            "Device to compute on: cpu or cuda. Default: cuda if available.",
            brief="cpu or cuda.",
        ),
        backend=Setting(
            one_of("BACKEND", "builtin", "gptqmodel"),
            "Implementation of the algorithms: builtin or gptqmodel.",
            "builtin",
        ),
    ),
)

COMPLETION_SETTINGS = panel(
    "Completion",
    (COMPLETION,),
    variables=(),
    shell=Setting(
        one_of("SHELL", "bash", "zsh", "fish", "powershell"),
        "Shell to print the script for.",
        argument=True,
        required=True,
    ),
)
