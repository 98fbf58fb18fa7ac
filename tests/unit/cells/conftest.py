"""What all tests of the cells share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("cells", deadline=None, database=None, max_examples=60)
settings.load_profile("cells")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Threads waiting for each other on busy cores make small tensors many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
