"""Has another library read quantized checkpoints, and keeps what it says of a text.

Run by ``tests.tools.round_trip`` with the interpreter of that library's environment, which need
not have this package (``-P``: names beside this file are not to be imported there):

    PYTHON -P round_trip_readers.py LIBRARY '{"ids": [...], "models": [...], "out": "FOLDER"}'

Of the n-th checkpoint FOLDER/n.safetensors has ``logits`` (float32 [length, vocab], or log
probabilities) and perhaps ``tokens`` that follow; FOLDER/n.json why it was refused, if it was. A
file with both has what the library says with its reference in the place of a kernel.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEW_TOKENS = 16


def gptqmodel(model: str, ids: list[int], *, reference: bool) -> dict[str, Any]:
    """Its own choice of kernels, or its product in plain torch."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.TORCH if reference else BACKEND.AUTO
    loaded = GPTQModel.load(model, device="cpu", dtype=torch.bfloat16, backend=backend)
    with torch.no_grad():
        return {"logits": loaded.model(torch.tensor([ids])).logits[0].float()}


def transformers(model: str, ids: list[int], *, reference: bool) -> dict[str, Any]:
    """GPTQ and AWQ through gptqmodel, which it wants optimum for."""
    import torch
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {}
    if reference:
        from transformers import GPTQConfig

        stored = json.loads((Path(model) / "config.json").read_text())["quantization_config"]
        if stored["quant_method"] != "gptq":
            raise ValueError("no kernels to choose from")
        given["quantization_config"] = GPTQConfig(bits=stored["bits"], backend="torch")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **given)
    with torch.no_grad():
        return {"logits": loaded(torch.tensor([ids])).logits[0].float()}


def vllm(model: str, ids: list[int], *, reference: bool) -> dict[str, Any]:
    """Its log probabilities of the text, and what follows when the likeliest is taken.

    Its CPU backend has kernels for integers of 4 bits, int8 and fp8 with a scale per output;
    ``reference`` has its layers load the weights and multiply with what they hold.
    """
    # One process: what is wrong is then raised here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    if reference:
        _vllm_without_kernels()
    try:
        engine = LLM(
            model,
            dtype="bfloat16",  # of its CPU kernels
            enforce_eager=True,
            max_model_len=len(ids) + NEW_TOKENS,
            max_logprobs=-1,
        )
        sampling = SamplingParams(
            temperature=0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            prompt_logprobs=-1,
            flat_logprobs=True,
            detokenize=False,
        )
        said = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
        flat = said.prompt_logprobs  # of each token but the first, the likeliest first
        rows = torch.empty(len(ids) - 1, max(flat.token_ids) + 1)
        starts, ends = flat.start_indices[1:], flat.end_indices[1:]
        for row, start, end in zip(rows, starts, ends, strict=True):
            row[flat.token_ids[start:end]] = torch.tensor(flat.logprobs[start:end])
        return {
            "logits": rows,
            "tokens": torch.tensor(list(said.outputs[0].token_ids)),
        }
    finally:
        engine = None
        gc.collect()
        cleanup_dist_env_and_memory()


def _vllm_without_kernels() -> None:
    import torch
    from torch.nn.functional import linear
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.kernels.linear.mixed_precision import MPLinearKernel
    from vllm.model_executor.layers.quantization import auto_gptq
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        unpack_quantized_values_into_int32,
    )
    from vllm.platforms import PlatformEnum

    class Reference(MPLinearKernel):  # type: ignore[misc]
        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return not config.zero_points, "zeros"

        def process_weights_after_loading(self, layer: Any) -> None:
            words, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
            kind = self.config.weight_type
            codes = unpack_quantized_values_into_int32(words.data, kind, words.packed_dim)
            codes = codes.T if words.input_dim == 0 else codes
            scale = scales.data.T if scales.output_dim == 1 else scales.data
            scale = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            layer.dense = ((codes - kind.bias) * scale.float()).to(torch.bfloat16)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return linear(x, layer.dense, bias)

    def rounded(weight: Any, scale: Any) -> tuple[Any, Any]:
        kept = torch.finfo(torch.float8_e4m3fn)
        return (weight / scale).clamp(kept.min, kept.max).to(torch.float8_e4m3fn), scale

    # Weights that are put together, such as queries, keys and values, are rounded to one scale.
    _custom_ops.scaled_fp8_quant = rounded
    kernels._POSSIBLE_KERNELS[PlatformEnum.CPU] = [Reference]
    auto_gptq.verify_marlin_supported = lambda **_: None


READERS: dict[str, Callable[..., dict[str, Any]]] = {
    "gptqmodel": gptqmodel,
    "transformers": transformers,
    "vllm": vllm,
}


def _reason(error: BaseException) -> str:
    """On one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:600]}"


def main() -> None:
    library, asked = sys.argv[1], json.loads(sys.argv[2])
    read, out = READERS[library], Path(asked["out"])
    refused = set[int]()
    for reference in (False, True):
        for index, model in enumerate(asked["models"]):
            if reference and index not in refused:
                continue
            try:
                said = read(model, asked["ids"], reference=reference)
            # Whatever a library raises is how it refuses; the first time is the one told of.
            except Exception as error:
                traceback.print_exc()
                if not reference:
                    refused.add(index)
                    (out / f"{index}.json").write_text(json.dumps(_reason(error)))
                continue
            from safetensors.torch import save_file

            save_file(
                {name: tensor.contiguous() for name, tensor in said.items()},
                out / f"{index}.safetensors",
            )


if __name__ == "__main__":
    main()
