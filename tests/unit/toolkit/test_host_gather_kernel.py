"""What is read from the kernel's files: trees of files stand for machines."""

import getpass
import os
import threading
from pathlib import Path

import pytest

from sm120.host.facts import Gpu
from sm120.host.gather import cgroup, disks, system, within
from sm120.host.gather.cpu import cpu
from sm120.host.gather.memory import memory
from sm120.host.gather.mounts import mounts, under
from sm120.host.gather.text import cuda_version, version2
from sm120.host.gather.variables import variables
from sm120.state import State

GIB = 2**30
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = (
    "31 23 0:29 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
    "32 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    "33 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_a_machine_whose_free_memory_is_page_cache(tmp_path: Path) -> None:
    """GB10: 6 GiB free, 92 GiB can be had (pitfalls A25)."""
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       125829120 kB\nMemFree:         6291456 kB\nMemAvailable:   96468992 kB\n"
            "Cached:         88080384 kB\nSwapTotal:              0 kB\nSwapFree:               0 kB\n"
            "HugePages_Total:       3\nnonsense\n"
        },
    )
    facts = memory(root)
    assert (facts.total, facts.free, facts.available) == (120 * GIB, 6 * GIB, 92 * GIB)
    assert (facts.cached, facts.swap_total, facts.swap_free) == (84 * GIB, 0, 0)
    assert (facts.cgroup_limit, facts.cgroup_used, facts.shm_total, facts.shm_free) == (None, None, None, None)


def test_nothing_is_known_without_the_files(tmp_path: Path) -> None:
    facts = memory(tmp_path)
    assert (facts.total, facts.available, facts.free) == (None, None, None)
    assert mounts(tmp_path) == ()
    assert cgroup.cpus(tmp_path) is None


def test_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts = memory(tmp_path)
    assert facts.shm_total is not None
    assert facts.shm_free is not None
    assert 0 < facts.shm_free <= facts.shm_total


def test_tightest_limit_of_nested_groups(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/memory.max": str(64 * GIB),
            "sys/fs/cgroup/user.slice/memory.current": str(40 * GIB),
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 1\ninactive_file {30 * GIB}\nactive_file 5\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.current": "5",
            "sys/fs/cgroup/user.slice/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "max 100000\n",
        },
    )
    assert cgroup.memory(root) == (64 * GIB, 10 * GIB)
    assert cgroup.cpus(root) == 4


def test_the_inner_group_can_be_the_tighter_one(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/memory.max": str(64 * GIB),
            "sys/fs/cgroup/a/b/memory.max": str(8 * GIB),
            "sys/fs/cgroup/a/b/cpu.max": "50000 100000",
        },
    )
    assert cgroup.memory(root) == (8 * GIB, None)
    assert cgroup.cpus(root) == 1


def test_limit_on_the_mount_itself_is_seen_in_a_namespace(tmp_path: Path) -> None:
    """In a container with a group namespace the path is / and the files lie at the mount."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": str(16 * GIB),
            "sys/fs/cgroup/memory.current": str(GIB),
        },
    )
    assert cgroup.memory(root) == (16 * GIB, GIB)


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/batch/job\n2:cpu,cpuacct:/batch\n0::/\n",
            "proc/self/mountinfo": "\n".join(V1_MOUNTS),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/batch/memory.limit_in_bytes": str(32 * GIB),
            "sys/fs/cgroup/memory/batch/memory.usage_in_bytes": str(9 * GIB),
            "sys/fs/cgroup/memory/batch/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory/batch/job/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup.memory(root) == (32 * GIB, 7 * GIB)
    assert cgroup.cpus(root) == 3


def test_version_1_without_any_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "proc/self/mountinfo": "\n".join(V1_MOUNTS),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        },
    )
    assert cgroup.memory(root) == (None, None)


def test_container_that_sees_only_its_own_part_of_the_groups(tmp_path: Path) -> None:
    """Docker without a group namespace: the path is told from the host's root, the mount shows that folder as /."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
            "proc/self/mountinfo": "33 31 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": str(2 * GIB),
        },
    )
    assert cgroup.memory(root)[0] == 2 * GIB


