"""Sources, dependencies and mirrors, with real git, real archives and a server on loopback."""

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.toolkit.file_server import FileServer, serving
from tests.integration.toolkit.kernel_project_made import bare, commit_all, git

from sm120 import errors, files
from sm120.build.source import Checkout, Dependency, Pristine, Wanted, check_out, copy, obtain, repository
from sm120.build.source.git import Git
from sm120.console import Console
from sm120.runs import Run
from sm120.state import State

NOWHERE = "https://example.invalid"  # never there
FILES = {
    "README.md": b"of SGLang\n",
    "docs/picture": b"not of the component\n",
    "sgl-kernel/CMakeLists.txt": b"project(x)\n",
    "sgl-kernel/pyproject.toml": b"[project]\n",
    "sgl-kernel/build.sh": b"#!/bin/sh\n",
    "sgl-kernel/csrc/build/a.cu": b"a\n",
    "sgl-kernel/.gitignore": b"*.log\n",
}
COMPONENT = {path.removeprefix("sgl-kernel/") for path in FILES if path.startswith("sgl-kernel/")}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "WAITS", (0.0, 0.0))
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook of git's
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(root=tmp_path / "state", runs=tmp_path / "runs")


@pytest.fixture
def run(state: State) -> Run:
    return Run.start(state, "build-kernels", [])


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving() as made:
        yield made


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A bare repository of SGLang's shape, with a tag, which serves parts of itself."""
    work = _fill(tmp_path / "upstream-work", FILES)
    (work / "sgl-kernel" / "build.sh").chmod(0o755)
    commit_all(work)
    git(work, "tag", "--annotate", "--message=x", "v1")
    place = bare(work, tmp_path / "upstream" / "sglang.git")
    git(place, "config", "uploadpack.allowFilter", "true")
    return place


