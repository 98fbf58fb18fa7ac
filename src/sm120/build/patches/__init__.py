"""Patches to sgl-kernel's build files: rules on CMake's structure, and plain diffs, in a series.

A patch works on a copy of the source tree that the build made, never on a checkout of the user's.
"""

from sm120.build.patches.engine import apply, examine, propose, refusal
from sm120.build.patches.outcome import COLUMNS, Applied, Context, Outcome, State, rows
from sm120.build.patches.series import FOLDER, Patch, Series, load_series
from sm120.build.patches.tree import Layout, detect_layout

__all__ = [
    "COLUMNS",
    "FOLDER",
    "Applied",
    "Context",
    "Layout",
    "Outcome",
    "Patch",
    "Series",
    "State",
    "apply",
    "detect_layout",
    "examine",
    "load_series",
    "propose",
    "refusal",
    "rows",
]
