"""What a verdict is valid for: machine, stack, cells, patches and model. Any change of any of it makes a gate stale."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from sm120 import __version__
from sm120.errors import UsageError
from sm120.matrix.plan import MalformedReply

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible card."""

    uuid: str | None
    name: str
    capability: str | None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All fields are compared for equality; see `differences`."""

    device: str
    gpus: tuple[Gpu, ...]
    driver: str | None
    environment: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str | None], ...]
    libraries: tuple[tuple[str, str], ...]
    stack: str
    """Hash over everything that is installed in the stack."""
    patches: str | None
    toolkit: str
    cells: str
    model: str
    """The MODEL of one rank (shapes and TP) as canonical JSON."""

    def to_json(self) -> dict[str, Any]:
        """The form in the gate's file."""
        data = asdict(self)
        for name in ("environment", "versions", "libraries"):
            data[name] = dict(data[name])
        data["model"] = json.loads(self.model)
        return data

    @classmethod
    def from_json(cls, data: Json) -> Self:
        """Inverse of `to_json`; MalformedReply names the field."""
        gpus = data.get("gpus")
        if not isinstance(gpus, list) or not isinstance(data.get("model"), Mapping):
            raise MalformedReply("fingerprint: gpus must be a list and model an object")
        return cls(
            device=_text(data, "device"),
            gpus=tuple(_gpu(gpu) for gpu in gpus),
            driver=_optional_text(data, "driver"),
            environment=_texts(data, "environment"),
            versions=tuple(
                sorted((name, _optional_text(_map(data, "versions"), name)) for name in _map(data, "versions"))
            ),
            libraries=_texts(data, "libraries"),
            stack=_text(data, "stack"),
            patches=_optional_text(data, "patches"),
            toolkit=_text(data, "toolkit"),
            cells=_text(data, "cells"),
            model=canonical(data["model"]),
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not what it was."""

    field: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.field} was {self.old}, is {self.new}"


def take(hello: Json, model: Json, *, stack: str, patches: str | None) -> Fingerprint:
    """From a worker's hello. MalformedReply when it does not say what the protocol asks for."""
    device = _map(hello, "device")
    devices = hello.get("devices") or [device]
    if not isinstance(devices, list):
        raise MalformedReply("hello.devices must be a list")
    kind = _text(device, "type")
    cards = [_gpu(card) for card in devices] if kind != "cpu" else []
    return Fingerprint(
        device=kind,
        gpus=tuple(sorted(cards, key=lambda gpu: (gpu.uuid or "", gpu.name))),
        driver=_optional_text(device, "driver"),
        environment=_texts(hello, "environment"),
        versions=tuple(
            sorted((name, _optional_text(_map(hello, "versions"), name)) for name in _map(hello, "versions"))
        ),
        libraries=_texts(hello, "libraries"),
        stack=stack,
        patches=patches,
        toolkit=__version__,
        cells=_text(hello, "cells_sha256"),
        model=canonical(model),
    )


def differences(old: Fingerprint, new: Fingerprint) -> tuple[Difference, ...]:
    """Every field that differs, down to the single version, library or variable."""
    found: list[Difference] = []
    for field in fields(Fingerprint):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        if field.name in ("environment", "versions", "libraries"):
            found += _by_key(field.name, dict(before), dict(after))
        elif field.name == "model":
            found += _by_key("model", json.loads(before), json.loads(after))
        elif field.name == "gpus":
            found += _gpus(before, after)
        else:
            found.append(Difference(field.name, _show(before), _show(after)))
    return tuple(found) or (() if old == new else (Difference("order", "as recorded", "another"),))


def patches_hash(folder: Path) -> str | None:
    """SHA-256 over names and contents of the patch series; None where there is none. UsageError when unreadable."""
    if not folder.is_dir():
        return None
    total = hashlib.sha256()
    try:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            content = path.read_bytes()
            total.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            total.update(content)
    except OSError as error:
        raise UsageError(
            f"cannot read the patch series {folder}: {error.strerror or error}", where=str(folder)
        ) from error
    return total.hexdigest()


def canonical(value: object) -> str:
    """JSON with one spelling for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: object) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _gpus(before: tuple[Gpu, ...], after: tuple[Gpu, ...]) -> list[Difference]:
    old_capability = [gpu.capability or "unknown" for gpu in before]
    new_capability = [gpu.capability or "unknown" for gpu in after]
    if sorted(old_capability) != sorted(new_capability):
        return [Difference("compute capability", _show(", ".join(old_capability)), _show(", ".join(new_capability)))]
    return [Difference("gpus", _cards(before), _cards(after))]


def _cards(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(f"{gpu.name} {gpu.uuid or 'without UUID'}" for gpu in gpus) or "none"


def _by_key(name: str, before: Json, after: Json) -> list[Difference]:
    keys = sorted({*before, *after})
    return [
        Difference(f"{name}.{key}", _show(before.get(key, "absent")), _show(after.get(key, "absent")))
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]


def _show(value: object) -> str:
    text = value if isinstance(value, str) else canonical(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _gpu(raw: object) -> Gpu:
    if not isinstance(raw, Mapping):
        raise MalformedReply(f"a device must be an object, not {raw!r:.80}")
    capability = raw.get("capability")
    if isinstance(capability, list) and len(capability) == 2:
        capability = ".".join(str(part) for part in capability)
    if capability is not None and not isinstance(capability, str):
        raise MalformedReply(f"device.capability must be [major, minor], not {capability!r:.80}")
    return Gpu(_optional_text(raw, "uuid"), _text(raw, "name"), capability)


def _map(data: Json, key: str) -> Json:
    value = data.get(key)
    if not isinstance(value, Mapping):
        raise MalformedReply(f"{key} must be an object, not {value!r:.80}")
    return value


def _text(data: Json, key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise MalformedReply(f"{key} must be a text, not {value!r:.80}")
    return value


def _optional_text(data: Json, key: str) -> str | None:
    return None if data.get(key) is None else _text(data, key)


def _texts(data: Json, key: str) -> tuple[tuple[str, str], ...]:
    found = _map(data, key)
    if not all(isinstance(value, str) for value in found.values()):
        raise MalformedReply(f"{key} must hold texts only")
    return tuple(sorted((name, str(value)) for name, value in found.items()))
