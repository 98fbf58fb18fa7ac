"""Whose memory is whose, and who killed."""

from pathlib import Path

import pytest

from sm120.build.compile.memory import Group, Kill, Sample, groups, judge, oom_kills


def sample(pid: int, parent: int, name: str, rss: int = 0) -> Sample:
    return Sample(pid=pid, parent=parent, name=name, rss=rss)


def test_processes_are_counted_by_the_step_they_belong_to() -> None:
    tree = [
        sample(10, 1, "python"),
        sample(11, 10, "cmake"),
        sample(12, 11, "ninja", 5),
        sample(20, 12, "sh", 1),
        sample(21, 20, "ccache", 2),
        sample(22, 21, "nvcc", 3),
        sample(23, 22, "sh", 1),
        sample(24, 23, "cicc", 2000),
        sample(30, 12, "sh", 1),
        sample(31, 30, "c++", 2),
        sample(32, 31, "cc1plus", 300),
    ]
    assert groups(tree) == (
        Group(leader=20, rss=2007, device=True),
        Group(leader=30, rss=303, device=False),
    )


def test_two_threads_of_one_nvcc_are_one_group() -> None:
    tree = [
        sample(12, 1, "ninja"),
        sample(20, 12, "nvcc", 1),
        sample(21, 20, "cicc", 100),
        sample(22, 20, "ptxas", 200),
    ]
    assert groups(tree) == (Group(leader=20, rss=301, device=True),)


def test_a_child_that_is_not_yet_another_program_is_no_group() -> None:
    assert groups([sample(12, 1, "ninja"), sample(20, 12, "ninja", 7)]) == ()


def test_a_ninja_below_ninja_has_groups_of_its_own() -> None:
    tree = [
        sample(12, 1, "ninja"),
        sample(20, 12, "sh", 1),
        sample(21, 20, "ninja", 2),
        sample(30, 21, "sh", 4),
        sample(31, 30, "ptxas", 8),
    ]
    assert groups(tree) == (Group(leader=20, rss=3, device=False), Group(leader=30, rss=12, device=True))


def test_no_ninja_no_group_and_a_ring_ends() -> None:
    assert groups([sample(1, 2, "sh"), sample(2, 1, "sh")]) == ()


MOUNTS = "25 20 0:22 {root} {point} rw - {kind} {kind} rw{options}\n"


def machine(root: Path, *, version: int | None, group: str = "/a/b", vmstat: int | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    if version == 2:
        (root / "proc/self/cgroup").write_text(f"0::{group}\n")
        (root / "proc/self/mountinfo").write_text(
            MOUNTS.format(root="/", point="/sys/fs/cgroup", kind="cgroup2", options="")
        )
    elif version == 1:
        (root / "proc/self/cgroup").write_text(f"4:memory:{group}\n0::/\n")
        (root / "proc/self/mountinfo").write_text(
            MOUNTS.format(root="/", point="/sys/fs/cgroup/memory", kind="cgroup", options=",memory")
        )
    if vmstat is not None:
        (root / "proc/vmstat").write_text(f"nr_free_pages 1\noom_kill {vmstat}\n")
    return root


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_counts_at_the_own_group(tmp_path: Path) -> None:
    root = machine(tmp_path, version=2, vmstat=99)
    put(root / "sys/fs/cgroup/a/memory.events", "oom 9\noom_kill 9\n")
    put(root / "sys/fs/cgroup/a/b/memory.events", "low 0\nhigh 7\nmax 8\noom 4\noom_kill 3\noom_group_kill 1\n")
    assert oom_kills(root) == 3


def test_version_2_takes_the_next_level_that_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, version=2)
    put(root / "sys/fs/cgroup/a/memory.events", "oom 9\noom_kill 9\n")
    assert oom_kills(root) == 9


def test_version_1_counts_in_its_oom_control(tmp_path: Path) -> None:
    root = machine(tmp_path, version=1)
    put(root / "sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(root) == 2


def test_an_old_kernel_does_not_count_in_the_group_and_the_machine_does(tmp_path: Path) -> None:
    root = machine(tmp_path, version=1, vmstat=5)
    put(root / "sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    assert oom_kills(root) == 5


@pytest.mark.parametrize("version", [None, 1, 2])
def test_nobody_counts(tmp_path: Path, version: int | None) -> None:
    assert oom_kills(machine(tmp_path, version=version)) is None


@pytest.mark.parametrize(
    ("killed", "before", "after", "kill"),
    [
        (True, 3, 4, Kill.MEMORY),
        (True, 0, 0, Kill.SOMEBODY),
        (True, None, None, Kill.PERHAPS),
        (True, 3, None, Kill.PERHAPS),
        (False, 3, 4, Kill.NONE),  # another process of the group was killed; this build failed for its own reason
        (False, None, None, Kill.NONE),
    ],
)
def test_who_killed(killed: bool, before: int | None, after: int | None, kill: Kill) -> None:
    assert judge(killed=killed, before=before, after=after) is kill
