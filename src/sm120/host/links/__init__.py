"""Are the links between GPUs right, and which NCCL setting is fastest among those that are right?

Copies between GPUs can arrive wrong while every call reports success, and the first all-reduce can hang although the
driver says that peers can reach each other. So both are tried, in children with time limits, and what arrives is
compared on the host.
"""

from sm120.host.links.choice import choose
from sm120.host.links.examine import check
from sm120.host.links.outcome import Outcome, Timing, Verdict
from sm120.host.links.plan import Setting, candidates
from sm120.host.links.report import COLUMNS, PAIR_COLUMNS, GroupResult, Key, LinkReport, PairResult, SettingResult
from sm120.host.links.store import load_links

__all__ = [
    "COLUMNS",
    "PAIR_COLUMNS",
    "GroupResult",
    "Key",
    "LinkReport",
    "Outcome",
    "PairResult",
    "Setting",
    "SettingResult",
    "Timing",
    "Verdict",
    "candidates",
    "check",
    "choose",
    "load_links",
]
