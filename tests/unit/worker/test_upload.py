from __future__ import annotations

import numpy as np
import pytest
import torch

from tgi_cli.worker.upload import Uploader


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_arrive_as_they_are(packed):
    upload = Uploader(torch.device("cpu"), packed=packed)
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        np.array([], np.int64),
        np.array([True, False, True]),
        np.array([0.5, 1.5], np.float64),
        np.arange(20, dtype=np.float32)[::3],
    ]
    tensors = upload(*arrays)
    assert len(tensors) == len(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape
        assert tensor.numpy().dtype == array.dtype
        assert tensor.tolist() == array.tolist()


def test_packed_arrays_are_copies():
    array = np.zeros(3, np.int64)
    (tensor,) = Uploader(torch.device("cpu"), packed=True)(array)
    array[:] = 1
    assert tensor.tolist() == [0, 0, 0]
