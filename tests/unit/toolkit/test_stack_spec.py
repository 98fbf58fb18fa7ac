import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120 import errors
from sm120.stack.spec import GitSource, KernelSource, Override, Package, Stack, load_stack, names, parse, request

GOOD = """\
schema = 2
summary = "a stack"
python = ">=3.11"
disk-mb = 10
cuda = "13.0"

[packages]
torch = "2.13.0+cpu"
ml_dtypes = "0.7.0"
cuda-toolkit = {version = "13.0.*", extras = ["all"]}
sglang = {git = "https://example.org/sglang", commit = "f88acf87805b1e27182c4927a47bc60818f768d8", subdirectory = "py"}
nvidia-cuda-cuobjdump = ">=13.2"
anything = "*"

[overrides]
torch = {reason = "ours"}
sgl-kernel = {drop = true, reason = "built later"}
cuda-python = {version = ">=13", reason = "12 is too old"}

[constraints]
nvidia-cublas = {version = "==13.1.0.3", reason = "13.3 crashes"}

[nightly]
url = "https://example.org/nightly"
lead = "torchx"
packages = ["torchvision"]
frozen = ["torchaudio", "triton"]
date = "20260307"
reason = "only there"

[[index]]
url = "https://example.org/cpu"
packages = ["torch"]
reason = "because"

[[index]]
url = "https://example.org/other"
packages = ["ml-dtypes"]
reason = "because"

[[last]]
packages = ["libs-cu13"]
reason = "one file is in two packages"

[prove]
imports = ["torch"]
needs-driver = ["sgl_kernel"]
"""
LINES = GOOD.splitlines()


def read(text: str) -> Stack:
    return parse(text, Path("stacks/mine.toml"))


def line_of(text: str, number: int = 0) -> int:
    """Where a line of GOOD that begins so stands."""
    return [n for n, line in enumerate(LINES, start=1) if line.startswith(text)][number]


def test_good_file() -> None:
    stack = read(GOOD)
    assert (stack.name, stack.disk_bytes, stack.cuda) == ("mine", 10_000_000, "13.0")
    assert stack.requirements() == [
        "torch==2.13.0+cpu",
        "ml-dtypes==0.7.0",
        "cuda-toolkit[all]==13.0.*",
        "sglang @ git+https://example.org/sglang@f88acf87805b1e27182c4927a47bc60818f768d8#subdirectory=py",
        "nvidia-cuda-cuobjdump>=13.2",
        "anything",
        *("torchx", "torchvision", "torchaudio", "triton"),
    ]
    assert [package.pinned for package in stack.packages] == ["2.13.0+cpu", "0.7.0", None, None, None, None]
    assert stack.package("sglang") == Package(
        name="sglang",
        specifier="",
        git=GitSource(
            url="https://example.org/sglang",
            commit="f88acf87805b1e27182c4927a47bc60818f768d8",
            subdirectory="py",
        ),
    )
    assert stack.overrides == (
        Override(name="torch", specifier="", reason="ours"),
        Override(name="sgl-kernel", specifier=None, reason="built later"),
        Override(name="cuda-python", specifier=">=13", reason="12 is too old"),
    )
    assert [(limit.name, limit.specifier) for limit in stack.constraints] == [("nvidia-cublas", "==13.1.0.3")]
    assert stack.nightly is not None
    assert (stack.nightly.date, stack.nightly.lead) == ("20260307", "torchx")
    assert [index.packages for index in stack.indexes] == [("torch",), ("ml-dtypes",)]
    assert [last.packages for last in stack.last] == [("libs-cu13",)]
    assert (stack.imports, stack.driver_imports) == (("torch",), ("sgl_kernel",))


def test_smallest_file() -> None:
    stack = read('schema = 2\nsummary = "s"\npython = ">=3.11"\ndisk-mb = 1\n[packages]\nnumpy = "2.4"\n')
    assert (stack.nightly, stack.cuda, stack.last, stack.imports, stack.driver_imports) == (None, None, (), (), ())


def test_a_table_of_its_own_instead_of_an_inline_one() -> None:
    text = 'schema = 2\nsummary = "s"\npython = ">=3.11"\ndisk-mb = 1\n[packages.cuda-toolkit]\nversion = "13.0.*"\n'
    assert read(text).requirements() == ["cuda-toolkit==13.0.*"]
    with pytest.raises(errors.UsageError, match="did you mean version") as raised:
        read(text.replace("\nversion", "\nverson"))
    assert raised.value.where == "stacks/mine.toml:5"


