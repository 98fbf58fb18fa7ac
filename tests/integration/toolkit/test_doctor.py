"""The doctor on the machine that runs the tests, whatever that is: what it says is held against other witnesses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sm120 import config, entry
from sm120.console import Console
from sm120.host.command import Options, doctor
from sm120.host.facts import Facts
from sm120.host.gather import gather, gpu_capabilities
from sm120.host.rules import judge
from sm120.stack import load_stack
from sm120.stack.install.environment import look
from sm120.state import State

PROGRAM = """
import sys
from pathlib import Path
from sm120 import entry
from sm120.host.command import Options, doctor
words = dict(word.split("=", 1) for word in sys.argv[1:])
options = Options(**{name: Path(value) for name, value in words.items()})
def body():
    doctor(options)
    return 0
sys.exit(entry.guarded(body, {"json": True}))
"""


def program(*words: str, **env: str) -> "tuple[int, dict[str, Any], str]":
    """The doctor in a process of its own with this environment and no other: exit code, JSON, stderr."""
    environment = {"PYTHONPATH": str(config.CHECKOUT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SM120_HOME", str(tmp_path / "sm120"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def facts_here() -> Facts:
    return gather(State.resolve(), Console.create())


def test_picture_agrees_with_other_witnesses(home: Path) -> None:
    facts = facts_here()
    assert facts.unread == ()
    assert facts.memory.total == psutil.virtual_memory().total
    assert facts.cpu.threads == psutil.cpu_count()
    assert facts.cpu.allowed is not None
    assert 1 <= facts.cpu.allowed <= len(os.sched_getaffinity(0))
    assert facts.host.kernel == os.uname().release
    compiler = next(tool for tool in facts.tools if tool.name == "gcc")
    asked = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    assert compiler.version == asked
    disk = next(disk for disk in facts.disks if disk.purpose == "triton")
    assert disk.path == str(home / "home/.triton/cache")
    asked = subprocess.run(["stat", "-f", "-c", "%b %S", str(home)], capture_output=True, text=True, check=True).stdout
    blocks, block = (int(word) for word in asked.split())
    assert disk.total == blocks * block
    assert disk.writable is True
    asked = subprocess.run(
        ["df", "--output=target,fstype", str(home)], capture_output=True, text=True, check=True
    ).stdout
    assert asked.splitlines()[1].split() == [disk.mount, disk.filesystem]


def test_cards_agree_with_nvml_and_the_bus(home: Path) -> None:
    facts = facts_here()
    capabilities = tuple(gpu.compute_capability for gpu in facts.gpus if gpu.compute_capability is not None)
    assert gpu_capabilities() == capabilities
    if facts.gpus:
        assert facts.driver.error is None
        assert facts.driver.version is not None
    else:
        assert facts.driver.error is not None or facts.driver.version is not None
    assert len(facts.pairs) == len(facts.gpus) * (len(facts.gpus) - 1) // 2


def test_no_false_alarm_on_a_machine_without_a_card(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_here()
    if facts.gpus or facts.driver.pci_devices:
        pytest.skip("this machine has a card, so rules may rightly speak")
    alarms = [f"{finding.id}: {finding.what}" for finding in judge(facts) if finding.severity != "note"]
    assert alarms == []

    def body() -> int:
        doctor(Options())
        return 0

    assert entry.guarded(body, {}) == 0
    out = capsys.readouterr().out
    assert "cards: none" in out
    assert "0 refuse, 0 warn" in out.splitlines()[-1]


def test_the_stack_that_runs_the_cells_is_read() -> None:
    environment, why = look(load_stack("cpu"), State.resolve())  # looks only: doctor's tests install nothing
    if environment is None:
        pytest.skip(f"the stack cpu is not installed here: {why}")
    facts = facts_here()
    found = next(item for item in facts.environments if item.stack == "cpu")
    assert found.python == str(environment.python)
    assert found.problem is None
    program = "import platform, torch; print(platform.python_version(), torch.__version__)"
    asked = subprocess.run([environment.python, "-I", "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.torch is not None
    assert f"{found.python_version} {found.torch.version}" == asked.strip()
    assert (found.torch.cuda, found.torch.arch_list, found.torch.problem) == (None, (), None)
    assert {d.name: d.version for d in found.distributions} == dict(found.locked)
    assert found.clashes == ()
    assert [library for library in found.libraries if library.problem or library.undefined_torch] == []
    alarms = [f.id for f in judge(facts) if f.severity == "refuse" and not facts.gpus]
    assert alarms == []


def test_saved_facts_are_judged_the_same_elsewhere(tmp_path: Path) -> None:
    saved = tmp_path / "facts.json"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SM120_HOME": str(tmp_path / "a")}
    code, here, _ = program(f"save={saved}", **env, HF_TOKEN="hf_abcdefghijklmnopqrst")
    assert here["facts"]["variables"]["HF_TOKEN"] == "***"
    assert "hf_abcdefghijklmnopqrst" not in saved.read_text()
    assert json.loads(saved.read_text()) == here["facts"]
    again, there, _ = program(f"facts={saved}", PATH="", SM120_HOME=str(tmp_path / "b"))
    assert (again, there) == (code, here)


def test_without_path_home_or_anything(tmp_path: Path) -> None:
    code, document, _ = program(PATH="", SM120_HOME=str(tmp_path))
    assert code in {0, 10}
    assert document["facts"]["unread"] == []
    assert {t["name"] for t in document["facts"]["tools"] if t["path"]} <= {"cmake", "ninja", "uv"}


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Below /proc not even root can make a folder."""
    code, document, err = program(PATH=os.environ["PATH"], HOME="/proc/nobody", SM120_HOME="/proc/sm120")
    assert code in {0, 10}
    assert "no record is kept of this: cannot write" in err
    assert document["facts"]["unread"] == []
    state = next(disk for disk in document["facts"]["disks"] if disk["purpose"] == "state")
    assert (state["path"], state["filesystem"], state["mount"]) == ("/proc/sm120/.sm120", "proc", "/proc")
    code, document, err = program(f"save={tmp_path}/f.json", PATH="", HOME="/proc/nobody", SM120_HOME="/proc/sm120")
    assert code in {0, 10}
    assert json.loads((tmp_path / "f.json").read_text()) == document["facts"]
    code, document, err = program("save=/proc/f.json", PATH="", HOME="/proc/nobody", SM120_HOME="/proc/sm120")
    assert code == 10
    assert document["error"]["message"].startswith("--save: cannot write /proc/f.json")


