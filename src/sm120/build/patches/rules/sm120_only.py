"""Only the asked architectures are compiled, and only the targets that hold code for them."""

import re
from collections.abc import Sequence

from sm120.build.patches.outcome import ARCHITECTURES, Context, State, Verdict, conflict, upstream
from sm120.build.patches.rules import standin
from sm120.build.patches.rules.gencode import Gencodes, Unknown, family
from sm120.build.patches.rules.leave_out import leave_out
from sm120.build.patches.rules.parameters import Parameter, Parameters, is_table_of
from sm120.build.patches.source import Edit
from sm120.build.patches.targets import Project
from sm120.build.patches.tree import Tree

PARAMETERS = {
    "twins": Parameter(what="for each target a table of the texts of and because", right=is_table_of("of", "because"))
}
SM120 = 12
Twins = dict[str, dict[str, str]]  # a target → "of": the one that is loaded in its place, "because": why


def judge(tree: Tree, context: Context, parameters: Parameters) -> Verdict:
    main = tree.main
    for arch in context.architectures:
        if context.cuda < ARCHITECTURES[arch]:
            return conflict(
                f"CUDA {context.cuda} cannot compile for sm_{arch}; {ARCHITECTURES[arch]} can", main.where(0)
            )
    project = Project(tree.build_files())
    try:
        return _judge(tree, project, context.architectures, dict(parameters["twins"]))
    except Unknown as error:
        return conflict(error.reason, error.where)


def _judge(tree: Tree, project: Project, asked: Sequence[str], twins: Twins) -> Verdict:
    gencodes = Gencodes(project)
    if not gencodes.sites:
        return conflict("no -gencode to reduce: the tree chooses its architectures in another way", tree.main.where(0))
    reasons = _reasons(project, gencodes, twins)
    removal = leave_out(project, tree.main, reasons)
    kept = {target.name for target in project.targets} - set(reasons)
    edits = list(removal.edits)
    gone = {file.path for file in removal.dropped}
    edits += [edit for edit in gencodes.reduced(asked, kept) if edit.path not in gone]
    written: dict[str, str] = {}
    for target in project.targets:
        if target.name in reasons and target.name not in twins:
            written |= standin.modules(tree, project, target, reasons[target.name])
    for path, text in written.items():
        if tree.bytes_of(path) not in {None, text.encode()}:  # ours, when an application was cut off
            return conflict("a module stands where the one for a target that is left out would go", f"{path}:1")
    names = "".join(f" sm_{arch}" for arch in asked).strip()
    if not edits:
        return upstream(f"the tree compiles for {names} alone", *(site.where for site in gencodes.sites))
    edits = _without_inner(edits)
    _prove(tree.with_edits(edits, written), asked, set(reasons))
    where = [site.where for site in gencodes.sites if site.arch not in asked and site.file.path not in gone]
    out = [target.file.where(target.defined.start) for target in project.targets if target.name in reasons]
    told = "; ".join(f"without {name}: {why}" for name, why in reasons.items())
    return Verdict(
        state=State.PENDING,
        reason=f"compiled for {names} alone" + (f"; {told}" if told else ""),
        where=tuple(out + where),
        edits=tuple(edits),
        written=written,
        left_out=tuple(reasons),
    )


def _reasons(project: Project, gencodes: Gencodes, twins: Twins) -> dict[str, str]:
    """The targets to leave out: those that the tree compiles for other families only, and the twins it lists."""
    names = {target.name for target in project.targets}
    found = {}
    for target in project.targets:
        archs = gencodes.of(target)
        if archs and not any(family(arch) == SM120 for arch in archs):
            found[target.name] = f"its code is for {', '.join(f'sm_{arch}' for arch in archs)} only"
        elif target.name in twins and twins[target.name]["of"] in names:
            found[target.name] = twins[target.name]["because"]
    return found


def _without_inner(edits: list[Edit]) -> list[Edit]:
    """A flag inside a command that goes as a whole needs no edit of its own."""
    return [
        edit
        for edit in edits
        if not any(
            other is not edit and other.path == edit.path and other.start <= edit.start and edit.end <= other.end
            for other in edits
        )
    ]


def _prove(tree: Tree, asked: Sequence[str], out: set[str]) -> None:
    """What the edits promise holds for the edited tree, read anew. Raises Unknown."""
    project = Project(tree.build_files())
    gencodes = Gencodes(project)
    for site in gencodes.sites:
        if site.arch not in asked:
            raise Unknown(site.where, f"sm_{site.arch} would still be compiled for")
    for file in project.files:
        for command in file.commands:
            if command.name not in {"if", "elseif"} and out & set(command.values):
                raise Unknown(file.where(command.start), f"{command.name}() would still name what is left out")
    for target in project.targets:
        archs = gencodes.of(target)
        if archs and archs != list(asked):
            raise Unknown(target.file.where(target.defined.start), f"{target.name} would be compiled for {archs}")
    if not re.search("|".join(asked), " ".join(site.arch for site in gencodes.sites)):
        raise Unknown(tree.main.where(0), "nothing would be compiled for what is asked")