@pytest.mark.parametrize("name", names())
def test_every_stack_of_the_repository_is_good(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack == load_stack(stack.path) == load_stack(str(stack.path))


def test_stacks_that_were_promised() -> None:
    assert {"cpu", "stable", "stable-torch-2.11", "nightly", "march-2026"} <= set(names())
    torch = load_stack("cpu").package("torch")
    assert torch is not None
    assert (torch.pinned or "").endswith("+cpu")
    march = load_stack("march-2026")
    assert march.nightly is not None
    assert march.nightly.date == "20260307"
    nightly = load_stack("nightly")
    assert nightly.nightly is not None
    assert nightly.nightly.date is None
    assert [override.name for override in nightly.overrides if override.specifier is None] == ["sglang-kernel"]


@pytest.mark.parametrize("name", ["nightly", "march-2026"])
def test_nothing_but_the_nightly_chooses_torch(name: str) -> None:
    """SGLang's pins of the packages of the nightly must all be overridden."""
    stack = load_stack(name)
    assert stack.nightly is not None
    overridden = {override.name for override in stack.overrides if override.specifier == ""}
    assert set(stack.nightly.names) - {"triton"} <= overridden  # triton has no day; nothing but torch asks for it


def test_request_is_about_what_is_installed() -> None:
    base = request(read(GOOD))
    for old, new in (
        ('summary = "a stack"', 'summary = "another"'),
        ("disk-mb = 10", "disk-mb = 11"),
        ('imports = ["torch"]', 'imports = ["torch", "numpy"]'),
        ('reason = "ours"', 'reason = "mine"'),
        ('cuda = "13.0"', 'cuda = "13.1"'),
    ):
        assert request(read(GOOD.replace(old, new, 1))) == base, new
    for old, new in (
        ("2.13.0+cpu", "2.13.0"),
        (">=3.11", ">=3.12"),
        ("13.0.*", "13.1.*"),
        ('["all"]', '["nvcc"]'),
        ("f88acf87", "f88acf88"),
        ('"py"}', '"python"}'),
        ("drop = true", 'version = "1"'),
        ("==13.1.0.3", "==13.1.1.3"),
        ("20260307", "20260308"),
        ("/nightly", "/nightlies"),
        ("/cpu", "/gpu"),
        ("libs-cu13", "libs-cu12"),
    ):
        assert request(read(GOOD.replace(old, new, 1))) != base, new


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(errors.UsageError, match="did you mean cpu") as raised:
        load_stack("cpuu")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "..", "nope", "cpu\n", "\0"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(errors.UsageError, match="no stack is named"):
        load_stack(name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="there is no stack file") as raised:
        load_stack(tmp_path / "x.toml")
    assert raised.value.remedy is not None
    assert "stable-torch-2.11" in raised.value.remedy


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(errors.UsageError, match="is no file"):
            load_stack(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: to read it would end in MemoryError
    with pytest.raises(errors.UsageError, match="1099511627776 bytes"):
        load_stack(path)


@pytest.mark.parametrize(
    ("old", "new", "at", "words"),
    [
        pytest.param("schema = 2", "schema = 1", "schema", "schema must be 2, not 1", id="schema"),
        pytest.param("schema = 2", "schema = true", "schema", "schema must be 2", id="schema-bool"),
        pytest.param('summary = "a stack"', "summary = 5", "summary", "summary must be text, not 5", id="wrong-type"),
        pytest.param('summary = "a stack"', "# none", "schema", "summary is missing", id="missing"),
        pytest.param('summary = "a', 'sumary = "a', "summary", "'sumary'; did you mean summary", id="unknown-key"),
        pytest.param('">=3.11"', '"three"', "python", "no version specifier", id="python"),
        pytest.param("disk-mb = 10", "disk-mb = -1", "disk-mb", "disk-mb must be", id="negative"),
        pytest.param("disk-mb = 10", "disk-mb = 1.5", "disk-mb", "disk-mb must be", id="fraction"),
        pytest.param('cuda = "13.0"', "cuda = 13.0", "cuda =", "cuda must be text", id="cuda-number"),
        pytest.param('cuda = "13.0"', 'cuda = "13"', "cuda =", 'version as in "13.0"', id="cuda-short"),
        pytest.param('"2.13.0+cpu"', '"newest"', "torch =", "neither a version as in", id="version"),
        pytest.param('"2.13.0+cpu"', '"2 or 3"', "torch =", "neither a version as in", id="range"),
        pytest.param('"2.13.0+cpu"', "2.13", "torch =", "torch must be a version in quotes", id="number"),
        pytest.param('ml_dtypes = "0', 'Torch = "0', "ml_dtypes", "Torch is named twice", id="twice"),
        pytest.param('ml_dtypes = "0', '"-e ." = "0', "ml_dtypes", "no package name", id="option-as-name"),
        pytest.param('["all"]', '"all"', "cuda-toolkit", "extras must be a list", id="extras"),
        pytest.param('["all"]', '["a b"]', "cuda-toolkit", "'a b' is no package name", id="extra"),
        pytest.param('version = "13.0.*", ', "", "cuda-toolkit", "version is missing", id="no-version"),
        pytest.param('extras = ["all"]', 'commit = "1"', "cuda-toolkit", "unknown key 'commit'", id="commit-alone"),
        pytest.param("https://example.org/sglang", "git@x:y", "sglang", "no URL of the kinds file, http", id="git-url"),
        pytest.param('commit = "f88acf87', 'commit = "', "sglang", "all 40 digits", id="short-commit"),
        pytest.param('"py"}', '"../x"}', "sglang", "a folder inside the repository", id="way-out"),
        pytest.param('"py"}', '"a#egg=b"}', "sglang", "a folder inside the repository", id="fragment"),
        pytest.param('"py"}', '"python", version = "1"}', "sglang", "unknown key 'version'", id="git-and-version"),
        pytest.param('torch = {reason = "ours"}', 'torch = "2"', "torch = {", "a table with a reason", id="override"),
        pytest.param('{reason = "ours"}', "{}", "torch = {", "reason is missing", id="no-reason"),
        pytest.param("drop = true", "drop = false", "sgl-kernel", "drop can only be true", id="drop-false"),
        pytest.param("drop = true,", "", "sgl-kernel", "is in neither [packages] nor [nightly]", id="override-of-what"),
        pytest.param("sgl-kernel = {", "torch_ = {", "sgl-kernel", "no package name", id="override-name"),
        pytest.param("sgl-kernel = {", "anything = {", "sgl-kernel", "anything is dropped, but [pack", id="drop-asked"),
        pytest.param("sgl-kernel = {", "triton = {", "sgl-kernel", "triton is dropped, but [pack", id="drop-nightly"),
        pytest.param("cuda-python = {", "Sgl_Kernel = {", "cuda-python", "Sgl_Kernel is named twice", id="override-2"),
        pytest.param(
            "[nightly]",
            'NVIDIA-cublas = {version = "==13.2", reason = "r"}\n\n[nightly]',
            "[nightly]",
            "NVIDIA-cublas is named twice",
            id="constraint-twice",
        ),
        pytest.param(
            "nvidia-cublas = {",
            "ml_dtypes = {",
            "nvidia-cublas",
            "ml_dtypes is held to ==13.1.0.3 here, but [packages] says 0.7.0",
            id="constraint-against-pin",
        ),
        pytest.param("schema = 2", "\ufeffschema = 2", "schema", "byte order mark", id="byte-order-mark"),
        pytest.param('"==13.1.0.3"', "13", "nvidia-cublas", "version must be text", id="constraint"),
        pytest.param('lead = "torchx"', "", "[nightly]", "lead is missing", id="no-lead"),
        pytest.param('lead = "torchx"', 'lead = "torch"', "lead", "torch is named twice", id="nightly-and-package"),
        pytest.param('"triton"]', '"torchvision"]', "frozen", "torchvision is named twice", id="nightly-twice"),
        pytest.param('"20260307"', '"2026-03-07"', "date", 'a day as in "20260307"', id="date"),
        pytest.param('"20260307"', "20260307", "date", "date must be text", id="date-number"),
        pytest.param('"20260307"', '"20261307"', "date", "a day as in", id="month"),
        pytest.param('["ml-dtypes"]', '["numpy"]', 'packages = ["ml-dtypes', "numpy is not in [packages]", id="index"),
        pytest.param("//example.org/other", "//u:p@x/", 'url = "https://example.org/other', "user name", id="password"),
        pytest.param("https://example.org/other", "ftp://x/", 'url = "https://example.org/other', "no URL", id="ftp"),
        pytest.param("https://example.org/other", "https://[x", 'url = "https://example.org/other', "no URL", id="url"),
        pytest.param("[[last]]\npackages", "[[last]]\npkgs", 'packages = ["libs', "unknown key 'pkgs'", id="last"),
        pytest.param('["sgl_kernel"]', '["torch"]', "needs-driver", "torch is named twice", id="import-twice"),
        pytest.param('imports = ["torch"]', 'imports = ["a; b"]', "imports", "no module name", id="module"),
        pytest.param('imports = ["torch"]', "imports = []", "imports", "must be a list of names", id="empty-list"),
        pytest.param('imports = ["torch"]', "import = []", "imports", "did you mean imports", id="unknown-inner-key"),
        pytest.param("[packages]\n", "[packages\n", "[packages]", "not TOML", id="syntax"),
        pytest.param("ml_dtypes", "torch", "ml_dtypes", "not TOML", id="key-twice"),
    ],
)
def test_each_mistake_names_file_and_line(old: str, new: str, at: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(errors.UsageError) as raised:
        read(GOOD.replace(old, new, 1))
    assert words in raised.value.message
    assert raised.value.where == f"stacks/mine.toml:{line_of(at)}"
    assert "p@x" not in raised.value.message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[index]]", "[[indx]]", "unknown key 'indx'"),
        ("[[index]]", "[index]", "not TOML"),
        ("[nightly]", "[[nightly]]", "nightly must be a table"),
        ("[prove]", "[[prove]]", "prove must be a table"),
        ("[[last]]", "[last]", "last is written as [[last]]"),
        ("[constraints]", "[constrants]", "did you mean constraints"),
    ],
)
def test_tables_of_the_wrong_kind(old: str, new: str, words: str) -> None:
    with pytest.raises(errors.UsageError, match=re.escape(words)):
        read(GOOD.replace(old, new))


