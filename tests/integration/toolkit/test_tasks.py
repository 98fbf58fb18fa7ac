"""The tasks as a user types them: real ``invoke`` in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sm120.config import CHECKOUT

TASKS = (
    "doctor",
    "setup",
    "validate-backends",
    "test",
    "dev.test",
    "dev.lint",
    "dev.types",
    "dev.format",
    "dev.bench",
    "dev.patches",
)


def invoke(*words: str, cwd: Path | None = None, **env: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-P", "-m", "invoke", "--search-root", str(CHECKOUT), *words]
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("INVOKE_")}, **env}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_list_names_the_promised_tasks() -> None:
    out = invoke("--list").stdout
    for name in TASKS:
        assert re.search(rf"^  {re.escape(name)}\b", out, re.MULTILINE)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_and_every_flag_is_explained(name: str) -> None:
    done = invoke("--help", name)
    assert done.returncode == 0, done.stderr
    assert "Docstring:\n  none" not in done.stdout
    flags = re.findall(r"^  (?:-\w, )?--([\w-]+)(?:=STRING)?(.*)$", done.stdout, re.MULTILINE)
    assert flags
    for flag, text in flags:
        assert text.strip(), f"--{flag} has no help"


def test_usage_error_is_exit_2_with_a_sentence(tmp_path: Path) -> None:
    done = invoke("setup", "--stack", "cpuu", cwd=tmp_path, SM120_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no stack is named 'cpuu'; did you mean cpu?\n")
    assert "remedy: " in done.stderr
    assert "Traceback" not in done.stderr


def test_json_error_is_one_document(tmp_path: Path) -> None:
    done = invoke("setup", "--stack", "cpuu", "--json", SM120_HOME=str(tmp_path))
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = invoke("setup", "--stack", "cpu", "--dry-run", "--json", SM120_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["install"] is True
    assert "torch==2.13.0+cpu" in plan["packages"]
    assert plan["environment"] == str(tmp_path / "home" / ".sm120" / "env" / "cpu")
    assert list(tmp_path.iterdir()) == []


def test_flag_wins_over_variable_over_file(tmp_path: Path) -> None:
    def environment(*words: str, **env: str) -> str:
        done = invoke("setup", "--stack", "cpu", "--dry-run", "--json", *words, cwd=tmp_path, **env)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["environment"])

    assert environment(SM120_HOME="") == str(CHECKOUT / ".sm120" / "env" / "cpu")
    assert environment(SM120_HOME="/h") == "/h/.sm120/env/cpu"
    assert environment(SM120_HOME="/h", INVOKE_SM120_STATE="state") == "/h/state/env/cpu"
    assert environment(SM120_HOME="/h", INVOKE_SM120_STATE="/s") == "/s/env/cpu"
    assert environment("--home", str(tmp_path), SM120_HOME="/h") == str(tmp_path / ".sm120" / "env" / "cpu")


def test_relative_paths_are_the_callers(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("schema = 9\n")
    done = invoke("setup", "--stack", "mine.toml", cwd=tmp_path, SM120_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "mine.toml:1: schema must be 2, not 9" in done.stderr


def test_state_of_a_newer_toolkit(tmp_path: Path) -> None:
    (tmp_path / ".sm120").mkdir()
    (tmp_path / ".sm120" / "state.json").write_text('{"state_version": 99}')
    done = invoke("setup", "--stack", "cpu", SM120_HOME=str(tmp_path))
    assert done.returncode == 10
    assert "written by a newer toolkit" in done.stderr


def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = invoke("setup", "--stack", "cpu", SM120_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == 10
    assert "SM120_HOME" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("test", "--only", "lintt"), "--only: no part is named 'lintt'; did you mean lint?"),
        (("dev.bench", "--name", "nothing"), "no benchmark is named 'nothing'"),
        (("dev.patches",), "--repository is missing"),
        (("setup", "--offline", ""), "--offline is empty"),
        (("setup", "--home", ""), "--home is empty"),
        (("setup", "--offline", "x", "--adopt", "y"), "--adopt"),
        (("doctor", "--links", "--facts", "x"), "--links measures this machine, --facts judges another one"),
        (("validate-backends", "--tp", "two"), "--tp: 'two' is not a whole number"),
        (("validate-backends", "--seeds", "1.5"), "--seeds: '1.5' is not a whole number"),
    ],
)
def test_bad_flags(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = invoke(*words, SM120_HOME=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_no_test_that_matches_is_not_a_pass(tmp_path: Path) -> None:
    done = invoke("test", "--only", "toolkit", "-k", "no_test_has_this_name", "--json", SM120_HOME=str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["error"]["message"] == "no test ran"


def test_one_part_runs_and_is_summed_up(tmp_path: Path) -> None:
    done = invoke("test", "--only", "toolkit", "-k", "test_exit_codes_are_the_documented", SM120_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert re.search(r"^tests of the toolkit  ok", done.stdout, re.MULTILINE)


def in_namespace(script: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a script that may mount, in a namespace of its own; then ``setup`` with its home in ``home``."""
    try:
        able = subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True, check=False)
    except OSError:
        pytest.skip("no unshare here")
    if able.returncode:
        pytest.skip("unshare cannot make a mount namespace here")
    command = f'{script}; exec "$2" -P -m invoke --search-root "$3" setup --stack cpu'
    argv = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-ec",
        command,
        "sh",
        str(home),
        sys.executable,
        str(CHECKOUT),
    ]
    env = {**os.environ, "SM120_HOME": str(home)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_read_only_disk(tmp_path: Path) -> None:
    done = in_namespace('mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"', tmp_path)
    assert done.returncode == 10, done.stderr
    assert f"cannot write {tmp_path / '.sm120'}: Read-only file system" in done.stderr
    assert "remedy: set SM120_HOME" in done.stderr


def test_full_disk(tmp_path: Path) -> None:
    done = in_namespace(
        'mount -t tmpfs -o size=64k none "$1"; cat /dev/zero >"$1/ballast" 2>/dev/null || true', tmp_path
    )
    assert done.returncode == 10, done.stderr
    assert "no space left on the disk" in done.stderr
    assert "remedy: free some space" in done.stderr


def test_small_disk(tmp_path: Path) -> None:
    done = in_namespace('mount -t tmpfs -o size=1m none "$1"', tmp_path)
    assert done.returncode == 10, done.stderr
    assert re.search(r"the stack cpu needs 1\.6 GB in .*: 1\.6 GB more than the .* that are free", done.stderr)


def test_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    script = '"$1" -P -m invoke --search-root "$2" setup --stack cpu --dry-run | true'
    argv = ["bash", "-c", script, "bash", sys.executable, str(CHECKOUT)]
    env = {**os.environ, "SM120_HOME": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.network
def test_cpu_stack_is_installed_from_the_machines_own_index(tmp_path: Path) -> None:
    done = invoke("setup", "--stack", "cpu", "--json", SM120_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    lock = json.loads(Path(first["lock"]).read_text())
    torch = next(d for d in lock["distributions"] if d["name"] == "torch")
    assert torch["version"] == "2.13.0+cpu"
    assert all(re.fullmatch(r"[0-9a-f]{64}", d["sha256"]) for d in lock["distributions"])
    again = json.loads(invoke("setup", "--stack", "cpu", "--json", SM120_HOME=str(tmp_path)).stdout)
    assert not again["fresh"]
    assert again["fingerprint"] == first["fingerprint"]
