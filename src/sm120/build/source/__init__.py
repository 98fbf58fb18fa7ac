"""From "which source" to a private copy of it, patched, and private checkouts of what its build files ask for."""

from sm120.build.source.checkouts import check_out
from sm120.build.source.declared import dependencies
from sm120.build.source.mirror import git_environment
from sm120.build.source.model import Checkout, Dependency, Pristine, Wanted
from sm120.build.source.obtain import copy, obtain

__all__ = [
    "Checkout",
    "Dependency",
    "Pristine",
    "Wanted",
    "check_out",
    "copy",
    "dependencies",
    "git_environment",
    "obtain",
]
