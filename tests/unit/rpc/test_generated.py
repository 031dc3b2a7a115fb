"""The generated code in the tree is that of the protos in the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ("rpc/engine", "tgi_grpc/generate_v2", "tgi_grpc/generate_v3")


def _code(path: Path) -> str:
    """A generated file without what differs between releases of its generator."""
    text = re.sub(r"(?m)^\s*#.*$", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"GRPC_GENERATED_VERSION = .*", "", text)
    text = re.sub(r"ValidateProtobufRuntimeVersion\([^)]*\)", "", text)
    text = text.replace("(object):", ":")
    text = re.sub(r"_Optional\[bool\]", "bool", text)
    return "".join(text.split())


@pytest.mark.parametrize("name", PROTOS)
def test_generated_code_is_up_to_date(name: str, tmp_path: Path) -> None:
    proto = f"tgi_cli/{name}.proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            str(ROOT / proto),
        ]
    )
    assert status == 0
    for written in (f"{name}_pb2.py", f"{name}_pb2.pyi"):
        here = ROOT / "tgi_cli" / written
        assert _code(here) == _code(tmp_path / "tgi_cli" / written), (
            f"{written} is not what {proto} gives: see tgi_cli/rpc/__init__.py"
        )


def test_the_wire_needs_no_torch() -> None:
    code = (
        "import sys, tgi_cli.rpc.client, tgi_cli.model_server.grpc_server;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
