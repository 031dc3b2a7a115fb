"""Which models of transformers can be run, and why the others cannot.

``python -m tests.tools.survey [CLASS ...]`` makes a miniature of each causal language model class,
with random weights, and compares logits: of texts together in one batch, in chunks, with
transformers' for each alone. ``--text-parts`` does so for the classes that take images and text,
which are given text alone. It prints a line per class, and the counts:

    runs      the logits are the same
    refused   with the reason
    unmade    no miniature could be made, or transformers cannot run it
    WRONG     it runs, and computes something else: a mistake here

All of them take some minutes; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.parity.families import TOLERANCE
from tests.tools.paged_run import PagedRun, load
from tests.tools.survey_sizes import candidates
from tests.tools.survey_wrappers import OF_WRAPPERS, WIDTHS
from tgi_cli.errors import TgiError
from tgi_cli.models import model_facts, read_config
from tgi_cli.models.base import CausalLM
from tgi_cli.models.hf.towers import towers_without_libraries
from tgi_cli.models.registry import has_encoder

SECONDS = 120
"""Of the processor, for one class."""

_NEVER = -1e30
"""Logits of tokens that a model never answers with are below."""

_OTHER_SENSES = dict.fromkeys(
    ("num_hidden_layers", "num_layers", "n_layers", "depth", "encoder_layers", "layers"), 1
) | {
    "hidden_size": 32,
    "embed_dim": 32,
    "width": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_heads": 2,
    "attention_heads": 2,
    "image_size": 56,
}
"""Sizes of towers for images and sound, as far as a configuration has them; layers come first."""


class Late(Exception):
    pass


def survey(name: str, folder: Path) -> tuple[str, str]:
    """What became of the class ``name``, and why."""
    kind = getattr(transformers, name)
    why = refused = ""
    for config in configurations(kind):
        try:
            if isinstance(config, Exception):
                raise config
            config.architectures = [name]
            config.save_pretrained(folder)
            _refuse_early(folder)
            if has_encoder(read_config(folder)):
                return "refused", "it has an encoder: tests.tools.seq2seq compares it"
            wanted = _reference(kind, config, folder)
            break
        except TgiError as error:
            if "its code fails" not in str(error):
                return "refused", str(error)
            refused = refused or str(error)  # with other sizes it may not
        except Late:
            raise
        except Exception as error:  # whatever the class has against the sizes
            why = why or f"{type(error).__name__}: {error}"
    else:
        by_name = refused or _refused_by_name(kind, folder)
        return ("refused", by_name) if by_name else ("unmade", why)
    try:
        model = load(folder)
    except TgiError as error:
        return "refused", str(error)
    got = _ours(model)
    worst = max((got[name] - wanted[name]).abs().max().item() for name in wanted)
    logits = torch.cat(list(wanted.values()))
    spread = logits[logits > _NEVER].std().item()
    windows = sorted({spec.window for spec in model.kv_specs}, key=str)
    tolerance = TOLERANCE * (2 if model.state_specs else 1) * max(1.0, spread)
    fine = worst < tolerance or _is_as_exact(kind, folder, wanted, got)
    native = "" if type(model).__name__.startswith("Transformers") else "; defined here"
    states = f"; states in {len(model.state_specs)} layers" if model.state_specs else ""
    return (
        "runs" if fine else "WRONG",
        f"{worst:.1e} of logits that vary by {spread:.2f}; windows {windows}{states}{native}",
    )


def configurations(kind: Any) -> Iterator[Any]:
    """Configurations to be tried, or the errors of making them."""
    whole = kind.config_class
    parts = whole.sub_configs
    text = next((key for key in ("text_config", "llm_config") if key in parts), None)
    if text is None:
        for values in candidates(whole.__name__):
            yield _made(whole, values | OF_WRAPPERS.get(whole.__name__, {}))
        return
    default = _made(whole, {})
    if isinstance(default, Exception) and whole.sub_configs[text] is AutoConfig:
        yield default
        return
    inner = _class_of(whole, default, text)
    for values in candidates(inner.__name__):
        for sizes in (_OTHER_SENSES, dict(list(_OTHER_SENSES.items())[:6]), {}):
            made = _made(inner, values)
            if isinstance(made, Exception):
                yield made
                break
            _fit_sections(made)
            default = _made(whole, {})
            more = OF_WRAPPERS.get(whole.__name__, {})
            others = {} if isinstance(default, Exception) else _small(default, text, sizes)
            for part in others.values():
                _fit_widths(part, getattr(made, "hidden_size", 64))
            for name, value in more.items():
                key, _, attribute = name.partition(".")
                if attribute and key in others:
                    setattr(others[key], attribute, value)
            own = {name: value for name, value in more.items() if "." not in name}
            yield _made(whole, others | own | {text: made})


def _made(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except Exception as error:
        return error


def _fit_sections(config: Any) -> None:
    """Share out the angles of a small head to the dimensions of positions (M-RoPE)."""
    rope = getattr(config, "rope_parameters", None)
    layered = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
    if rope and not layered and "mrope_section" in type(config).ignore_keys_at_rope_validation:
        heads = getattr(config, "head_dim", None) or 16
        angles = int(heads * rope.get("partial_rotary_factor", 1.0)) // 2
        third = round(angles / 3)
        rope["mrope_section"] = [third, third, angles - 2 * third]


def _class_of(whole: Any, default: Any, key: str) -> Any:
    """The class of a part's configuration."""
    kind = whole.sub_configs[key]
    return kind if kind is not AutoConfig else type(getattr(default, key))


