"""``dev.patches``: the patch series on every version of the build files in a repository's history."""

from dataclasses import asdict, dataclass
from pathlib import Path

from sm120 import errors
from sm120.build.patches import load_series
from sm120.build.patches.corpus import COLUMNS, corpus
from sm120.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    repository: Path | None = None
    since: str = "2025-09-01"


def patches(options: Options) -> None:
    """Counts for each patch how often it applied, was upstream or not needed. PatchError when one conflicts."""
    if options.repository is None:
        raise errors.UsageError(
            "--repository is missing", remedy="name a git repository with SGLang's history: --repository DIR"
        )
    console = Console.current()
    with console.step(f"trying every version since {options.since} in {options.repository}"):
        counts = corpus(options.repository, load_series(), since=options.since)
    console.table(f"{counts.versions} versions of the build files × {counts.contexts} contexts", COLUMNS, counts.rows())
    for conflict in counts.conflicts:
        console.info(f"{conflict.commit[:12]} {conflict.folder}: {conflict.patch}: {conflict.where}: {conflict.reason}")
    console.result(
        {
            "schema": 1,
            "versions": counts.versions,
            "contexts": counts.contexts,
            "patches": {name: dict(zip(COLUMNS[1:], row, strict=True)) for name, *row in counts.rows()},
            "conflicts": [asdict(conflict) for conflict in counts.conflicts],
        }
    )
    if counts.conflicts:
        raise errors.PatchError(f"{len(counts.conflicts)} conflicts", where=str(options.repository))
