"""DISABLE_CUSTOM_KERNELS: torch's operations compute, whatever was compiled."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
from tgi_cli.attention import KVSpec, attention_name, create_attention
from tgi_cli.kernels import native, wanted
from tgi_cli.layers import ops
attention = create_attention(None, [KVSpec(2, 64)], 16, torch.bfloat16, torch.device("cpu"))
print(wanted(), native() is None, ops.triton_kernels() is None, attention_name(attention))
"""


def test_nothing_of_ours_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"DISABLE_CUSTOM_KERNELS": "True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["False", "True", "True", "cpu"]
