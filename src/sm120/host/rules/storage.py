"""The folders that the toolkit, the stack and its JIT caches write to."""

import shlex
from collections.abc import Iterator

from sm120.host.facts import Disk, Facts
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import GIB, cuda_environments, gib, listed, sm12x

_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "ceph", "glusterfs", "gpfs", "afs", "orangefs"),
    *("wekafs", "panfs", "davfs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone"),
    *("fuse.gcsfuse", "fuse.juicefs"),
}
_CACHES = ("flashinfer", "triton", "torch-extensions", "inductor", "tvm-ffi", "sglang", "sglang-jit", "cuda")
_OWN = ("state", "runs", "wheels")
# Rough sizes for a first look; setup checks with the real ones of its lock.
_STACK = 20 * GIB  # a CUDA stack, with its downloads
_CPU_STACK = 3 * GIB
_JIT = 5 * GIB  # what compiled kernels and a run's records take beside a finished environment
_VARIABLE = {"state": "SM120_HOME", "temporary": "TMPDIR"}
_TEMPORARY = 2 * GIB  # one large wheel or a few compiler jobs


def cache_on_network(facts: Facts) -> Iterator[Finding]:
    """JIT caches that several machines share load each other's half-written binaries (a two-machine recipe's fix)."""
    shared = [d for d in facts.disks if d.filesystem in _NETWORK and d.purpose in (*_CACHES, "state")]
    state = any(disk.purpose == "state" for disk in shared)
    if shared:
        yield Finding(
            id="cache-on-network",
            severity=Severity.WARN if state else Severity.NOTE,
            what=f"On a network file system lie the folders for {listed((_place(disk) for disk in shared), 8)}.",
            read=tuple(f"{disk.filesystem} on {disk.mount}: mount table, for {disk.path}" for disk in shared[:8]),
            why="Kernels that one machine is still writing, or wrote for another card, are loaded by the next one: "
            "errors at start that seem to have nothing to do with it."
            + ("" if state else " This toolkit's tasks keep their caches in the state folder."),
            cure="export SM120_HOME=FOLDER, with a folder on a disk of this machine" if state else _activate(facts),
        )


def _place(disk: Disk) -> str:
    return f"{disk.purpose} ({disk.path}, {disk.filesystem})"


def _activate(facts: Facts) -> str:
    """The activation script moves the caches into the state folder."""
    state = next((disk.path for disk in facts.disks if disk.purpose == "state"), None)
    if state is None or not facts.environments:
        return "source the activation script that setup writes"
    return f". {shlex.quote(f'{state}/activate/{facts.environments[0].stack}.sh')}"


def folder_silent(facts: Facts) -> Iterator[Finding]:
    """A folder whose file system does not answer, as when a file server is gone."""
    for disk in facts.disks:
        if disk.problem:
            own = disk.purpose in (*_OWN, "temporary")
            yield Finding(
                id="folder-silent",
                severity=Severity.REFUSE if own else Severity.WARN,
                what=f"The {disk.purpose} folder {disk.path} cannot be looked at: {disk.problem}.",
                read=(f"{disk.problem}: {disk.path} on {disk.mount or 'an unknown mount'}",),
                why="A program that reads or writes there waits, and often cannot even be ended.",
                cure=f"bring {disk.mount or 'its file system'} back, or name another folder"
                + (f": export {_VARIABLE[disk.purpose]}=FOLDER" if disk.purpose in _VARIABLE else ""),
            )


def folder_not_writable(facts: Facts) -> Iterator[Finding]:
    """Folders that have to be written to."""
    for purposes, severity in (((*_OWN, "temporary"), Severity.REFUSE), (_CACHES, Severity.NOTE)):
        closed = [disk for disk in facts.disks if disk.writable is False and disk.purpose in purposes]
        if closed:
            yield Finding(
                id="folder-not-writable",
                severity=severity,
                what=f"Not writable: {listed((f'{disk.purpose} ({disk.path})' for disk in closed), 8)}.",
                read=tuple(f"no write access: {disk.path} on {disk.mount}" for disk in closed[:8]),
                why="Nothing can be installed or recorded."
                if severity is Severity.REFUSE
                else "Programs that are started by hand cannot keep the kernels that they compile, or do not start. "
                "This toolkit's tasks keep their caches in the state folder.",
                cure="export TMPDIR=FOLDER, with a folder that you may write to"
                if closed[0].purpose == "temporary"
                else "export SM120_HOME=FOLDER, with a folder that you may write to"
                if severity is Severity.REFUSE
                else _activate(facts),
            )


def disk_space(facts: Facts) -> Iterator[Finding]:
    """Room for a stack, or for what it compiles and records once it is there."""
    if cuda_environments(facts):
        needed, purpose = _JIT, "compiled kernels and records"
    elif sm12x(facts):
        needed, purpose = _STACK, "a CUDA stack with its downloads"
    else:
        needed, purpose = (_JIT if facts.environments else _CPU_STACK), "the CPU stack and records"
    wanted = {"state": (needed, purpose), "temporary": (_TEMPORARY, "a large wheel or a compiler")}
    for disk in facts.disks:
        if disk.purpose not in wanted or disk.free is None:
            continue
        needed, purpose = wanted[disk.purpose]
        if disk.free < needed:
            yield Finding(
                id="disk-space",
                severity=Severity.WARN,
                what=f"The {disk.purpose} folder has {gib(disk.free)} free; {purpose} can take {gib(needed)}.",
                read=(f"{gib(disk.free)} free: {disk.path} on {disk.mount}",),
                why="An installation or a build that runs out of space has to be started again.",
                cure=f"free some space, or name another folder: export {_VARIABLE[disk.purpose]}=FOLDER",
            )
