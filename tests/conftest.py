"""What pytest itself needs. Shared constants are in tiny.py."""

import pytest
import torch


def pytest_configure():
    # Tiny models gain nothing from threads, which wait for one another when the machine is busy.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_in_any_order():
    torch.manual_seed(0)
