"""What pytest itself needs. Shared constants are in tiny.py."""

import os

import pytest
import torch


def pytest_configure(config):
    # All but the tests that are marked cuda say what a CPU does, whatever else the machine has.
    if "cuda" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Tiny models gain nothing from threads, which wait for one another when the machine is busy.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_in_any_order():
    torch.manual_seed(0)
