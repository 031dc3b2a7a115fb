"""The library gptqmodel in place of our own arithmetic (``--backend gptqmodel``).

https://github.com/ModelCloud/GPTQModel; tried with 7.6.
"""

from __future__ import annotations

import logging
import os
import time
from importlib.util import find_spec
from typing import Any

from tgi_cli.errors import ConfigError
from tgi_cli.quantize.calibration import heldout_windows, load_calibration
from tgi_cli.quantize.evaluation import WINDOW, evaluate
from tgi_cli.quantize.pipeline import QuantizeJob, QuantizeResult

log = logging.getLogger(__name__)


def quantize(job: QuantizeJob) -> QuantizeResult:
    """Do a job with gptqmodel: GPTQ alone, in its own formats.

    Raises:
        ConfigError: it is not installed, or cannot do what is asked.
    """
    began = time.monotonic()
    if find_spec("gptqmodel") is None:
        raise ConfigError(
            "gptqmodel is not installed",
            "pip install gptqmodel (it wants an environment of its own), or --backend builtin",
        )
    recipe = job.recipe
    refused = {
        "--method": recipe.method != "gptq" and recipe.method,
        "--format": recipe.format not in ("gptq", "gptq_v2") and recipe.format,
        "--include": job.options.include,
        "--resume": job.options.resume,
    }
    for flag, value in refused.items():
        if value:
            raise ConfigError(f"gptqmodel does not do {flag} here", "--backend builtin does")
    if job.out.exists() and any(job.out.iterdir()):
        raise ConfigError(f"{job.out} exists and is not an empty folder", "name another one")
    samples = load_calibration(
        job.model,
        job.options.calibration,
        samples=job.options.samples,
        seq_len=job.options.seq_len,
        seed=job.options.seed,
        context=1 << 20,
        trust_remote_code=job.options.trust_remote_code,
    )
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # fewer make it fail on small machines
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
    if job.options.exclude:
        import fnmatch

        settings["dynamic"] = {f"-:{fnmatch.translate(each)}": {} for each in job.options.exclude}
    if job.options.device is not None:
        settings["device"] = job.options.device
    model = GPTQModel.load(
        str(job.model),
        QuantizeConfig(**settings),
        trust_remote_code=job.options.trust_remote_code,
    )
    rows = [
        {"input_ids": ids[None], "attention_mask": ids.new_ones(1, len(ids))} for ids in samples.ids
    ]
    model.quantize(rows, batch_size=1)
    model.save(str(job.out))
    evaluation = None
    if job.options.evaluate:
        import torch

        ids = heldout_windows(job.model, WINDOW, job.options.trust_remote_code)
        evaluation = evaluate(job.model, job.out, ids, torch.device("cpu"))
    size = sum(file.stat().st_size for file in job.out.glob("*.safetensors"))
    return QuantizeResult(
        job.out, (), (), size, evaluation, time.monotonic() - began, samples.source
    )
