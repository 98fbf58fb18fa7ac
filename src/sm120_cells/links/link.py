"""What moves data between GPUs, and nothing else: the one place where a test can make a link wrong."""

import contextlib
import importlib.util
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

PLUGIN_VARIABLE: Final = "SM120_LINKS"
"""Names a Python file whose ``wrap(link)`` returns the link to use instead: how tests inject faults."""

ENGINE, KERNEL, STAGED = "engine", "kernel", "staged"
_QUEUE_CYCLES: Final = 20_000_000  # of the GPU's clock: about 8 ms
Copy = tuple[Tensor, Tensor]  # destination, source: uint8, contiguous, of the same length


class Link:
    """Devices of one kind; on ``cpu`` all of them are the host's memory, and the collectives are gloo's."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index) if self.kind == "cuda" else torch.device("cpu")

    def direct(self, source: int, target: int) -> bool:
        """Whether a GPU can reach the other's memory; if not, the driver takes every copy through the host."""
        return self.kind == "cpu" or torch.cuda.can_device_access_peer(source, target)

    def copy(self, copies: Sequence[Copy], how: str, *, times: int = 1) -> None:
        """Makes the copies at the same time, and waits for all.

        ``engine``: by the copy engines, as torch copies what is contiguous. ``kernel``: by stores of the source's
        multiprocessors into the other's memory, which is how NCCL moves data too; torch does so with what is not
        contiguous, where peers can reach each other (ATen/native/cuda/Copy.cu). ``staged``: through the host.
        """
        self.synchronize(*copies)
        if how == STAGED:
            self._staged(copies)
            return
        lanes = [self._lane(copy) for copy in copies]
        for _ in range(times):
            for lane, (target, source) in zip(lanes, copies, strict=True):
                with contextlib.ExitStack() as stack:
                    for stream in lane:
                        stack.enter_context(torch.cuda.stream(stream))
                    if how == ENGINE:
                        target.copy_(source, non_blocking=True)
                    else:
                        _interleaved(target, source)
        self.synchronize(*copies)

    def _lane(self, copy: Copy) -> "list[torch.cuda.Stream]":
        """Streams of this copy alone on both devices: torch makes the streams of both wait for a copy between them."""
        return [torch.cuda.Stream(tensor.device) for tensor in copy] if self.kind == "cuda" else []

    def _staged(self, copies: Sequence[Copy]) -> None:
        pinned = self.kind == "cuda"
        held = [torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned) for _, source in copies]
        for host, (_, source) in zip(held, copies, strict=True):
            host.copy_(source, non_blocking=True)
        self.synchronize(*copies)
        for host, (target, _) in zip(held, copies, strict=True):
            target.copy_(host, non_blocking=True)
        self.synchronize(*copies)

    def synchronize(self, *copies: Copy) -> None:
        """Waits for the devices of the copies; without any, for the current one."""
        if self.kind == "cuda":
            devices = {tensor.device for copy in copies for tensor in copy}
            for device in devices or {torch.device("cuda", torch.cuda.current_device())}:
                torch.cuda.synchronize(device)

    def join(self, rank: int, world: int, store: Any) -> None:
        """Makes the process group of all ranks, who meet at ``store``, one of torch's."""
        if self.kind == "cuda":
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=self.device(rank))
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over all ranks, in place; on CUDA it may return before it is done."""
        dist.all_reduce(tensor)

    def time_all_reduce(self, tensor: Tensor, calls: int) -> list[float]:
        """Seconds of each of ``calls`` all-reduces, back to back."""
        if self.kind == "cpu":
            marks = [time.perf_counter()]
            for _ in range(calls):
                self.all_reduce(tensor)
                marks.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(marks)]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        # The device idles until all calls are queued: small messages take less time than Python needs to ask for one.
        torch.cuda._sleep(_QUEUE_CYCLES)  # noqa: SLF001  # no public call does this, and torch's own tests rely on it
        self.all_reduce(tensor)  # takes up by how much the ranks differ
        events[0].record()
        for event in events[1:]:
            self.all_reduce(tensor)
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _interleaved(target: Tensor, source: Tensor) -> None:
    """Copies even and odd elements apart, so that neither is contiguous. The widest element keeps stores wide."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        offsets = (target.storage_offset(), source.storage_offset())
        if source.numel() % dtype.itemsize == 0 and not any(offset % dtype.itemsize for offset in offsets):
            target, source = target.view(dtype), source.view(dtype)
            break
    for part in (0, 1):
        target[part::2].copy_(source[part::2], non_blocking=True)


def open_link(kind: str) -> Link:
    """The link, as the plug-in of ``SM120_LINKS`` wraps it where there is one."""
    link = Link(kind)
    path = os.environ.get(PLUGIN_VARIABLE)
    if not path:
        return link
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{PLUGIN_VARIABLE}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrapped: Link = module.wrap(link)
    return wrapped
