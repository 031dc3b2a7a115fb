"""Quantization by the library gptqmodel (``--backend gptqmodel``) instead of our own arithmetic.

https://github.com/ModelCloud/GPTQModel; tested with 7.6.
"""

from __future__ import annotations

import fnmatch
import os
import time
from importlib.util import find_spec
from typing import Any

import torch

from tgi_cli.errors import ConfigError
from tgi_cli.quantize.calibration import heldout_windows, load_calibration
from tgi_cli.quantize.evaluation import WINDOW, evaluate
from tgi_cli.quantize.pipeline import QuantizeJob, QuantizeResult


def quantize(job: QuantizeJob) -> QuantizeResult:
    """Run a job with gptqmodel: GPTQ only, in its own formats.

    Raises:
        ConfigError: gptqmodel is not installed, or does not support an option.
    """
    began = time.monotonic()
    if find_spec("gptqmodel") is None:
        raise ConfigError(
            "gptqmodel is not installed",
            "pip install gptqmodel (it needs an environment of its own), or --backend builtin",
        )
    recipe, options = job.recipe, job.options
    unsupported = {
        "--method": recipe.method != "gptq",
        "--format": recipe.format not in ("gptq", "gptq_v2"),
        "--include": options.include,
        "--resume": options.resume,
    }
    for flag, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"--backend gptqmodel does not support {flag}", "use --backend builtin"
            )
    if job.out.exists() and any(job.out.iterdir()):
        raise ConfigError(f"{job.out} exists and is not an empty folder", "name another one")
    samples = load_calibration(job.model, options, context=1 << 20)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer it fails on small machines
    from gptqmodel import GPTQModel, QuantizeConfig

    settings: dict[str, Any] = {
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "sym": recipe.sym,
        "desc_act": recipe.desc_act,
        "static_groups": recipe.static_groups,
        "act_group_aware": recipe.group_aware and not recipe.desc_act,
        "damp_percent": recipe.percdamp,
        "mse": 2.4 if recipe.mse else 0.0,
        "format": recipe.format,
    }
    if options.exclude:
        settings["dynamic"] = {f"-:{fnmatch.translate(each)}": {} for each in options.exclude}
    if options.device is not None:
        settings["device"] = options.device
    model = GPTQModel.load(
        str(job.model),
        QuantizeConfig(**settings),
        trust_remote_code=options.trust_remote_code,
    )
    rows = [
        {"input_ids": ids[None], "attention_mask": ids.new_ones(1, len(ids))} for ids in samples.ids
    ]
    model.quantize(rows, batch_size=1)
    model.save(str(job.out))
    evaluation = None
    if options.evaluate:
        ids = heldout_windows(job.model, WINDOW, options.trust_remote_code)
        evaluation = evaluate(job.model, job.out, ids, torch.device("cpu"))
    size = sum(file.stat().st_size for file in job.out.glob("*.safetensors"))
    return QuantizeResult(
        job.out, (), (), size, evaluation, time.monotonic() - began, samples.source
    )