@pytest.mark.parametrize("name", ["a b.toml", "-x.toml", ".toml", f"{'a' * 101}.toml"])
def test_file_name_that_cannot_name_an_environment(name: str) -> None:
    with pytest.raises(errors.UsageError, match="file's name"):
        parse(GOOD, Path(name))


def test_no_package() -> None:
    head = 'schema = 2\nsummary = "s"\npython = ">=3.11"\ndisk-mb = 1\n'
    for text in (head, head + "[packages]\n"):
        with pytest.raises(errors.UsageError, match="names no package"):
            read(text)
    nightly = '[nightly]\nurl = "https://x/y"\nlead = "torch"\nreason = "r"\n'
    assert read(head + nightly).requirements() == ["torch"]


def explained(text: str) -> None:
    """Any text gives a stack, or an error of ours that names the file."""
    found: errors.UsageError | None = None
    try:
        read(text)
    except errors.UsageError as error:
        found = error
    if found is not None:
        assert found.message.startswith("stacks/mine.toml:")
        assert found.where is not None
        assert 1 <= int(found.where.rpartition(":")[2]) <= text.count("\n") + 1


@given(st.integers(0, len(GOOD)), st.integers(0, 40), st.text(max_size=10))
def test_a_damaged_file_is_explained(start: int, length: int, text: str) -> None:
    explained(GOOD[:start] + text + GOOD[start + length :])


