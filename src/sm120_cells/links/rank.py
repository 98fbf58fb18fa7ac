"""One rank: a process that holds one GPU of a collective, or both GPUs of a pair."""

import importlib.metadata
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final

import torch

from sm120_cells.links import peer, reduce
from sm120_cells.links.link import open_link
from sm120_cells.links.tell import Tell

_NCCL_PACKAGES: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def run(request: Mapping[str, Any], rank: int, descriptor: int) -> int:
    """Does what is asked and leaves at once: the teardown of CUDA and NCCL is nothing that a verdict rests on."""
    tell = Tell(rank, descriptor)
    try:
        made, wrong = _do(request, rank, tell)
        tell.say("done", checks=made, wrong=wrong)
        code = 0
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this rank's result
        traceback.print_exc()
        tell.say("failed", kind="memory" if _is_memory(error) else "error", message=f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _do(request: Mapping[str, Any], rank: int, tell: Tell) -> tuple[int, int]:
    task, link = request["task"], open_link(str(request["device"]))
    if task == "look":
        tell.ready()
        tell.say("machine", **_machine())
        return 1, 0
    if task == "peer":
        return peer.check(link, request, tell)
    if task == "reduce":
        return reduce.check(link, rank, request, tell)
    raise ValueError(f"unknown task {task!r}")


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _machine() -> dict[str, Any]:
    """What torch sees: its own version and CUDA, NCCL, and the GPUs with the memory (bytes) that is free."""
    usable = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable else None,
        "package": _nccl_package(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if usable else [],
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {"uuid": f"GPU-{properties.uuid}", "name": properties.name, "free": free, "total": total}


def _nccl_package() -> str | None:
    for name in _NCCL_PACKAGES:
        try:
            return f"{name}=={importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
