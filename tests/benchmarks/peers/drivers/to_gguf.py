"""Runs llama.cpp's converter on our checkpoints: SOURCE, then the converter's arguments.

The converter identifies a tokenizer by its encoding of a test text, and rejects the random ones of
our checkpoints. Pre-tokenization has no effect on prompts of token ids, so GPT-2's is used.
"""

import runpy
import sys
from pathlib import Path

source = Path(sys.argv[1])
converter = source / "convert_hf_to_gguf.py"
sys.argv = [str(converter), *sys.argv[2:]]
sys.path[:1] = [str(source), str(source / "gguf-py")]

from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
runpy.run_path(str(converter), run_name="__main__")