def _small(config: Any, text: str, sizes: dict[str, int]) -> dict[str, Any]:
    """The other parts of a configuration, with these sizes."""
    parts = {}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if key != text and part is not None:
            _shrink(part, sizes)
            parts[key] = part
    return parts


def _shrink(part: Any, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if isinstance(getattr(part, name, None), int):
            setattr(part, name, size)
    if isinstance(getattr(part, "layer_types", None), list):
        part.layer_types = part.layer_types[: part.num_hidden_layers]
    for key in part.sub_configs:
        inner = getattr(part, key, None)
        if inner is not None:
            _shrink(inner, sizes)


def _fit_widths(part: Any, width: int) -> None:
    for name in WIDTHS:
        if isinstance(getattr(part, name, None), int):
            setattr(part, name, width)


def _refused_by_name(kind: Any, folder: Path) -> str | None:
    """Why a class is refused whose configuration is not looked at."""
    raw = {"architectures": [kind.__name__], "model_type": kind.config_class.model_type}
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        model_facts(read_config(folder))
    except TgiError as error:
        return None if "its code fails" in str(error) else str(error)
    return None


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
    return _run(
        kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    )


def _is_as_exact(
    kind: Any, folder: Path, theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]
) -> bool:
    """Whether ours are as near to transformers' logits in float64 as those in float32 are.

    Layers that amplify rounding differences make any two orders of sums differ.
    """
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    exact = _run(kind.from_pretrained(folder, dtype=torch.float64, **plain).eval())

    def error(logits: dict[str, torch.Tensor]) -> float:
        return max((logits[name] - exact[name]).abs().max().item() for name in exact)

    return error(ours) < 5 * error(theirs)


def _run(model: Any) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {
            name: model(input_ids=torch.tensor([ids])).logits[0] for name, ids in _texts().items()
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


def classes_of(text_parts: bool) -> list[str]:
    mapping = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if text_parts
        else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    names = {value if isinstance(value, str) else value[0] for value in mapping.values()}
    return sorted(names)


def alarm(*_: object) -> None:
    raise Late


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.survey", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="default: all of them")
    parser.add_argument(
        "--text-parts", action="store_true", help="the classes that take images and text"
    )
    options = parser.parse_args()
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    signal.signal(signal.SIGPROF, alarm)
    counts: Counter[str] = Counter()
    for name in options.classes or classes_of(options.text_parts):
        getattr(transformers, name)  # its module is imported now
        with tempfile.TemporaryDirectory() as folder, towers_without_libraries():
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                outcome, why = survey(name, Path(folder))
            except Late:
                outcome, why = "unmade", f"it takes more than {SECONDS} s of the processor"
            except Exception as error:  # one class more or less shall not end the survey
                outcome, why = "WRONG", f"{type(error).__name__}: {error}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        counts[outcome] += 1
        print(f"{outcome:8} {name:40} {' '.join(why.split())[:240]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