def _fill(folder: Path, contents: dict[str, bytes]) -> Path:
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def _look(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def _wanted(
    repository: str | None = None,
    commit: str | None = None,
    folder: Path | None = None,
    mirror: Path | None = None,
    given: dict[str, Path] | None = None,
) -> Wanted:
    return Wanted(repository=repository, commit=commit, folder=folder, mirror=mirror, given=given or {})


def _obtain(wanted: Wanted, state: State, run: Run) -> Pristine:
    return obtain(wanted, state, run, Console.current())


def _check_out(wanted: Wanted, found: list[Dependency], state: State, run: Run) -> dict[str, Checkout]:
    made = check_out(wanted, found, state.root / "deps", state, run, Console.current())
    return {one.name: one for one in made}


def _git(name: str, url: str | Path, revision: str, *, submodules: bool | tuple[str, ...] = True) -> Dependency:
    address = f"file://{url}" if isinstance(url, Path) else url
    return Dependency(
        name=name, kind="git", url=address, revision=revision, submodules=submodules, place="CMakeLists.txt:7"
    )


def _archive(name: str, url: str, sha256: str | None, inside: str = "") -> Dependency:
    return Dependency(name=name, kind="archive", url=url, sha256=sha256, inside=inside, place="CMakeLists.txt:9")


def _tar(contents: dict[str, bytes], top: str = "n-1/") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path, data in contents.items():
            info = tarfile.TarInfo(top + path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _repository(tmp_path: Path, name: str, contents: dict[str, bytes]) -> tuple[Path, str]:
    """A bare one, and its commit."""
    work = _fill(tmp_path / "work" / name, contents)
    commit = commit_all(work)
    return bare(work, tmp_path / "mirror" / f"{name}.git"), commit


def _fetches(run: Run) -> int:
    lines = (run.path / "commands.jsonl").read_text().splitlines()
    return sum("fetch" in json.loads(line)["argv"] for line in lines)


def test_a_commit_and_a_tag_are_fetched_once_and_only_the_component(upstream: Path, state: State, run: Run) -> None:
    commit = git(upstream, "rev-parse", "v1^{commit}")
    made = _obtain(_wanted(f"file://{upstream}", commit), state, run)
    assert set(_look(made.root / made.folder)) == COMPONENT
    assert (made.folder, made.commit, made.dirty) == ("sgl-kernel", commit, False)
    assert made.committed == int(git(upstream, "log", "-1", "--format=%ct", commit))
    assert os.access(made.root / "sgl-kernel" / "build.sh", os.X_OK)
    by_tag = _obtain(_wanted(f"file://{upstream}", "v1"), state, run)
    assert (by_tag.content, by_tag.commit) == (made.content, commit)
    (store,) = (state.sources / "git").rglob("sglang.git")
    held = git(store, "cat-file", "--batch-check", "--batch-all-objects")
    assert git(upstream, "rev-parse", "v1:sgl-kernel/build.sh") in held
    assert git(upstream, "rev-parse", "v1:docs/picture") not in held
    upstream.rename(upstream.with_name("gone"))
    assert _obtain(_wanted(f"file://{upstream}", commit), state, run) == made
    assert _obtain(_wanted(f"file://{upstream}", "v1"), state, run) == by_tag


def test_a_kept_source_that_somebody_changed_is_laid_out_anew(upstream: Path, state: State, run: Run) -> None:
    wanted = _wanted(f"file://{upstream}", "v1")
    made = _obtain(wanted, state, run)
    (made.root / "sgl-kernel" / "CMakeLists.txt").write_text("changed")
    (made.root / "sgl-kernel" / "more").write_text("more")
    assert _obtain(wanted, state, run) == made
    assert set(_look(made.root / "sgl-kernel")) == COMPONENT


def test_what_a_killed_git_left_does_not_stop_the_next(upstream: Path, state: State, run: Run) -> None:
    wanted = _wanted(f"file://{upstream}", "v1")
    _obtain(wanted, state, run)
    (store,) = (state.sources / "git").rglob("sglang.git")
    shutil.rmtree(state.sources / "trees")
    git(store, "update-ref", "-d", "refs/sm120/tags/v1")
    for name in (
        "shallow.lock",
        "config.lock",
        "refs/sm120/tags/v1.lock",
        "objects/pack/tmp_pack_x",
        "sm120.index.lock",
    ):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("")
    assert _obtain(wanted, state, run).commit


def test_a_commit_without_the_component(tmp_path: Path, state: State, run: Run) -> None:
    place, commit = _repository(tmp_path, "other", {"README.md": b"x"})
    with pytest.raises(errors.PatchError, match=r"has no sgl-kernel .* python/sglang/kernels/aot/CMakeLists.txt"):
        _obtain(_wanted(f"file://{place}", commit), state, run)


@pytest.mark.parametrize("revision", ["1" * 40, "v9"])
def test_a_commit_or_tag_that_is_not_there(upstream: Path, state: State, run: Run, revision: str) -> None:
    with pytest.raises(errors.PreflightError, match=rf"has no commit.* {revision}"):
        _obtain(_wanted(f"file://{upstream}", revision), state, run)


def test_a_checkout_of_the_user_s_as_it_is(tmp_path: Path, state: State, run: Run) -> None:
    work = _fill(tmp_path / "mine", FILES)
    commit = commit_all(work)
    kernel = work / "sgl-kernel"
    clean = _obtain(_wanted(folder=work), state, run)
    assert (clean.commit, clean.dirty) == (commit, False)
    _fill(kernel, {"a.log": b"", "build/x": b"", "python/__pycache__/a.pyc": b"", "x.abi3.so": b""})
    assert _obtain(_wanted(folder=work), state, run) == clean
    index = (work / ".git" / "index").stat()
    _fill(kernel, {"new.cu": b"new", "CMakeLists.txt": b"project(y)\n"})
    (kernel / "pyproject.toml").touch()  # git would write its index to remember that it has not changed
    (kernel / "build.sh").unlink()
    dirty = _obtain(_wanted(folder=work), state, run)
    assert (dirty.commit, dirty.dirty) == (commit, True)
    assert "not committed" in dirty.origin
    assert dirty.content != clean.content
    copy(dirty, tmp_path / "copy", {})
    assert set(_look(tmp_path / "copy" / "sgl-kernel")) == COMPONENT - {"build.sh"} | {"new.cu"}
    after = (work / ".git" / "index").stat()
    assert (after.st_mtime_ns, after.st_ino) == (index.st_mtime_ns, index.st_ino)
    by_itself = _obtain(_wanted(folder=kernel), state, run)
    assert (by_itself.folder, by_itself.commit, by_itself.content) == ("", commit, dirty.content)


def test_a_folder_that_git_does_not_track_though_it_lies_in_a_repository(
    tmp_path: Path, state: State, run: Run
) -> None:
    outer = _fill(tmp_path / "outer", {".gitignore": b"unpacked\n"})
    commit_all(outer)
    _fill(outer / "unpacked", {**FILES, "sgl-kernel/build/x": b"", "sgl-kernel/a.so": b""})
    made = _obtain(_wanted(folder=outer / "unpacked"), state, run)
    assert (made.commit, made.dirty, made.committed) == (None, False, 315532800)
    copy(made, tmp_path / "copy", {})
    assert set(_look(tmp_path / "copy" / "sgl-kernel")) == COMPONENT


def test_a_folder_that_is_no_source(tmp_path: Path, state: State, run: Run) -> None:
    with pytest.raises(errors.PatchError, match="is no source tree of sgl-kernel"):
        _obtain(_wanted(folder=tmp_path / "nothing"), state, run)


def test_a_copy_takes_the_changes_and_the_rest_keeps_its_time(tmp_path: Path, state: State, run: Run) -> None:
    source = _fill(tmp_path / "mine", FILES)
    (source / "sgl-kernel" / "build.sh").chmod(0o755)
    pristine, place = _obtain(_wanted(folder=source), state, run), tmp_path / "copy"
    copy(
        pristine, place, {"sgl-kernel/CMakeLists.txt": b"patched", "sgl-kernel/new": b"1", "sgl-kernel/build.sh": b"2"}
    )
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    copy(
        pristine,
        place,
        {"sgl-kernel/CMakeLists.txt": b"again", "sgl-kernel/build.sh": b"2", "sgl-kernel/pyproject.toml": None},
    )
    assert _look(place / "sgl-kernel")["CMakeLists.txt"] == b"again"
    assert set(_look(place / "sgl-kernel")) == COMPONENT - {"pyproject.toml"}
    assert os.access(place / "sgl-kernel" / "build.sh", os.X_OK)
    changed = {path.name for path in place.rglob("*") if path.is_file() and before[path] != path.stat().st_mtime_ns}
    assert changed == {"CMakeLists.txt"}
    assert _look(source) == FILES
    _fill(source, {"sgl-kernel/csrc/build/a.cu": b"meanwhile"})
    with pytest.raises(errors.PreflightError, match="was changed while"):
        copy(pristine, place, {})


def test_submodules_of_submodules_and_only_those_asked_for(tmp_path: Path, state: State, run: Run) -> None:
    deep, _ = _repository(tmp_path, "o/deep", {"d": b"deep"})
    _repository(tmp_path, "o/other", {"o": b"other"})
    middle = _fill(tmp_path / "work" / "middle", {"m": b"middle"})
    git(middle, "init", "--quiet")
    git(middle, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", f"file://{deep}", "sub/deep")
    commit_all(middle)
    bare(middle, tmp_path / "mirror" / "o" / "middle.git")
    top = _fill(tmp_path / "work" / "top", {"t": b"top"})
    git(top, "init", "--quiet")
    for name in ("middle", "other"):
        url = f"file://{tmp_path}/mirror/o/{name}.git"
        git(top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", url, f"third/{name}")
        git(top, "config", "--file=.gitmodules", f"submodule.third/{name}.url", f"../{name}.git")
    commit = commit_all(top)
    place = bare(top, tmp_path / "mirror" / "o" / "top.git")
    found = [_git("all", place, commit), _git("none", place, commit, submodules=False)]
    made = _check_out(_wanted(), [*found, _git("some", place, commit, submodules=("third/other",))], state, run)
    mine = {".gitmodules", "t"}
    assert set(_look(made["none"].path)) == mine
    assert set(_look(made["some"].path)) == mine | {"third/other/o"}
    nested = {"third/middle/.gitmodules", "third/middle/m", "third/middle/sub/deep/d"}
    assert set(_look(made["all"].path)) == mine | {"third/other/o"} | nested


def test_tags_branches_and_short_commits(tmp_path: Path, state: State, run: Run) -> None:
    place, commit = _repository(tmp_path, "o/n", {"a": b"1"})
    git(place, "tag", "v1")
    found = [_git("tag", place, "v1"), _git("branch", place, "main"), _git("short", place, commit[:9])]
    assert {one.revision for one in _check_out(_wanted(), found, state, run).values()} == {commit}
    work = _fill(tmp_path / "work" / "o" / "n", {"a": b"2"})
    newer = commit_all(work)
    git(work, "push", "--quiet", str(place), "HEAD:main")
    made = _check_out(_wanted(), found, state, run)
    assert (made["branch"].revision, made["tag"].revision) == (newer, commit)
    assert _look(made["branch"].path) == {"a": b"2"}
    git(place, "tag", "--delete", "v1")
    other = State(root=tmp_path / "other", runs=state.runs)  # has the newer commit alone
    _check_out(_wanted(), [_git("branch", place, "main")], other, run)
    assert _check_out(_wanted(), [_git("short", place, commit[:9])], other, run)["short"].revision == commit


def test_a_checkout_is_left_alone_while_it_is_right_and_made_again_when_it_was_interrupted(
    tmp_path: Path, state: State, run: Run
) -> None:
    place, commit = _repository(tmp_path, "o/n", {"a": b"1"})
    one = _check_out(_wanted(), [_git("n", place, commit)], state, run)["n"]
    _fill(one.path, {"a": b"patched by a build", "made": b""})
    place.rename(tmp_path / "gone")
    assert _check_out(_wanted(), [_git("n", place, commit)], state, run)["n"] == one
    assert _look(one.path) == {"a": b"patched by a build", "made": b""}
    (one.path.parent / ".n.checkout.json").unlink()
    (one.path.parent / ".n.part" / "half").mkdir(parents=True)
    assert _check_out(_wanted(), [_git("n", place, commit)], state, run)["n"] == one
    assert _look(one.path) == {"a": b"1"}
    assert {path.name for path in one.path.parent.iterdir()} == {"n", ".n.checkout.json"}


def test_an_interruption_before_the_mark_does_not_leave_an_older_one(
    tmp_path: Path, state: State, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, first = _repository(tmp_path, "o/n", {"a": b"1"})
    work = _fill(tmp_path / "work" / "o" / "n", {"a": b"2"})
    second = commit_all(work)
    git(work, "push", "--quiet", str(place), "HEAD:main")
    _check_out(_wanted(), [_git("n", place, first)], state, run)
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_json_atomic", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            _check_out(_wanted(), [_git("n", place, second)], state, run)
    assert _look(_check_out(_wanted(), [_git("n", place, first)], state, run)["n"].path) == {"a": b"1"}


def _interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_an_archive_is_fetched_once_and_goes_where_another_dependency_has_room_for_it(
    server: FileServer, state: State, run: Run
) -> None:
    outer, inner = _tar({"a": b"outer", "csrc/readme": b""}), _tar({"b": b"inner"})
    server.files = {"o/outer/archive/v1.tar.gz": outer, "inner.tar.xz": inner}
    found = [
        _archive("inner", server.url("inner.tar.xz"), _sha256(inner), inside="outer/csrc/inner"),
        _archive("outer", server.url("o/outer/archive/v1.tar.gz"), _sha256(outer)),
    ]
    made = _check_out(_wanted(), found, state, run)
    assert made["inner"].path == made["outer"].path / "csrc" / "inner"
    assert made["inner"].revision == _sha256(inner)
    assert _look(made["inner"].path) == {"b": b"inner"}
    asked = len(server.requests)
    shutil.rmtree(made["outer"].path)
    assert _check_out(_wanted(), found, state, run) == made
    assert _look(made["inner"].path) == {"b": b"inner"}
    assert len(server.requests) == asked


def test_an_archive_without_a_hash_is_asked_for_again_and_not_sent_again(
    server: FileServer, state: State, run: Run
) -> None:
    data = _tar({"a": b"1"})
    server.files["json.tar.xz"] = data
    found = [_archive("json", server.url("json.tar.xz"), None)]
    assert _check_out(_wanted(), found, state, run)["json"].revision == _sha256(data)
    sent = server.sent
    assert _check_out(_wanted(), found, state, run)["json"].revision == _sha256(data)
    assert server.sent == sent


def test_another_archive_than_the_one_asked_for(server: FileServer, state: State, run: Run) -> None:
    server.files["v1.tar.gz"] = b"another"
    with pytest.raises(errors.BinaryError, match=f"CMakeLists.txt:9 .* {'0' * 64}, found {_sha256(b'another')}$"):
        _check_out(_wanted(), [_archive("n", server.url("v1.tar.gz"), "0" * 64)], state, run)
    assert not (state.root / "deps" / "n").exists()


def test_an_archive_that_is_gone(server: FileServer, state: State, run: Run) -> None:
    with pytest.raises(errors.PreflightError, match=r"v1.tar.gz is gone") as caught:
        _check_out(_wanted(), [_archive("n", server.url("v1.tar.gz"), "0" * 64)], state, run)
    assert "CMakeLists.txt:9" in str(caught.value.where)
    assert "setup" not in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("url", "message", "tries"),
    [
        (f"{NOWHERE}/o/n", "name of the host example.invalid", 3),
        ("http://127.0.0.1:1/o/n", "127.0.0.1:1 cannot be reached, three times", 3),
        ("{server}o/n", "is no repository that can be read without a login", 1),
    ],
)
@pytest.mark.parametrize("login", [None, ("user", "word")])
def test_a_repository_that_cannot_be_had(
    server: FileServer, state: State, run: Run, url: str, message: str, tries: int, login: tuple[str, str] | None
) -> None:
    server.user = login
    with pytest.raises(errors.PreflightError, match=message) as caught:
        _check_out(_wanted(), [_git("n", url.format(server=server.url()), "1" * 40)], state, run)
    assert caught.value.where == "CMakeLists.txt:7"
    assert _fetches(run) == tries
    assert not (state.root / "deps").exists()


@pytest.mark.parametrize(("url", "revision"), [("ext::touch x", "v1"), ("-u", "v1"), (f"{NOWHERE}/o/n", "--force")])
def test_nothing_becomes_an_option_or_a_command(state: State, run: Run, url: str, revision: str) -> None:
    with pytest.raises(errors.PreflightError, match="is no"):
        _check_out(_wanted(), [_git("n", url, revision)], state, run)


def test_git_reads_the_network_only_where_it_may_and_runs_no_command(server: FileServer, tmp_path: Path) -> None:
    assert Git(None, network=False).work(["ls-remote", server.url("o/n")]).returncode
    assert not server.requests
    Git(None, network=True).work(["ls-remote", server.url("o/n")])
    assert server.requests
    assert Git(None, network=True).work(["ls-remote", f"ext::touch {tmp_path}/made"]).returncode
    assert not (tmp_path / "made").exists()


def test_a_password_is_in_no_record(state: State, run: Run) -> None:
    url = "http://user:hidden-word@127.0.0.1:1/o/n"
    with pytest.raises(errors.PreflightError) as caught:
        _check_out(_wanted(), [_git("n", url, "1" * 40)], state, run)
    assert "hidden-word" not in f"{caught.value.message} {caught.value.where} {caught.value.remedy}"
    for path in [*state.root.rglob("*"), *run.path.rglob("*")]:
        assert not path.is_file() or b"hidden-word" not in path.read_bytes()


def test_a_mirror_stands_for_the_network(tmp_path: Path, state: State, run: Run, upstream: Path) -> None:
    mirror = tmp_path / "mirror"
    _, plain = _repository(tmp_path, "o/plain", {"a": b"git"})
    forge, stead = _repository(tmp_path, "example.invalid/o/stead", {"a": b"the mirror's commit"})
    git(forge, "tag", "v1")
    shutil.copytree(upstream, mirror / "sglang.git")
    data = _tar({"a": b"archive"})
    _fill(mirror, {"archives/o-packed-v1.tar.gz": data, "v1.tar.gz": b"another project's"})
    wanted = _wanted(f"{NOWHERE}/sgl-project/sglang", "v1", mirror=mirror)
    assert "from the mirror" in _obtain(wanted, state, run).origin
    found = [
        _git("plain", f"{NOWHERE}/o/plain", plain),
        _archive("packed", f"{NOWHERE}/o/packed/archive/v1.tar.gz", _sha256(data)),
        _archive("stead", f"{NOWHERE}/o/stead/archive/v1.tar.gz", "0" * 64),
        _archive("stead-too", f"{NOWHERE}/o/stead/archive/{stead}.tar.gz", "0" * 64),
    ]
    made = _check_out(wanted, found, state, run)
    assert {name: one.how for name, one in made.items()} == {
        "plain": "git",
        "packed": "archive",
        "stead": "mirror",
        "stead-too": "mirror",
    }
    assert (made["plain"].revision, made["stead"].revision) == (plain, stead)
    assert _look(made["packed"].path) == {"a": b"archive"}
    assert _look(made["stead"].path) == {"a": b"the mirror's commit"}


def test_all_that_a_mirror_lacks_is_told_at_once(tmp_path: Path, state: State, run: Run) -> None:
    place, _ = _repository(tmp_path, "o/there", {"a": b"1"})
    found = [
        _git("one", f"{NOWHERE}/o/one", "v1"),
        _git("there", f"{NOWHERE}/o/there", "1" * 40),
        _archive("three", f"{NOWHERE}/o/three/archive/v3.tar.gz", "0" * 64),
    ]
    with pytest.raises(errors.PreflightError) as caught:
        _check_out(_wanted(mirror=tmp_path / "mirror"), found, state, run)
    said = caught.value.message
    assert f"one: {NOWHERE}/o/one at v1 (looked for example.invalid/o/one.git," in said
    assert f"there: {NOWHERE}/o/there at {'1' * 40} ({place} has no such commit)" in said
    assert "o-three-v3.tar.gz, v3.tar.gz, example.invalid/o/three.git" in said
    assert f"git clone --mirror {NOWHERE}/o/one {tmp_path}/mirror/o/one.git" in str(caught.value.remedy)


def test_a_mirror_without_the_source(tmp_path: Path, state: State, run: Run) -> None:
    with pytest.raises(errors.PreflightError, match=r"lacks the source: .* looked for example.invalid/o/sglang.git"):
        _obtain(_wanted(f"{NOWHERE}/o/sglang", "v1", mirror=tmp_path), state, run)


def test_a_mirror_with_only_another_archive_of_that_name(tmp_path: Path, state: State, run: Run) -> None:
    _fill(tmp_path / "mirror", {"a.tar.gz": b"another"})
    with pytest.raises(errors.BinaryError, match=f"a.tar.gz is not .* found {_sha256(b'another')}"):
        _check_out(_wanted(mirror=tmp_path / "mirror"), [_archive("n", f"{NOWHERE}/a.tar.gz", "0" * 64)], state, run)


def test_a_damaged_mirror(tmp_path: Path, state: State, run: Run) -> None:
    place, commit = _repository(tmp_path, "o/n", {"a": b"1", "b": b"2"})
    blob = git(place, "rev-parse", f"{commit}:b")
    lost = place / "objects" / blob[:2] / blob[2:]
    lost.unlink()
    with pytest.raises(errors.PreflightError, match=rf"mirror .*/o/n.git is damaged: .* {commit[:12]} .*{blob}"):
        _check_out(_wanted(mirror=tmp_path / "mirror"), [_git("n", f"{NOWHERE}/o/n", commit)], state, run)
    assert not (state.root / "deps").exists()


def test_folders_that_were_given_are_copied_and_stay_as_they_are(tmp_path: Path, state: State, run: Run) -> None:
    mine = _fill(tmp_path / "mine", {"a": b"1", "build/b": b"2", ".git/config": b""})
    found = [_git("repo-a", f"{NOWHERE}/o/a", "v1"), Dependency(name="repo-c", kind="cmake", place="x:1", reason="why")]
    given = {"repo-a": mine, "json": mine, "repo-c": mine}
    made = _check_out(_wanted(given=given), found, state, run)
    assert {one.how for one in made.values()} == {"given"}
    assert set(made) == {"repo-a", "json", "repo-c"}
    assert _look(made["json"].path) == {"a": b"1", "build/b": b"2"}
    _fill(made["json"].path, {"a": b"a build wrote this"})
    _fill(mine, {"c": b"3"})
    again = _check_out(_wanted(given=given), found, state, run)
    assert again["json"].revision != made["json"].revision
    assert _look(again["json"].path) == {"a": b"1", "build/b": b"2", "c": b"3"}
    assert _look(mine) == {"a": b"1", "build/b": b"2", "c": b"3"}


def test_what_is_left_to_cmake_is_told(state: State, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Dependency(name="a", kind="cmake", place="x:1", reason="its argument PATCH_COMMAND is CMake's to understand"),
        _archive("b", f"{NOWHERE}/v1.tar.gz", "0" * 64, inside="a/b"),
    ]
    assert _check_out(_wanted(), found, state, run) == {}
    said = capsys.readouterr().out
    assert "a: left to CMake (its argument PATCH_COMMAND" in said
    assert "b: left to CMake (it goes into a" in said


def test_given_folders_that_are_none_are_all_told(tmp_path: Path, state: State, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.PreflightError, match=r"a=.*/none is no folder; b=.*/empty is empty"):
        _check_out(_wanted(given={"a": tmp_path / "none", "b": tmp_path / "empty"}), [], state, run)


def test_without_git(upstream: Path, tmp_path: Path, state: State, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from sm120.build.source import git as module

    module._check_installed.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(errors.PreflightError, match="git is not installed") as caught:
        _obtain(_wanted(f"file://{upstream}", "v1"), state, run)
    assert "apt install git" in str(caught.value.remedy)
    source = _fill(tmp_path / "unpacked", FILES)
    assert _obtain(_wanted(folder=source), state, run).commit is None
