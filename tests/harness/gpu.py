"""Where tests with the mark `gpu` run: on a CUDA device, and on the stand-in where there is none.

There tensors lie in memory of the CPU, as in `tests/fake_cuda/on_device.py`, and the device does all work at once. So
what these tests say of programs, streams and recordings is up to date before there is a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda.on_device import stand_in_here
from tests.harness.optimizers import shared_captures

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# What the stand-in cannot run, by the name of the test, and why.
ONLY_ON_A_GPU = {
    "test_a_replayed_step_is_one_launch": "CUPTI counts launches; test_what_a_steady_step_calls counts on the stand-in",
    "test_a_sharded_model_on_nccl": "it needs NCCL",
    "test_a_recording_that_fails_leaves_the_device_as_it_was": "it is about torch's allocator and random generator",
    "test_other_values_are_no_reason_to_compile_again": "it is about compiled kernels",
    "test_the_tuner_refuses_no_candidate": "it is about compiled kernels",
}


@contextlib.contextmanager
def device(test: str) -> Iterator[None]:
    """Inside this context there is a device. A test that cannot run here is skipped."""
    if CUDA is (os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("kernels are compiled by pytest -m gpu where there is a CUDA device, and interpreted elsewhere")
    if CUDA:
        yield
        return
    if test in ONLY_ON_A_GPU:
        pytest.skip(ONLY_ON_A_GPU[test])
    with shared_captures(), stand_in_here():
        yield
