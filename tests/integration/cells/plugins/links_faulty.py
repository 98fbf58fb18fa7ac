"""Links that lie, hang or die, for ``doctor --links``: named by LINKS_FAULT, loaded through SM120_LINKS."""

import contextlib
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sm120_cells.links.link import Copy, Link


class Faulty(Link):
    def __init__(self, kind: str, fault: str) -> None:
        super().__init__(kind)
        self.fault = fault
        self.calls = 0
        self.rank = -1

    def copy(self, copies: Sequence[Copy], how: str, *, times: int = 1) -> None:
        match self.fault:
            case "zeros":
                for target, _ in copies:
                    target.zero_()
            case "stale":
                pass
            case "copy-hangs":
                time.sleep(3600)
            case "copy-dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
            case _:
                super().copy(copies, how, times=times)

    def join(self, rank: int, world: int, store: Any) -> None:
        self.rank = rank
        if self.fault == "never-joins" and rank == 1:
            time.sleep(3600)
        if self.fault == "stubborn":
            for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(sign, signal.SIG_IGN)
        super().join(rank, world, store)

    def all_reduce(self, tensor: Tensor) -> None:
        self.calls += 1
        match self.fault:
            case "hangs-with-peer-access" if os.environ.get("NCCL_P2P_DISABLE") != "1":
                time.sleep(3600)
            case "needs-sockets" if os.environ.get("NCCL_SHM_DISABLE") != "1":
                raise RuntimeError("NCCL error: unhandled system error: shm_open failed")
            case "stubborn":
                Path(tempfile.gettempdir(), f"stubborn-{self.rank}").touch()
                time.sleep(3600)
            case "one-hangs" if self.rank == 1:  # the other waits for it, on a GPU in a kernel
                time.sleep(3600)
            case "dies" if self.rank == 1:
                sys.stderr.write("ncclDevKernel_AllReduce: misaligned address\n")
                os.kill(os.getpid(), signal.SIGSEGV)
            case "garbles" if self.rank == 1:
                for descriptor in range(3, 64):
                    with contextlib.suppress(OSError):
                        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # the way to the supervisor is one
                            os.write(descriptor, b"\x00\xff{]\n")
                super().all_reduce(tensor)
            case "noisy":
                sys.stdout.write("x" * 200_000 + '\n{"links": 2}\n{"event": "done"}\n')
                sys.stdout.flush()
                super().all_reduce(tensor)
            case "off-by-one":
                super().all_reduce(tensor)
                if self.rank == 1 and self.calls == 3:
                    tensor[7] += 1
            case _:
                super().all_reduce(tensor)


def wrap(link: Link) -> Link:
    return Faulty(link.kind, os.environ["LINKS_FAULT"])
