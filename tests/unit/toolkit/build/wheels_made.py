"""Wheels as a build would leave them, by hand."""

import base64
import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATE = (2026, 3, 7, 2, 31, 8)


def record(identity: str = "a" * 64, **more: object) -> dict[str, Any]:
    return {"schema": 1, "identity": identity, "component": "sgl-kernel", **more}


def tag(of: Mapping[str, Any]) -> str:
    return f"sm120.{of['identity'][:10]}"


def write_wheel(
    folder: Path,
    of: Mapping[str, Any],
    content: Mapping[str, str] | None = None,
    *,
    name: str = "sgl-kernel",
    mode: int = 0o644,
    order: int = 1,
    without_record: bool = False,
    says: Mapping[str, str] | None = None,
    lines: Mapping[str, str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> Path:
    """``says``: other METADATA; ``lines``: other digests in RECORD; ``extra``: members that RECORD does not name."""
    folder.mkdir(parents=True, exist_ok=True)
    version = f"0.3.21+{tag(of)}"
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    said = {"Metadata-Version": "2.1", "Name": name, "Version": version, **(says or {})}
    given = {"sgl_kernel/__init__.py": f"__version__ = {version!r}\n"} if content is None else content
    members = {
        **given,
        **({} if without_record else {"sgl_kernel/_build.json": json.dumps(of)}),
        f"{info}/METADATA": "".join(f"{key}: {value}\n" for key, value in said.items()),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    digests = {path: digest(text) for path, text in members.items()} | dict(lines or {})
    listed = "".join(f'"{path}",sha256={value},{len(members[path])}\n' for path, value in digests.items())
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in [*members.items(), *(extra or {}).items()][::order]:
            _write(archive, path, text, mode)
        _write(archive, f"{info}/RECORD", f"{listed}{info}/RECORD,,\n", mode)
    return wheel


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _write(archive: zipfile.ZipFile, path: str, text: str, mode: int) -> None:
    entry = zipfile.ZipInfo(path, DATE)
    entry.external_attr = (0o100000 | mode) << 16
    archive.writestr(entry, text, zipfile.ZIP_DEFLATED)