VALUES = st.recursive(
    st.sampled_from(['"x"', "5", "true", '""', "[]", "2026-03-07", '"1.0"', '">=1"', '"*"', "nan"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(st.sampled_from(["version", "reason", "drop", "git", "extras"]), inner, max_size=2).map(
            lambda table: "{" + ", ".join(f"{k} = {v}" for k, v in table.items()) + "}"
        ),
    ),
    max_leaves=4,
)


@given(st.sampled_from([n for n, line in enumerate(LINES) if " = " in line]), VALUES)
def test_any_value_in_any_place_is_explained(number: int, value: str) -> None:
    lines = list(LINES)
    lines[number] = f"{lines[number].partition(' = ')[0]} = {value}"
    explained("\n".join(lines))


@given(st.permutations(GOOD.splitlines(keepends=True)))
def test_shuffled_lines_are_explained(lines: list[str]) -> None:
    explained("".join(lines))


@given(st.text())
def test_any_text_is_explained(text: str) -> None:
    explained(text)


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5000, "a = 9999-99-99"])
def test_text_that_overwhelms_the_reader(text: str) -> None:
    explained(text)


def test_kernels_come_from_where_sglang_comes_from_unless_the_file_says_otherwise() -> None:
    path = Path("/nowhere/a.toml")
    git = KernelSource(url="https://example.org/sglang", revision="f88acf87805b1e27182c4927a47bc60818f768d8")
    assert parse(GOOD, path).kernels == git
    table = '[kernels]\ngit = "https://example.org/other"\ntag = "v0.5.23"\n'
    assert parse(GOOD + table, path).kernels == KernelSource(url="https://example.org/other", revision="v0.5.23")
    without = "\n".join(line for line in LINES if not line.startswith("sglang"))
    assert parse(without, path).kernels is None
    assert request(parse(GOOD + table, path)) == request(parse(GOOD, path))


@pytest.mark.parametrize(
    "table",
    [
        'git = "https://example.org/x"',
        'git = "https://example.org/x"\ntag = "v1"\ncommit = "f88acf87805b1e27182c4927a47bc60818f768d8"',
        'git = "https://example.org/x"\ncommit = "f88acf8"',
        'git = "https://example.org/x"\ntag = "--upload-pack=x"',
        'git = "ext::sh -c x"\ntag = "v1"',
        'tag = "v1"',
        'git = "https://example.org/x"\ntag = "v1"\nbranch = "main"',
    ],
)
def test_a_wrong_kernels_table_is_refused_with_its_line(table: str) -> None:
    with pytest.raises(errors.UsageError, match=r"a\.toml:\d+"):
        parse(f"{GOOD}[kernels]\n{table}\n", Path("/nowhere/a.toml"))
