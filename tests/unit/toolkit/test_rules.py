from pathlib import Path

import pytest

from sm120.dev import rules


def test_toolkit_and_cells_are_apart() -> None:
    assert rules.broken_imports() == []


def test_no_file_names_a_package_host() -> None:
    assert rules.named_hosts() == []


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        pytest.param("sm120", "import torch", "must never import torch", id="toolkit-torch"),
        pytest.param("sm120", "def f():\n    import numpy as np", "must never import numpy", id="toolkit-numpy-inside"),
        pytest.param("sm120", "from sm120_cells import worker", "must never import sm120_cells", id="toolkit-cells"),
        pytest.param("sm120", "import yaml", "may not import yaml", id="toolkit-undeclared"),
        pytest.param(
            "sm120_cells", "from sm120.errors import ToolkitError", "must never import sm120", id="cells-toolkit"
        ),
        pytest.param("sm120_cells", "import sglang", "may not import sglang at import", id="cells-sglang-at-import"),
        pytest.param("sm120_cells", "class A:\n    import triton", "may not import triton at import", id="class-body"),
        pytest.param("sm120_cells", "try:\n    import triton\nexcept ImportError:\n    pass", "triton", id="guarded"),
    ],
)
def test_broken_import_is_found(tmp_path: Path, package: str, source: str, expected: str) -> None:
    for name in ("sm120", "sm120_cells"):
        (tmp_path / "src" / name).mkdir(parents=True)
    (tmp_path / "src" / package / "module.py").write_text(source)
    (found,) = rules.broken_imports(tmp_path)
    assert expected in found
    assert found.startswith(f"src/{package}/module.py:")


@pytest.mark.parametrize(
    ("package", "source"),
    [
        pytest.param("sm120_cells", "import torch\nimport numpy.linalg\nimport json", id="allowed"),
        pytest.param("sm120_cells", "def f():\n    import sglang", id="inside-a-function"),
        pytest.param(
            "sm120_cells", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sglang", id="types-only"
        ),
        pytest.param("sm120", "import rich.console\nfrom sm120 import errors", id="toolkit"),
    ],
)
def test_right_import_is_accepted(tmp_path: Path, package: str, source: str) -> None:
    for name in ("sm120", "sm120_cells"):
        (tmp_path / "src" / name).mkdir(parents=True)
    (tmp_path / "src" / package / "module.py").write_text(source)
    assert rules.broken_imports(tmp_path) == []


@pytest.mark.parametrize("host", ["files.python{}.org", "py{}.org", "registry.npm{}.org", "deb.deb{}.org"])
def test_named_host_is_found(tmp_path: Path, host: str) -> None:
    ending = {"files.python{}.org": "hosted", "py{}.org": "pi", "registry.npm{}.org": "js", "deb.deb{}.org": "ian"}[
        host
    ]
    (tmp_path / "setup.sh").write_text(f"#!/bin/sh\ncurl https://{host.format(ending)}/simple\n")
    (found,) = rules.named_hosts(tmp_path)
    assert found.startswith("setup.sh:2: ")


def test_pytorch_index_and_plain_words_are_no_package_hosts(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("https://download.pytorch.org/whl/cpu serves wheels; Debian and PyPI are words\n")
    assert rules.named_hosts(tmp_path) == []
