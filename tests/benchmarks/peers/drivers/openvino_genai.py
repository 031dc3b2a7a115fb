"""Driver of OpenVINO GenAI's continuous batching, with waves as lines of JSON on stdin.

Arguments: MODEL SEQUENCES CACHED_TOKENS PRECISION
"""

import json
import os
import sys
import time
from typing import Any

responses = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # send output of libraries to stderr
sys.path.pop(0)  # this file has the name of the library

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai  # noqa: E402

BLOCK = 32  # tokens per block of its KV cache on CPUs


def respond(value: Any) -> None:
    print(json.dumps(value), file=responses, flush=True)


def wave(pipeline: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = new
    settings.ignore_eos = True
    settings.do_sample = False
    inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    first, last, counts = [0.0] * len(inputs), [0.0] * len(inputs), [0] * len(inputs)
    start = time.perf_counter()
    handles = [pipeline.add_request(i, tensor, settings) for i, tensor in enumerate(inputs)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - start
        for i, handle in enumerate(handles):
            while handle.can_read():
                (output,) = handle.read().values()
                if not output.generated_ids:
                    continue
                first[i] = first[i] or now
                last[i] = now
                counts[i] += len(output.generated_ids)
    return {"first": first, "last": last, "tokens": counts}


def main() -> None:
    model, sequences, cached_tokens, precision = sys.argv[1:]
    config = openvino_genai.SchedulerConfig()
    config.num_kv_blocks = int(cached_tokens) // BLOCK + 2 * int(sequences) + 8
    config.max_num_seqs = int(sequences)
    config.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": precision}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
    respond({"ready": True})
    for line in sys.stdin:
        try:
            respond(wave(pipeline, **json.loads(line)))
        except RuntimeError as error:
            respond({"error": str(error)})


main()