@pytest.mark.parametrize("path", ["/elsewhere", "/../../etc", "/docker/abc/gone"])
def test_group_that_cannot_be_seen_leaves_the_mount(tmp_path: Path, path: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": "33 31 0:31 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/memory.max": str(4 * GIB),
        },
    )
    assert cgroup.memory(root)[0] == 4 * GIB


def test_processor(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD Ryzen Threadripper PRO 7995WX\n\nmodel name\t: other\n",
            "sys/devices/system/node/node0/meminfo": "",
            "sys/devices/system/node/node1/meminfo": "",
            "sys/devices/system/node/online": "0-1",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "100000 100000",
        },
    )
    facts = cpu(root)
    assert (facts.model, facts.numa_nodes, facts.allowed) == ("AMD Ryzen Threadripper PRO 7995WX", 2, 1)
    assert facts.threads == os.cpu_count()


def test_affinity_counts_without_a_quota(tmp_path: Path) -> None:
    facts = cpu(tmp_path)
    assert facts.allowed == len(os.sched_getaffinity(0))
    assert (facts.model, facts.numa_nodes) == (None, None)


MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/export/home rw,vers=4.2
41 40 0:41 / /home/big\040disk\011x\134y rw - xfs /dev/sdb1 rw
42 22 0:42 / /homework rw - tmpfs tmpfs rw
43 22 0:43 / /over rw - overlay overlay rw,lowerdir=/a
44 22 0:44 / /over rw - zfs pool rw
damaged line
45 22 0:45 / /short rw - ext4
46 22 0:46 / /Größe rw - ext4 x rw
"""


def test_mounts(tmp_path: Path) -> None:
    table = mounts(tree(tmp_path, {"proc/self/mountinfo": MOUNTINFO}))

    def kind(path: str) -> tuple[str, str]:
        mount = under(path, table)
        assert mount is not None
        return mount.point, mount.filesystem

    assert kind("/home/u/.cache") == ("/home", "nfs4")
    assert kind("/home/big disk\tx\\y/z") == ("/home/big disk\tx\\y", "xfs")
    assert kind("/homework/x") == ("/homework", "tmpfs")
    assert kind("/homeless") == ("/", "ext4")
    assert kind("/over/x") == ("/over", "zfs"), "the later mount hides the earlier"
    assert kind("/Größe") == ("/Größe", "ext4")
    assert kind("/") == ("/", "ext4")
    assert "/short" not in {mount.point for mount in table}


def test_disk_of_a_folder_that_is_still_to_be_made(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "root",
        {"proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 a rw\n40 22 0:40 / {tmp_path} rw - nfs4 s:/x rw"},
    )
    wanted = tmp_path / "not/there/yet"
    (disk,) = disks.disks({"triton": wanted}, root)
    assert (disk.purpose, disk.path, disk.mount, disk.filesystem) == ("triton", str(wanted), str(tmp_path), "nfs4")
    assert disk.writable is True
    assert disk.problem is None


def test_space_is_what_a_user_may_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 blocks 500 are free, 400 of them for others than root."""
    answer = os.statvfs_result((1 << 20, 4096, 1000, 500, 400, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: answer)
    (disk,) = disks.disks({"home": tmp_path}, tmp_path)
    assert (disk.total, disk.free) == (1000 * 4096, 400 * 4096)
    facts = memory(tmp_path)
    assert (facts.shm_total, facts.shm_free) == (1000 * 4096, 400 * 4096)


def test_a_link_is_followed_to_the_disk_that_holds_the_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    root = tree(tmp_path / "root", {"proc/self/mountinfo": f"40 22 0:40 / {tmp_path}/real rw - xfs d rw"})
    (disk,) = disks.disks({"home": tmp_path / "link/below"}, root)
    assert disk.mount == f"{tmp_path}/real"
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert disks.nearest(tmp_path / "dangling/x") == tmp_path


def test_a_disk_that_does_not_answer_is_told_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, real = threading.Event(), os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        if path.name == "dead":
            release.wait(60)
        if path.name == "torn":
            raise OSError(5, "Input/output error")
        return real(path)

    for name in ("dead", "torn", "alive"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(disks, "SECONDS", 0.2)
    root = tree(tmp_path / "root", {"proc/self/mountinfo": f"40 22 0:40 / {tmp_path}/dead rw - nfs4 s:/x rw"})
    try:
        dead, torn, alive = disks.disks({name: tmp_path / name for name in ("dead", "torn", "alive")}, root)
    finally:
        release.set()
    assert dead.problem == "no answer within 0.2 s"
    assert (dead.filesystem, dead.free, dead.writable) == ("nfs4", None, None)
    assert torn.problem is not None
    assert "Input/output error" in torn.problem
    assert alive.problem is None
    assert alive.free is not None


STATE = State(root=Path("/s/.sm120"), runs=Path("/s/runs"))


def test_folders_by_default() -> None:
    found = disks.folders({"TMPDIR": "/scratch"}, Path("/home/u"), STATE)
    assert {purpose: str(path) for purpose, path in found.items()} == {
        "state": "/s/.sm120",
        "runs": "/s/runs",
        "wheels": "/s/.sm120/wheels",
        "temporary": "/scratch",
        "home": "/home/u",
        "huggingface": "/home/u/.cache/huggingface/hub",
        "flashinfer": "/home/u/.cache/flashinfer",
        "triton": "/home/u/.triton/cache",
        "torch-extensions": "/home/u/.cache/torch_extensions",
        "inductor": f"/scratch/torchinductor_{getpass.getuser()}",
        "tvm-ffi": "/home/u/.cache/tvm-ffi",
        "sglang": "/home/u/.cache/sglang",
        "sglang-jit": "/home/u/.cache/sglang/jit",
        "cuda": "/home/u/.nv/ComputeCache",
    }


@pytest.mark.parametrize(
    ("variable", "purpose", "expected"),
    [
        ("HF_HOME", "huggingface", "/x/hub"),
        ("HF_HUB_CACHE", "huggingface", "/x"),
        ("XDG_CACHE_HOME", "huggingface", "/x/huggingface/hub"),
        ("FLASHINFER_WORKSPACE_BASE", "flashinfer", "/x/.cache/flashinfer"),
        ("TRITON_HOME", "triton", "/x/.triton/cache"),
        ("TRITON_CACHE_DIR", "triton", "/x"),
        ("TORCH_EXTENSIONS_DIR", "torch-extensions", "/x"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor", "/x"),
        ("TVM_FFI_CACHE_DIR", "tvm-ffi", "/x"),
        ("SGLANG_CACHE_DIR", "sglang-jit", "/x/jit"),
        ("SGLANG_JIT_CACHE_DIR", "sglang-jit", "/x"),
        ("CUDA_CACHE_PATH", "cuda", "/x"),
    ],
)
@pytest.mark.parametrize("home", [Path("/home/u"), None])
def test_folders_by_variable(variable: str, purpose: str, expected: str, home: Path | None) -> None:
    assert str(disks.folders({variable: "/x"}, home, STATE)[purpose]) == expected


def test_without_a_home_nothing_is_invented() -> None:
    assert set(disks.folders({}, None, STATE)) == {"state", "runs", "wheels", "temporary", "inductor"}


def test_host(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
            "proc/cmdline": "BOOT_IMAGE=/vmlinuz intel_iommu=on,sm_on iommu=pt quiet\n",
        },
    )
    host = system.host((), {}, root)
    assert (host.distribution, host.iommu, host.container) == ("Ubuntu 24.04.3 LTS", "pt", None)
    assert host.unified_memory is None
    assert host.kernel == os.uname().release


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("quiet", None),
        ("iommu=pt", "pt"),
        ("intel_iommu=on", "on"),
        ("amd_iommu=off", "off"),
        ("intel_iommu=on iommu=pt", "pt"),
        ("iommu=force", "on"),
        ("iommu.passthrough=1", "pt"),
        ("iommu.passthrough=0", None),
        ("my_iommu=on iommu", None),
    ],
)
def test_iommu(tmp_path: Path, line: str, said: str | None) -> None:
    assert system.host((), {}, tree(tmp_path, {"proc/cmdline": line})).iommu == said


