"""``CMAKE_POLICY_VERSION_MINIMUM`` for a tree that configures the project of a dependency, which may be an old one."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from sm120.build.patches.language import Command
from sm120.build.patches.outcome import Context, State, Verdict, conflict, not_needed, upstream
from sm120.build.patches.rules.parameters import Parameter, Parameters, is_version
from sm120.build.patches.source import BuildFile
from sm120.build.patches.targets import references, within
from sm120.build.patches.tree import Tree

PARAMETERS = {"minimum": Parameter(what="a version of CMake, as text", right=is_version)}
VARIABLE = "CMAKE_POLICY_VERSION_MINIMUM"
MARK = "# sm120: cmake-policy-minimum"


def judge(tree: Tree, context: Context, parameters: Parameters) -> Verdict:  # noqa: ARG001 - the form of a rule
    minimum = str(parameters["minimum"])
    main = tree.main
    foreign = [(file, command) for file in tree.build_files() for command in _foreign(file)]
    if not foreign:
        return not_needed("dependencies are only fetched: the tree configures no project but its own")
    where = tuple(file.where(command.start) for file, command in foreign)
    first = next((command for file, command in foreign if file is main), None)
    for command in main.named("set"):
        if command.values[:1] != (VARIABLE,) or (first is not None and command.start > first.start):
            continue
        if not command.inside and _at_least(command.values[1:2], minimum):
            return upstream(f"the tree sets {VARIABLE} itself", main.where(command.start))
    project = next(main.named("project"), None)
    if project is None or project.inside or (first is not None and not within(project, first)):
        return conflict("there is no project() to put the setting behind", main.where(0))
    line = f"set({VARIABLE} {minimum})  {MARK}"
    reason = (
        f"the project of a dependency may ask for a CMake that version 4 refuses; {VARIABLE}={minimum} lets it pass"
    )
    edit = main.insert_after(project, [line])
    return Verdict(state=State.PENDING, reason=reason, where=where, edits=(edit,))


def _foreign(file: BuildFile) -> Iterator[Command]:
    """Commands that let CMake read the build files of a dependency. FetchContent_Populate only fetches."""
    for command in file.named("add_subdirectory", "fetchcontent_makeavailable"):
        names = references(" ".join(command.values[:1]))
        fetched = any(name.endswith("_SOURCE_DIR") and name[0].islower() for name in names)
        if fetched or command.name == "fetchcontent_makeavailable":
            yield command


def _at_least(values: tuple[str, ...], minimum: str) -> bool:
    try:
        return bool(values) and Version(values[0]) >= Version(minimum)
    except InvalidVersion:
        return False
