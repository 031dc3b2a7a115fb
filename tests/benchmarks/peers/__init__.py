"""Serving speed on a CPU, side by side with other engines, in one run.

    python -m tests.benchmarks.peers WORK --peer vllm=VENV --peer openvino=VENV \\
        --peer llama.cpp=BUILD --peer transformers=VENV --output results.json

WORK keeps checkpoints of random weights and their conversions. Each round starts one contestant
after the other, in another order than the round before, sends it every column's waves and ends
it; nothing else is measured meanwhile. A wave is C streaming requests at once: prompts of random
tokens that share no beginning and are the same for every contestant, greedy, the end token
ignored; an answer that is short of tokens is a failure. A failure costs its figures, not the run.

Servers are asked over HTTP by a client on the same cores; what has no server runs in a process
of its own without any cost of HTTP, as its row says. What other programs took of the cores is
measured with each figure; a figure above ``--foreign`` is measured again, the quietest one
counts, and it is marked with a star if that is still above. Never is one chosen by its speed.

``--long`` measures prompts of 128 to 8192 tokens instead: what they take, and the tokens that
follow. ``--quantized`` takes weights of 4 and 8 bits instead of bf16. Ours are others with
``--tgi NAME=CHECKPOINT[: FLAGS]``, such as ``--tgi "int8={checkpoint}: --quantize int8"``.
"""
