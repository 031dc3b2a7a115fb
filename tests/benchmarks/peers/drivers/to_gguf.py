"""llama.cpp's own converter, for our checkpoints: SOURCE, then what the converter takes.

It knows tokenizers by what they make of a certain text, and ours are none of those. How text is
cut into words does not matter to prompts that are token ids.
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
