"""A series on a tree: what each patch would do, one upon the other, all in memory; then all of it written, or nothing.

The tree is a copy that the caller made for the build. A checkout of the user's is never given to ``apply``.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm120 import errors
from sm120.build.patches import gitdiff, ledger
from sm120.build.patches.ledger import Ledger
from sm120.build.patches.outcome import Applied, Context, Outcome, State, Verdict, conflict, not_needed
from sm120.build.patches.rules import RULES
from sm120.build.patches.series import Patch, Series
from sm120.build.patches.tree import Broken, Tree, detect_layout, reader
from sm120.build.patches.write import write_all


def examine(series: Series, root: Path, context: Context) -> tuple[Outcome, ...]:
    """The state of each patch on the tree at ``root``. Raises PatchError when it is no source tree of sgl-kernel."""
    return propose(series, root, context).outcomes


def propose(series: Series, root: Path, context: Context) -> Applied:
    """What ``apply`` would make of the tree, with the diff. Nothing is written, and a conflict is an outcome."""
    return propose_for(series, Tree(reader(root), detect_layout(root)), context)


def apply(series: Series, root: Path, context: Context) -> Applied:
    """Patches the tree at ``root``, a copy that the build owns. One conflict and nothing is written: PatchError.

    A second application changes nothing.
    """
    layout = detect_layout(root)
    made = propose_for(series, Tree(reader(root), layout), context)
    if made.conflicts:
        raise refusal(made, root)
    if made.changes:
        tree = Tree(reader(root), layout)
        text = ledger.text_of(tree, series.patches, made)
        # Not believed before the files are as it says; and what is new goes before what makes a rule content.
        added = {path: data for path, data in made.changes.items() if tree.original(path) is None}
        write_all(root, {layout.path(ledger.NAME): text.encode(), **added, **made.changes})
    return made


def propose_for(series: Series, tree: Tree, context: Context) -> Applied:
    """As ``propose``, on a tree however it is read."""
    known = ledger.read(tree)
    outcomes = []
    now = tree
    for patch in series.patches:
        outcome, now = _step(patch, now, context, known)
        outcomes.append(outcome)
    changes = {path: data for path, data in now.changes.items() if data != tree.original(path)}
    environment: dict[str, str] = {}
    for outcome in outcomes:
        environment |= outcome.environment
    return Applied(
        outcomes=tuple(outcomes),
        series=series.sha256,
        diff=unified_diff(tree, changes),
        environment=environment,
        left_out=tuple(dict.fromkeys(target for outcome in outcomes for target in outcome.left_out)),
        changes=changes,
    )


def _step(patch: Patch, tree: Tree, context: Context, known: Ledger) -> tuple[Outcome, Tree]:
    """The outcome of one patch, and the tree after it."""
    after = tree
    try:
        verdict = _unfit(patch, context)
        if verdict is None and patch.rule is not None:
            verdict = RULES[patch.rule].judge(tree, context, patch.parameters)
            after = tree.with_edits(verdict.edits, verdict.written)
        elif verdict is None:
            verdict, after = _by_git(patch, tree, known)
    except Broken as error:
        verdict, after = conflict(error.reason, error.where), tree
    state, left_out = verdict.state, verdict.left_out
    if state is State.UPSTREAM and known.holds(patch):
        state, left_out = State.APPLIED, known.left_out.get(patch.name, ())
    outcome = Outcome(
        patch=patch.name,
        title=patch.title,
        state=state,
        reason=verdict.reason,
        where=_as_read(tree, verdict.where),
        edits=len(verdict.edits) + len(verdict.written) or len(after.changes.keys() - tree.changes.keys()),
        environment=verdict.environment,
        left_out=left_out,
    )
    return outcome, after


def _as_read(tree: Tree, places: tuple[str, ...]) -> tuple[str, ...]:
    """Lines that a rule saw, in the numbering of the files on the disk: earlier patches may have moved them."""
    made = []
    moves: dict[str, Sequence[tuple[str, int, int, int, int]]] = {}
    for place in places:
        path, _, line = place.rpartition(":")
        old, new = tree.original(path) if path in tree.changes else None, tree.changes.get(path)
        if old is None or new is None or not line.isdigit():
            made.append(place)
            continue
        if path not in moves:
            lines = old.split(b"\n"), new.split(b"\n")
            moves[path] = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
        made.append(f"{path}:{_old_line(moves[path], int(line) - 1) + 1}")
    return tuple(made)


def _old_line(moves: Sequence[tuple[str, int, int, int, int]], number: int) -> int:
    for kind, old, _, new, new_end in moves:
        if new <= number < new_end:
            return old + number - new if kind == "equal" else old
    return number


def _unfit(patch: Patch, context: Context) -> Verdict | None:
    """The patch is for other versions than these."""
    for subject, wanted in patch.applies.items():
        version = context.version(subject)
        if version is None:
            return not_needed(f"for {subject} {wanted}; which one will be used is not known")
        if version not in wanted:
            return not_needed(f"for {subject} {wanted}; this is {version}")
    return None


def _by_git(patch: Patch, tree: Tree, known: Ledger) -> tuple[Verdict, Tree]:
    folder = tree.layout.folder if patch.base == "component" else ""
    held = "the tree holds the diff already"
    if known.holds(patch):
        return Verdict(state=State.APPLIED, reason=held), tree
    label = patch.diff_path.name if patch.diff_path else patch.name
    try:
        changes = gitdiff.apply_diff(tree, patch.diff or b"", folder, label)
    except gitdiff.Refused as error:
        return conflict(error.reason, error.where), tree
    if changes is None:
        return Verdict(state=State.APPLIED, reason=held), tree
    where = tuple(f"{path}:1" for path in changes)
    files_ = "file" if len(changes) == 1 else "files"
    reason = f"{label} changes {len(changes)} {files_}"
    return Verdict(state=State.PENDING, reason=reason, where=where), tree.with_changes(changes)


def unified_diff(tree: Tree, changes: Mapping[str, bytes | None]) -> str:
    """As git writes it, so that ``git apply`` takes it."""
    return "".join(_diff(path, tree.original(path), changes[path]) for path in sorted(changes))


def _diff(path: str, old: bytes | None, new: bytes | None) -> str:
    before = f"a/{path}" if old is not None else "/dev/null"
    after = f"b/{path}" if new is not None else "/dev/null"
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    lines = difflib.unified_diff(_lines(old), _lines(new), before, after)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{mode}" + "".join(ended)


def _lines(data: bytes | None) -> list[str]:
    """Split at line feeds alone: a carriage return or a form feed is a part of its line."""
    text = (data or b"").decode("utf-8", "surrogateescape")
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def refusal(made: Applied, root: Path) -> errors.PatchError:
    """The error for a series that has conflicts on the tree at ``root``."""
    told = "; ".join(f"{o.patch}: {', '.join(o.where)}: {o.reason}" for o in made.conflicts)
    names = " and ".join(outcome.patch for outcome in made.conflicts)
    return errors.PatchError(
        f"{told}. Nothing was changed in {root}",
        where=next((place for outcome in made.conflicts for place in outcome.where), str(root)),
        remedy=f"scripts/inv build-kernels --patches shows all of them; take {names} out of "
        "patches/sgl-kernel/series.toml, or build a commit that the series knows",
    )
