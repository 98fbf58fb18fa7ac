"""Host compilers are told of ``include/cccl``, where CUDA 13 keeps CCCL. nvcc looks there by itself."""

from sm120.build.patches.language import Command
from sm120.build.patches.outcome import Context, State, Verdict, conflict, not_needed, upstream
from sm120.build.patches.rules.parameters import Parameter, Parameters
from sm120.build.patches.source import BuildFile
from sm120.build.patches.targets import Project
from sm120.build.patches.tree import Tree

PARAMETERS: dict[str, Parameter] = {}
MARK = "# sm120: cuda13-cccl-include"
ENVIRONMENT = dict.fromkeys(("CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"), "{cuda}/include/cccl")
_DEFINES = {
    "python_add_library",
    "add_library",
    "pybind11_add_module",
    "add_subdirectory",
    "fetchcontent_makeavailable",
}
# Of the host languages only: nvcc keeps its own order of include folders. FetchContent's projects inherit it.
_LINES = (
    f"foreach(sm120_include IN LISTS CUDAToolkit_INCLUDE_DIRS)  {MARK}",
    '    if(EXISTS "${sm120_include}/cccl/cuda/std/utility")',
    '        include_directories(SYSTEM "$<$<COMPILE_LANGUAGE:C,CXX>:${sm120_include}/cccl>")',
    "    endif()",
    "endforeach()",
)


def judge(tree: Tree, context: Context, parameters: Parameters) -> Verdict:  # noqa: ARG001 - the form of a rule
    main = tree.main
    project = Project(tree.build_files())
    outside = [file.where(c.start) for file, c in project.commands("externalproject_add")]
    building = _first_building(main)
    if not project.targets and building is None and not outside:
        return not_needed("the tree compiles nothing")
    shared = [file.where(c.start) for file, c in project.commands("include_directories") if _finds_cccl(c)]
    bare = [target for target in project.targets if not _covered(project, target.name)]
    reason = "CUDA 13 keeps <cuda/…> below include/cccl, where a host compiler does not look"
    if outside:
        reason += "; a project of its own is built too, so the environment carries it as well"
    environment = ENVIRONMENT if outside else {}
    if shared or (project.targets and not bare):
        if outside:
            return Verdict(state=State.PENDING, reason=reason, where=tuple(outside), environment=environment)
        return upstream("every target finds include/cccl", *shared)
    where = tuple(target.file.where(target.defined.start) for target in bare)
    anchor = next((c for c in main.named("find_package") if c.values[:1] == ("CUDAToolkit",) and not c.inside), None)
    if anchor is not None and (building is None or anchor.start < building.start):
        edit = main.insert_after(anchor, _LINES)
        return Verdict(state=State.PENDING, reason=reason, where=where, edits=(edit,), environment=environment)
    if "CUDA" not in {word for c in main.named("project", "enable_language") for word in c.values}:
        return conflict("no CUDA toolkit is looked for before the first target, and CUDA is not enabled", main.where(0))
    reason += "; the tree looks for no CUDA toolkit to take the folder from, so the environment carries it"
    return Verdict(state=State.PENDING, reason=reason, where=where, environment=ENVIRONMENT)


def _first_building(main: BuildFile) -> Command | None:
    return next((command for command in main.commands if command.name in _DEFINES), None)


def _covered(project: Project, target: str) -> bool:
    about = project.about(target, "target_include_directories", "target_link_libraries")
    return any(_finds_cccl(command) for _, command in about)


def _finds_cccl(command: Command) -> bool:
    """A path written out (/usr/local/cuda/include/cccl) holds on its author's machine only."""
    values = command.values if command.name == "include_directories" else command.values[1:]
    return any("cccl" in value.lower() and not value.startswith("/") for value in values)