def test_a_read_only_disk_is_told(tmp_path: Path) -> None:
    code, document, _ = program(PATH=os.environ["PATH"], HOME="/proc/nobody", SM120_HOME=str(tmp_path))
    home = next(disk for disk in document["facts"]["disks"] if disk["purpose"] == "home")
    assert home["filesystem"] == "proc"
    assert code in {0, 10}


def test_doctor_changes_nothing_but_its_record(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "SM120_HOME": str(tmp_path / "state")}
    program(**env)
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    (record,) = (tmp_path / "state/runs").iterdir()
    folder = f"state/runs/{record.name}"
    assert made == {"state/.sm120/state.json", *(f"{folder}/{n}.json" for n in ("facts", "findings", "manifest"))}


def test_the_task_itself(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "invoke", "--search-root", str(config.CHECKOUT), "doctor", "--json"]
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("INVOKE_")}, "SM120_HOME": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == (10 if document["refuse"] else 0)
    assert "Traceback" not in done.stderr
    assert document["facts"]["host"]["kernel"] == os.uname().release


def test_state_folder_that_cannot_be_looked_into_costs_only_itself(tmp_path: Path) -> None:
    facts = gather(State(root=tmp_path / ("a" * 300), runs=tmp_path), Console.create())
    assert [text.split(" could not be read: ")[0] for text in facts.unread] == [
        "the environments",
        "the CUDA homes",
        "the wheels",
    ]
    assert facts.tools
