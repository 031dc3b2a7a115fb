"""Compare serving speed on a CPU with other engines, in one run.

    python -m tests.benchmarks.peers WORK --peer vllm=VENV --peer openvino=VENV \\
        --peer llama.cpp=BUILD --peer transformers=VENV --output results.json

WORK stores checkpoints with random weights and their conversions. Each round starts the contestants
one after the other, in a rotated order, sends each the waves of every column, and stops it. A wave
is C concurrent streaming requests: random prompts without a common prefix that are the same for
every contestant, greedy, ignoring the end token. A response with too few tokens is a failure. A
failure discards only its own figures.

Servers get requests over HTTP from a client on the same cores. Libraries without a server run in a
process of their own without HTTP, as the tables show. The CPU share of other programs ("foreign")
is measured with each figure. If it exceeds ``--foreign``, the figure is measured again, the attempt
with the lowest share counts, and a star marks it if that is still too high. Speed never decides.

Memory is physical: pages that the processes of a contestant share count once (Pss), in the peak
from its start on as well as after the waves. Files with results have resident sizes (RSS), too.

``--long`` measures prompts of 128 to 8192 tokens and the decode speed after them. ``--quantized``
uses weights of 4 and 8 bits instead of bf16: ours with activations of 8 bits, the default, and of
16 where the name says so. ``--gguf`` compares with llama.cpp alone, on the same GGUF files.
``--tgi NAME=CHECKPOINT[: FLAGS]`` replaces our contestants, as in
``--tgi "int8={checkpoint}: --quantize int8"``.
"""
