"""Checkpoints of miniature models as transformers writes them, with random weights.

Needs nothing but torch and transformers: ``python -m tests.benchmarks.gpu check`` makes them where
no more is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.parity.cases import Case

_SHARPER = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "W_pack")
"""Within the names of what makes queries and keys."""

_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Ends of names of buffers that correct the choice of experts."""


def make_checkpoint(case: Case, path: Path, seed: int = 0) -> Path:
    """Write the random model of ``case`` into ``path`` as transformers does, and return it.

    Checkpoints are kept in the folder ``TGI_TEST_CHECKPOINTS``, if that is set, and copied.
    """
    folder = os.environ.get("TGI_TEST_CHECKPOINTS")
    if folder is None:
        _write_checkpoint(case, path, seed)
    else:
        kept = Path(folder) / hashlib.sha256(repr((case, seed)).encode()).hexdigest()[:16]
        if not kept.exists():
            Path(folder).mkdir(exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=folder))
            _write_checkpoint(case, made, seed)
            with suppress(OSError):  # another process has just made it, too
                made.rename(kept)
        shutil.copytree(kept, path, dirs_exist_ok=True)
    torch.manual_seed(seed)
    return path


def _write_checkpoint(case: Case, path: Path, seed: int) -> None:
    config = getattr(transformers, case.config)(**case.values)
    torch.manual_seed(seed)
    kind = model_class(case)
    model = (kind if case.model else kind.from_config)(config).float()
    _randomize(model, case, seed)
    model.save_pretrained(path)
    file = path / "config.json"
    stored = json.loads(file.read_text()) | {"dtype": "float32"} | dict(case.stored)
    file.write_text(json.dumps({k: v for k, v in stored.items() if v is not ...}))


def model_class(case: Case) -> Any:
    """transformers' class of a case."""
    return getattr(transformers, case.model or "AutoModelForCausalLM")


def _randomize(model: torch.nn.Module, case: Case, seed: int) -> None:
    """Weights such that activations keep their size and attention is not uniform.

    The rows of the embedding are short beside what the layers add, so that a tied head does not
    simply repeat the last token; queries and keys are longer than a trained model would start
    with, so that some positions matter more than others. Norms are off what they start at, be
    it one or zero, and biases off zero.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.empty(parameter.shape).normal_(generator=generator)
        if id(parameter) in tables:
            value = noise * case.embedding_std
        elif parameter.ndim == 1:
            sharper = name.endswith(("q_norm.weight", "k_norm.weight"))
            value = parameter + (case.qk_norm - 1.0 if sharper else 0.0) + 0.2 * noise
            if name.endswith("router.scale"):  # else all experts were about as probable
                value *= len(value) ** 0.5
        else:
            transposed = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
            gain = 2.0 if any(part in name for part in _SHARPER) else 1.0
            value = noise * gain / parameter.shape[0 if transposed else -1] ** 0.5
        with torch.no_grad():
            parameter.copy_(value)
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTIONS):
            buffer.normal_(std=0.1, generator=generator)
        if name.endswith("layer_scalar"):
            buffer.add_(0.1 * torch.empty(buffer.shape).normal_(generator=generator))
