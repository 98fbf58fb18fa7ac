"""The entry of supervisor and rank."""

import json
import signal
import sys
from pathlib import Path

from sm120_cells.links.supervisor import RANK_FLAG, die_with_parent, supervise


def main(words: list[str]) -> int:
    """``REQUEST`` supervises; with ``--rank R DESCRIPTOR PARENT`` it is a rank, and writes messages to DESCRIPTOR."""
    path = Path(words[0])
    request = json.loads(path.read_text(encoding="utf-8"))
    if words[1:2] != [RANK_FLAG]:
        return supervise(path, request)
    number, descriptor, parent = (int(word) for word in words[2:5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor gets it too, and ends its ranks
    die_with_parent(parent)
    from sm120_cells.links.rank import run  # with torch, which the supervisor does without

    return run(request, number, descriptor)


sys.exit(main(sys.argv[1:]))
