"""Which causal language models of transformers can be run, and why the others cannot.

``python -m tests.tools.transformers_survey [CLASS ...]`` makes a miniature of each class, with
random weights, and compares logits: of texts together in one batch, in chunks, with
transformers' for each alone. It prints a line per class, and the counts:

    runs      the logits are the same
    refused   with the reason
    unmade    no miniature could be made, or transformers cannot run it
    WRONG     it runs, and computes something else: a mistake here

All of them take some minutes; nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.parity.families import TOLERANCE
from tests.tools.paged_run import PagedRun, load
from tgi_cli.errors import TgiError
from tgi_cli.models import model_facts, read_config
from tgi_cli.models.base import CausalLM

SECONDS = 60
"""For one class."""

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
OVERRIDES: tuple[dict[str, Any], ...] = (
    {"num_key_value_heads": 2, "head_dim": 16},
    {"num_key_value_heads": 2},
    {},
    {"sliding_window": None, "num_key_value_heads": 2, "head_dim": 16},
    MLA,
    {"d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    {"rotary_dim": 8, "n_embd": 64, "n_head": 4, "n_layer": 4},
    {"attention_types": [[["global", "local"], 2]]},
    {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": ...},
    {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
)
"""Tried in this order: not every configuration takes every size."""


class _Late(Exception):
    pass


def survey(name: str, folder: Path) -> tuple[str, str]:
    """What became of the class ``name``, and why."""
    kind = getattr(transformers, name)
    why = refused = ""
    for values in OVERRIDES:
        try:
            sizes = {key: size for key, size in (SIZES | values).items() if size is not ...}
            config = kind.config_class(**sizes)
            config.architectures = [name]
            config.save_pretrained(folder)
            _refuse_early(folder)
            wanted = _reference(kind, config, folder)
            break
        except TgiError as error:
            if "its code fails" not in str(error):
                return "refused", str(error)
            refused = refused or str(error)  # with other sizes it may not
        except _Late:
            raise
        except Exception as error:  # whatever the class has against the sizes
            why = why or f"{type(error).__name__}: {error}"
    else:
        return ("refused", refused) if refused else ("unmade", why)
    try:
        model = load(folder)
    except TgiError as error:
        return "refused", str(error)
    got = _ours(model)
    worst = max((got[name] - wanted[name]).abs().max().item() for name in wanted)
    spread = torch.cat(list(wanted.values())).std().item()
    windows = sorted({spec.window for spec in model.kv_specs}, key=str)
    fine = worst < TOLERANCE * max(1.0, spread)
    native = "" if type(model).__name__.startswith("Transformers") else "; defined here"
    return (
        "runs" if fine else "WRONG",
        f"{worst:.1e} of logits that vary by {spread:.2f}; windows {windows}{native}",
    )


def _refuse_early(folder: Path) -> None:
    """What needs no weights to be refused is not given any."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}))
    model_facts(read_config(folder))


def _texts() -> dict[str, list[int]]:
    choose = random.Random(0)
    return {name: choose.choices(range(5, 250), k=n) for name, n in (("a", 70), ("b", 33))}


def _reference(kind: Any, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write a random checkpoint, and compute what transformers makes of it."""
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    loaded = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return {
            name: loaded(torch.tensor([ids])).logits[0].float() for name, ids in _texts().items()
        }


def _ours(model: CausalLM) -> dict[str, torch.Tensor]:
    run, choose = PagedRun(model, torch.float32, None), random.Random(1)
    rest = _texts()
    got: dict[str, list[torch.Tensor]] = {name: [] for name in rest}
    while any(rest.values()):
        step = {}
        for name, ids in rest.items():
            if ids:
                size = choose.choice((1, 1, 7, 16, 24))
                step[name], rest[name] = ids[:size], ids[size:]
        for name, logits in run.step(step).items():
            got[name].append(logits)
    return {name: torch.cat(pieces) for name, pieces in got.items()}


def _alarm(*_: object) -> None:
    raise _Late


def main() -> None:
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    signal.signal(signal.SIGALRM, _alarm)
    values = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    every = sorted({value if isinstance(value, str) else value[0] for value in values})
    counts: Counter[str] = Counter()
    for name in sys.argv[1:] or every:
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(SECONDS)
            try:
                outcome, why = survey(name, Path(folder))
            except _Late:
                outcome, why = "unmade", f"it takes more than {SECONDS} s"
            except Exception as error:  # one class more or less shall not end the survey
                outcome, why = "WRONG", f"{type(error).__name__}: {error}"
            finally:
                signal.alarm(0)
        counts[outcome] += 1
        print(f"{outcome:8} {name:40} {' '.join(why.split())[:240]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
