"""Driver of transformers' ``generate``, with waves as lines of JSON on stdin, each as one batch.

Arguments: MODEL DTYPE
"""

import json
import os
import sys
import time
from typing import Any

responses = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # send output of libraries to stderr

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402


def respond(value: Any) -> None:
    print(json.dumps(value), file=responses, flush=True)


class Clock(BaseStreamer):
    """Records the time of each step; the first call of ``put`` passes the prompts."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def wave(model: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    clock = Clock()
    start = time.perf_counter()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            streamer=clock,
        )
    steps = [moment - start for moment in clock.times[1:]]
    count = len(prompts)
    tokens = [output.shape[1] - ids.shape[1]] * count
    return {"first": [steps[0]] * count, "last": [steps[-1]] * count, "tokens": tokens}


def main() -> None:
    path, dtype = sys.argv[1:]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    respond({"ready": True})
    for line in sys.stdin:
        try:
            respond(wave(model, **json.loads(line)))
        except RuntimeError as error:
            respond({"error": str(error)})


main()
