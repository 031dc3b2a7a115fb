"""DISABLE_CUSTOM_KERNELS: torch's operations compute, whatever was compiled."""

from __future__ import annotations

import os
import subprocess
import sys

from tgi_cli.device import describe
from tgi_cli.kernels import cpp_library, without_cpp_kernels
from tgi_cli.kernels.facts import describe_device

CODE = """
import torch
from tgi_cli.attention import KVSpec, attention_name, create_attention
from tgi_cli.kernels import cpp_library, custom_kernels_enabled
from tgi_cli.kernels.facts import describe_device
from tgi_cli.layers import ops
attention = create_attention(None, [KVSpec(2, 64)], 16, torch.bfloat16, torch.device("cpu"))
custom = custom_kernels_enabled()
library, kernels = cpp_library(), ops.triton_kernels()
facts = describe_device("cpu").kernels
print(custom, library is None, kernels is None, facts, attention_name(attention))
"""


def test_no_custom_kernel_computes_if_the_environment_disables_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"DISABLE_CUSTOM_KERNELS": "True"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["False", "True", "True", "False", "cpu"]


def test_a_device_has_kernels_where_they_are_compiled() -> None:
    assert describe_device("cpu").kernels == (cpp_library() is not None)
    with without_cpp_kernels():
        assert describe_device("cpu") == describe("cpu")
