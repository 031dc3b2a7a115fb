"""The length check that the router, TGI's services, the Python API and the engine share."""

from __future__ import annotations

import pytest

from tests.unit.model_server.fakes import INFO
from tgi_cli.engine.validation import LengthError, LengthFault, validate_length


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (20, 12), (1, 31)])
def test_a_request_within_the_limits_is_valid(prompt: int, new: int) -> None:
    validate_length(prompt, new, INFO)


@pytest.mark.parametrize(
    ("prompt", "new", "fault"),
    [
        (0, 0, LengthFault.EMPTY_PROMPT),
        (20, 13, LengthFault.TOTAL_TOO_LONG),
        (40, 1, LengthFault.TOTAL_TOO_LONG),
        (21, 1, LengthFault.PROMPT_TOO_LONG),
        (20, 0, LengthFault.NO_NEW_TOKENS),
    ],
)
def test_the_first_fault_in_tgis_order_is_reported(
    prompt: int, new: int, fault: LengthFault
) -> None:
    with pytest.raises(LengthError) as caught:
        validate_length(prompt, new, INFO)
    assert caught.value.fault is fault
