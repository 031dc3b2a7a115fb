"""Nearly every test here imports more of transformers, and then loads models."""

from __future__ import annotations

import pytest

from tests.conftest import freeze_heap


@pytest.fixture(autouse=True)
def _heap_frozen_for_test() -> None:
    freeze_heap()