@pytest.mark.parametrize(
    ("files", "env", "said"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {"container": "oci"}, "podman"),
        ({}, {"container": "lxc"}, "lxc"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"proc/1/cgroup": "4:memory:/docker/0123abc\n"}, {}, "docker"),
        ({"proc/1/cgroup": "0::/kubepods/pod1\n"}, {}, "kubernetes"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, None),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], env: dict[str, str], said: str | None) -> None:
    assert system.host((), env, tree(tmp_path, files)).container == said


def card(**changes: object) -> Gpu:
    values: dict[str, object] = {"name": "NVIDIA RTX PRO 6000", "compute_capability": (12, 0), "memory_total": 1}
    return Gpu(index=0, uuid="GPU-0", bus_id="0", **{**values, **changes})  # type: ignore[arg-type] # any field


@pytest.mark.parametrize(
    ("gpu", "shared"),
    [
        (card(), False),
        (card(name="NVIDIA GB10", compute_capability=(12, 1), memory_total=None), True),
        (card(name="NVIDIA GB10", compute_capability=(12, 1)), True),
        (card(name="NVIDIA Thor", compute_capability=(11, 0), memory_total=None), True),
        (card(memory_total=None, mig=True), False),
        (card(memory_total=None, problem="GPU is lost"), None),
        (card(memory_total=None, compute_capability=None), None),
    ],
)
def test_unified_memory(gpu: Gpu, shared: bool | None) -> None:
    assert system.unified([gpu]) is shared


