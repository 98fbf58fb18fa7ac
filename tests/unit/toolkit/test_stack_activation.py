"""The table of variables: applied by ``variables``, and by the script in the shells that are here."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from sm120 import errors
from sm120.stack.activation import architecture, script, settings, variables

ROOT = Path("/state of mine/.sm120")
ENV, HOME, CACHE = ROOT / "env/stable", ROOT / "cuda/stable", ROOT / "cache/stable"
SHELLS = [found for name in ("sh", "dash", "bash", "zsh") if (found := shutil.which(name))]


def made(base: Mapping[str, str] | None = None, **other: Any) -> dict[str, str]:
    places: dict[str, Any] = {"environment": ENV, "cuda_home": HOME, "cache": CACHE, "capability": (12, 0), **other}
    return variables("stable", base=base or {}, **places)


def stack_script(**other: Any) -> str:
    places: dict[str, Any] = {"environment": ENV, "cuda_home": HOME, "cache": CACHE, "capability": (12, 0), **other}
    return script("stable", **places)


def source(shell: str, text: str, commands: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment after ``commands``, in which ``$S`` is the script, under -e and -u."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a script.sh"
        path.write_text(text, "utf-8")
        program = f"S='{path}'\n{commands}\nunset S\n/usr/bin/env -0"
        done = subprocess.run(
            [shell, "-euc", program], env=dict(env), cwd=folder, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert [found.name for found in Path(folder).iterdir()] == ["a script.sh"], "nothing of a value was run"
    pairs = (entry.split("=", 1) for entry in done.stdout.decode("utf-8", "surrogateescape").split("\0") if entry)
    own = {"_", "PWD", "OLDPWD", "SHLVL", "S", "BASH_EXECUTION_STRING", "ZSH_EXECUTION_STRING"}
    invented = {"HOME", "LOGNAME"} - set(env)  # by zsh
    return {name: value for name, value in pairs if name not in own | invented}


# The values


def test_what_a_process_of_a_stack_gets() -> None:
    assert made({"PATH": "/usr/bin"}) == {
        "PATH": f"{ENV}/bin:{HOME}/bin:/usr/bin",
        "CUDA_HOME": str(HOME),
        "CUDA_PATH": str(HOME),
        "CUDAToolkit_ROOT": str(HOME),
        "CUDACXX": f"{HOME}/bin/nvcc",
        "CPLUS_INCLUDE_PATH": f"{HOME}/include/cccl",
        "C_INCLUDE_PATH": f"{HOME}/include/cccl",
        "LIBRARY_PATH": f"{HOME}/lib64/stubs",
        "TRITON_PTXAS_PATH": f"{HOME}/bin/ptxas",
        "TRITON_PTXAS_BLACKWELL_PATH": f"{HOME}/bin/ptxas",
        "FLASHINFER_CUDA_ARCH_LIST": "12.0a",
        "TORCH_CUDA_ARCH_LIST": "12.0a",
        "TVM_FFI_CUDA_ARCH_LIST": "12.0a",
        "FLASHINFER_WORKSPACE_BASE": f"{CACHE}/flashinfer",
        "TVM_FFI_CACHE_DIR": f"{CACHE}/tvm-ffi",
        "SGLANG_CACHE_DIR": f"{CACHE}/sglang",
        "SGLANG_JIT_CACHE_DIR": f"{CACHE}/sglang-jit",
        "SGLANG_DG_CACHE_DIR": f"{CACHE}/deep-gemm",
        "TRITON_CACHE_DIR": f"{CACHE}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{CACHE}/torch-extensions",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "SM120_STACK": "stable",
    }


def test_a_stack_without_a_cuda_home_says_nothing_of_cuda() -> None:
    found = made(
        {"PATH": "/usr/bin", "CUDA_HOME": "/usr/local/cuda", "CPATH": "/usr/local/cuda/include"}, cuda_home=None
    )
    assert found["PATH"] == f"{ENV}/bin:/usr/bin"
    assert not {"CUDA_HOME", "CUDACXX", "CPATH", "CPLUS_INCLUDE_PATH", "TRITON_PTXAS_PATH"} & set(found)
    assert found["TRITON_CACHE_DIR"] == f"{CACHE}/triton"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((12, 0), "12.0a"), (None, "12.0a"), ((12, 1), "12.1a"), ((10, 3), "10.3a"), ((9, 0), "9.0a"), ((8, 9), "8.9")],
)
def test_the_architecture_to_compile_for(capability: tuple[int, int] | None, name: str) -> None:
    assert architecture(capability) == name
    assert made(capability=capability)["TORCH_CUDA_ARCH_LIST"] == name


@pytest.mark.parametrize(("capability", "expected"), [((12, 1), True), (None, True), ((9, 0), False), ((8, 9), False)])
def test_triton_keeps_its_own_ptxas_for_older_gpus(capability: tuple[int, int] | None, expected: bool) -> None:
    found = made(capability=capability)
    assert ("TRITON_PTXAS_PATH" in found, "TRITON_PTXAS_BLACKWELL_PATH" in found) == (expected, expected)


FORMER = [
    # SET
    ("CUDA_HOME", "/usr/local/cuda-12.8", str(HOME)),
    ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "PCI_BUS_ID"),
    # KEEP: the user's, but not those of another stack, which a child of its shell inherits
    ("TRITON_CACHE_DIR", "/fast disk/triton", "/fast disk/triton"),
    ("TRITON_CACHE_DIR", "", f"{CACHE}/triton"),
    ("TRITON_CACHE_DIR", f"{ROOT}/cache/nightly/triton", f"{CACHE}/triton"),
    ("TRITON_CACHE_DIR", f"{ROOT}/cachet/triton", f"{ROOT}/cachet/triton"),
    ("TRITON_PTXAS_PATH", f"{ROOT}/cuda/nightly/bin/ptxas", f"{HOME}/bin/ptxas"),
    ("TRITON_PTXAS_PATH", "/opt/ptxas", "/opt/ptxas"),
    # COVER
    ("TORCH_CUDA_ARCH_LIST", "8.9;12.0a", "8.9;12.0a"),
    ("TORCH_CUDA_ARCH_LIST", "12.0a+PTX", "12.0a+PTX"),
    ("FLASHINFER_CUDA_ARCH_LIST", "9.0a 12.0f", "9.0a 12.0f"),
    ("FLASHINFER_CUDA_ARCH_LIST", "12.0", "12.0a"),
    ("FLASHINFER_CUDA_ARCH_LIST", "12.1a", "12.0a"),
    ("FLASHINFER_CUDA_ARCH_LIST", "112.0a", "12.0a"),
    ("FLASHINFER_CUDA_ARCH_LIST", "12x0a", "12.0a"),
    # FRONT, and other toolkits' folders
    ("PATH", "/usr/local/cuda/lib64::/usr/bin", f"{ENV}/bin:{HOME}/bin:/usr/local/cuda/lib64::/usr/bin"),
    ("PATH", f"{ENV}/bin:{HOME}/bin:/usr/bin", f"{ENV}/bin:{HOME}/bin:/usr/bin"),
    ("LIBRARY_PATH", "/my/lib", f"{HOME}/lib64/stubs:/my/lib"),
    ("LIBRARY_PATH", f"{HOME}/lib64/stubs", f"{HOME}/lib64/stubs"),
    ("CPLUS_INCLUDE_PATH", "/usr/local/cuda-12.8/include", f"{HOME}/include/cccl"),
    ("CPLUS_INCLUDE_PATH", "/opt/cuda/targets/x86_64-linux/include/cccl/:/b", f"{HOME}/include/cccl:/b"),
    ("CPATH", "/a:/usr/local/cuda/include:/b", "/a:/b"),
    ("CPATH", "/usr/local/cuda/include", ""),
    ("LD_LIBRARY_PATH", "/usr/local/cuda/compat/lib:/usr/local/cuda/lib64", "/usr/local/cuda/compat/lib"),
    ("LD_LIBRARY_PATH", "/usr/local/cuda-13.0/extras/CUPTI/lib64/:/opt/cuda/lib", ""),
    (
        "LD_LIBRARY_PATH",
        "/home/me/barracuda/lib:/home/me/cuda/src:/usr/lib",
        "/home/me/barracuda/lib:/home/me/cuda/src:/usr/lib",
    ),
]


@pytest.mark.parametrize(("name", "former", "expected"), FORMER)
def test_what_becomes_of_a_value_that_was_there(name: str, former: str, expected: str) -> None:
    assert made({name: former})[name] == expected


def test_any_list_of_architectures_is_kept_where_no_gpu_is() -> None:
    assert made({"TORCH_CUDA_ARCH_LIST": "8.0"}, capability=None)["TORCH_CUDA_ARCH_LIST"] == "8.0"


def test_which_gpus_are_visible_is_the_users_business() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in made({"CUDA_VISIBLE_DEVICES": "1"})


def test_paths_that_only_clean_are_not_set_where_nothing_was() -> None:
    assert not {"CPATH", "LD_LIBRARY_PATH"} & set(made({"CPATH": ""}))


def test_braces_in_a_folders_name_are_just_that() -> None:
    assert made(cache=Path("/a/{home}/cache/x"))["TRITON_CACHE_DIR"] == "/a/{home}/cache/x/triton"


@pytest.mark.parametrize("place", ["environment", "cuda_home"])
def test_a_colon_is_refused(place: str) -> None:
    with pytest.raises(errors.UsageError, match="has a colon in its name") as caught:
        made({}, **{place: Path("/a:b/x")})
    assert "SM120_HOME" in (caught.value.remedy or "")
    with pytest.raises(errors.UsageError, match="has a colon in its name"):
        stack_script(**{place: Path("/a:b/x")})


def test_every_variable_is_there_once_and_has_a_reason() -> None:
    rules = settings("stable", environment=ENV, cuda_home=HOME, cache=CACHE, capability=None)
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.reason and "\n" not in rule.reason for rule in rules)
    text = stack_script()
    for rule in rules:
        assert f"# {rule.reason}: {rule.how}\n_sm120_{rule.how.name.lower()} {rule.name}" in text


# The script


NAMES = [rule.name for rule in settings("s", environment=ENV, cuda_home=HOME, cache=CACHE, capability=(12, 0))]
ODD = Path('/tmp/it\'s "$HOME" `touch a` $(touch b) \\ \n * [x] ü/.sm120')


@pytest.mark.parametrize("shell", SHELLS)
def test_deactivation_restores_what_was_set_and_what_was_not(shell: str) -> None:
    before = {"PATH": "/usr/bin:/bin", "CUDA_HOME": '/it\'s "mine"\n$HOME', "TRITON_CACHE_DIR": "", "LANG": "C.UTF-8"}
    before["LD_LIBRARY_PATH"] = "/a:/usr/local/cuda/lib64:"
    text = stack_script()
    inside = source(shell, text, '. "$S"', before)
    assert inside == {**before, **made(before)}
    assert inside["LD_LIBRARY_PATH"] == "/a:"
    assert source(shell, text, '. "$S"; sm120_deactivate', before) == before
    assert source(shell, text, '. "$S"; . "$S"', before) == inside
    assert source(shell, text, '. "$S"; . "$S"; sm120_deactivate', before) == before
    assert source(shell, text, '. "$S"; sm120_deactivate; . "$S"', before) == inside


@pytest.mark.parametrize("shell", SHELLS)
def test_another_stacks_activation_is_undone_first(shell: str, tmp_path: Path) -> None:
    before = {"PATH": "/usr/bin:/bin", "TORCH_CUDA_ARCH_LIST": "8.0"}
    other = tmp_path / "cpu.sh"
    other.write_text(
        script("cpu", environment=ROOT / "env/cpu", cuda_home=None, cache=ROOT / "cache/cpu", capability=None)
    )
    inside = source(shell, stack_script(), f'. {other}; . "$S"', before)
    assert inside == {**before, **made(before)}
    assert source(shell, stack_script(), f'. {other}; . "$S"; sm120_deactivate', before) == before


@pytest.mark.parametrize("shell", SHELLS)
def test_in_a_child_of_another_stacks_shell(shell: str) -> None:
    """Functions are not inherited, variables are."""
    places = {"environment": ROOT / "env/nightly", "cuda_home": ROOT / "cuda/nightly", "cache": ROOT / "cache/nightly"}
    inherited = {"PATH": "/bin", **variables("nightly", base={"PATH": "/bin"}, capability=None, **places)}
    inside = source(shell, stack_script(), '. "$S"', inherited)
    assert inside["TRITON_CACHE_DIR"] == f"{CACHE}/triton"
    assert inside["TRITON_PTXAS_PATH"] == f"{HOME}/bin/ptxas"
    assert inside == {**inherited, **made(inherited)}


@pytest.mark.parametrize("shell", SHELLS)
def test_odd_folder_names_are_data(shell: str) -> None:
    places = {"environment": ODD / "env/x", "cuda_home": ODD / "cuda/x", "cache": ODD / "cache/x"}
    before = {"PATH": "/bin", "TRITON_CACHE_DIR": f"{ODD}/cache/other/triton", "TVM_FFI_CACHE_DIR": f"{ODD}/mine"}
    inside = source(shell, stack_script(**places), '. "$S"', before)
    assert inside == {**before, **made(before, **places)}
    assert inside["TRITON_CACHE_DIR"] == f"{ODD}/cache/x/triton"
    assert inside["TVM_FFI_CACHE_DIR"] == f"{ODD}/mine"
    assert source(shell, stack_script(**places), '. "$S"', inside) == inside, "in a child of that shell"


@pytest.mark.parametrize("shell", SHELLS)
def test_nothing_is_left_behind(shell: str) -> None:
    check = "\nif set | grep _sm120 | grep -v _EXECUTION_STRING; then exit 9; fi"
    functions = "\nfor f in _sm120_set _sm120_drop_others; do if command -v $f; then exit 8; fi; done"
    source(shell, stack_script(), f'. "$S"; sm120_deactivate{check}{functions}', {"PATH": "/usr/bin:/bin"})
    source(shell, stack_script(), f'. "$S"{functions}', {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": "/x"})


value = st.text(st.sampled_from("ab /:;.*?[]'\"\\$`(){}|&<>!#~=+-\n\té12f0"), max_size=12)
listed = st.lists(
    st.sampled_from(
        [
            "/usr/local/cuda/lib64",
            "/usr/local/cuda-12.8/include/",
            "/opt/cuda/targets/a b/lib",
            "/a",
            "",
            "/cuda/compat",
            "x",
        ]
    )
).map(":".join)
architectures = st.lists(st.sampled_from(["12.0a", "12.0f", "12.0", "9.0a", "12.0a+PTX", "112.0a"])).flatmap(
    lambda found: st.sampled_from([" ", ";"]).map(lambda between: between.join(found))
)
inside_ours = st.sampled_from([f"{ROOT}/cache/other/x", f"{ROOT}/cuda/other", f"{ROOT}/cache", "/elsewhere"])


@pytest.mark.parametrize("shell", SHELLS)
@examples(max_examples=40, deadline=None)
@given(
    base=st.dictionaries(st.sampled_from([*NAMES, "OTHER"]), st.one_of(value, listed, architectures, inside_ours)),
    capability=st.sampled_from([None, (12, 0), (8, 9)]),
    with_home=st.booleans(),
)
@example(base={"CPATH": ":", "LIBRARY_PATH": "::/usr/local/cuda/lib64"}, capability=None, with_home=True)
def test_the_script_does_in_every_shell_what_variables_does(
    shell: str, base: dict[str, str], capability: tuple[int, int] | None, with_home: bool
) -> None:
    places: dict[str, Any] = {"capability": capability, "cuda_home": HOME if with_home else None}
    text = stack_script(**places)
    if not base.get("PATH"):
        base["PATH"] = "/bin"  # an empty one is the shell's business
    assert source(shell, text, '. "$S"', base) == {**base, **made(base, **places)}
    assert source(shell, text, '. "$S"; . "$S"; sm120_deactivate', base) == base


def test_the_shells_that_every_machine_has_are_tried() -> None:
    assert {"sh", "bash"} <= {Path(shell).name for shell in SHELLS}
