import pytest

from sm120 import config
from sm120.console import Console


@pytest.fixture(autouse=True)
def _nothing_left_by_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "_current", None)
    monkeypatch.setattr(config, "_current", None)