def test_one_card_that_shares_memory_is_enough() -> None:
    assert system.unified([card(), card(name="NVIDIA GB10")]) is True


def test_limits() -> None:
    found = system.limits()
    assert found["nofile"] is None or found["nofile"] > 0
    assert "memlock" in found


def test_variables_that_matter_are_kept_and_secrets_are_not() -> None:
    env = {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_P2P_DISABLE": "1",
        "TORCHINDUCTOR_CACHE_DIR": "/c",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "LD_LIBRARY_PATH": "/l",
        "CXX": "g++-14",
        "HF_TOKEN": "hf_secret",
        "PIP_INDEX_URL": "https://user:word@index.example/simple",
        "UV_PUBLISH_PASSWORD": "word",
        "HOME": "/home/u",
        "MY_CUDA_HOME": "/x",
        "TORCHX_JOB": "1",
        "AWS_SECRET_ACCESS_KEY": "aws",
    }
    assert variables(env) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "CXX": "g++-14",
        "HF_TOKEN": "***",
        "LD_LIBRARY_PATH": "/l",
        "NCCL_P2P_DISABLE": "1",
        "PIP_INDEX_URL": "https://***@index.example/simple",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "TORCHINDUCTOR_CACHE_DIR": "/c",
        "UV_PUBLISH_PASSWORD": "***",
    }


def test_numbers_in_text() -> None:
    assert version2("13.0.88") == (13, 0)
    assert version2("13") == (13, 0)
    assert version2("rubbish") is None
    assert version2(None) is None
    assert (cuda_version(13000), cuda_version(12090), cuda_version(13020)) == ((13, 0), (12, 9), (13, 2))


def test_a_call_that_never_answers_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(within.NoAnswer, match=r"no answer within 0\.1 s"):
        within.one(lambda: release.wait(60), 0.1)
    release.set()


def test_a_call_that_fails_says_so() -> None:
    def fail() -> None:
        raise ValueError("broken")

    done, failed = within.together({"good": lambda: None, "bad": fail}, 60)
    assert done == {"good": None}
    assert failed == {"bad": "ValueError: broken"}
