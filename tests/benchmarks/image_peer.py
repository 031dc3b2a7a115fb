"""transformers' side of :mod:`tests.benchmarks.image_latency`: processor and ``generate``.

Arguments: the checkpoint, the name of its miniature in :mod:`tests.tools.image_models`, and what
its processor is told otherwise, as JSON. A line of JSON on standard input names a photo's file and
a question; one on standard output has the seconds to the first token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.tools.image_models import OracleProcessor


def first_token(model: Any, oracle: OracleProcessor, photo: str, question: str) -> dict[str, Any]:
    """Times of one request, from the photo's file to its first token."""
    begun, cpu = time.perf_counter(), time.process_time()
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = oracle.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    image = Image.open(photo).convert("RGB")
    inputs = oracle.processor(images=[[image]], text=[text], return_tensors="pt")
    inputs = inputs.to(torch.bfloat16)
    processed = time.perf_counter()
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return {
        "seconds": time.perf_counter() - begun,
        "cpu": time.process_time() - cpu,
        "processing": processed - begun,
        "tokens": inputs["input_ids"].shape[1],
    }


def main() -> None:
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error
    folder, kind, changed = sys.argv[1:]
    oracle = OracleProcessor(kind, Path(folder), **json.loads(changed))
    loader: Any = AutoModelForImageTextToText
    model = loader.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), file=responses, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        answer = first_token(model, oracle, **json.loads(line))


if __name__ == "__main__":
    main()
