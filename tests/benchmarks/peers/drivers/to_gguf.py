"""Runs llama.cpp's converter on our checkpoints: SOURCE, then the converter's arguments.

The converter identifies a tokenizer by its encoding of a test text, and rejects the random ones of
our checkpoints. Pre-tokenization has no effect on prompts of token ids, so GPT-2's is used. Of a
model that was published with layers for multi-token prediction, ours have none. transformers saves
kinds of layers by names of its own, and the converter knows those of the published files.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

source = Path(sys.argv[1])
converter = source / "convert_hf_to_gguf.py"
sys.argv = [str(converter), *sys.argv[2:]]
model_type = json.loads((Path(sys.argv[1]) / "config.json").read_text())["model_type"]
if model_type.startswith(("qwen3_5", "qwen3_next")):
    sys.argv.append("--no-nextn")
sys.path[:1] = [str(source), str(source / "gguf-py")]

from conversion.base import TextModel  # noqa: E402
from conversion.granite import GraniteHybridModel  # noqa: E402


def attention_layers(model: Any) -> list[int]:
    kinds = model.hparams["layer_types"]
    return [index for index, kind in enumerate(kinds) if kind in ("attention", "full_attention")]


GraniteHybridModel.get_attn_layers = attention_layers
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
runpy.run_path(str(converter), run_name="__main__")
