"""What we write is, to the last bit, what the libraries that own the formats have read rightly.

``data/written.json`` says which library did, and has a digest of the tensors that it was given.
A writer that changes is to be read again: see ``tests/tools/reference_libraries.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.tools.reference_libraries import cases, digest

FILE = Path(__file__).with_name("data") / "written.json"


def test_written_tensors_equal_those_that_libraries_read() -> None:
    read = json.loads(FILE.read_text())
    written = {name: digest(tensors) for name, _, tensors, _ in cases()}
    assert written == {name: case["digest"] for name, case in read.items()}
    libraries = {case["library"].partition(" ")[0] for case in read.values()}
    assert libraries == {"gptqmodel", "compressed-tensors"}
