"""One child: started with the right environment, watched, and ended; its outcome."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sm120
from sm120 import files, process
from sm120.errors import PreflightError
from sm120.host.links.outcome import Collector, Outcome, OutOfMemory, judge
from sm120.host.links.plan import AS_SGLANG, FULL, GOVERNED, Effort, Setting
from sm120.runs import Run

_SOURCE: Final = Path(sm120.__file__).resolve().parents[1]
_GRACE: Final = 3.0  # seconds; the supervisor kills its ranks at the first word


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where children come from. ``variables`` are the stack's own."""

    python: Path
    run: Run
    device: str  # cuda; cpu stands in for it in tests: gloo, and the host's memory for all
    effort: Effort = FULL
    variables: Mapping[str, str]

    def child(self, name: str, gpus: Sequence[str], request: Mapping[str, Any], setting: Setting | None) -> Outcome:
        """Runs one child to its end, whatever that is. PreflightError where the GPUs lack memory for it."""
        ranks = int(request["ranks"])
        env = self._environment(gpus, ranks, setting)
        collector = Collector()
        with tempfile.TemporaryDirectory(prefix="sm120-links-") as folder:
            path = Path(folder) / "request.json"
            limits = {"start": self.effort.start, "quiet": self.effort.quiet}
            common = {"device": self.device, "parent": os.getpid(), "store": str(Path(folder) / "store"), "seed": 0}
            files.write_json_atomic(path, {**common, **limits, **request})
            done = process.run(
                [str(self.python), "-m", "sm120_cells.links", str(path)],
                cwd=Path(folder),
                env=env,
                timeout=self.effort.total,
                log=self.run.log_path(f"links-{name}"),
                on_line=collector,
                grace=_GRACE,
            )
        self.run.record_command(done, env=env)
        try:
            return judge(collector, done, ranks)
        except OutOfMemory as error:
            raise PreflightError(
                f"the check of the links ran out of memory: {error}",
                where=str(self.run.log_path(f"links-{name}")),
                remedy="stop what else uses the GPUs (nvidia-smi lists it), then: scripts/inv doctor --links",
            ) from error

    def _environment(self, gpus: Sequence[str], ranks: int, setting: Setting | None) -> dict[str, str]:
        """Ours, without what a setting decides, and hygienic as a worker's of the matrix."""
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        base = {name: value for name, value in os.environ.items() if name not in GOVERNED or setting is None}
        return {
            **AS_SGLANG,
            "OMP_NUM_THREADS": threads,
            **base,
            **self.variables,
            **({} if setting is None else setting.variables),
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus and self.device == "cuda" else {}),
            **({"GLOO_SOCKET_IFNAME": "lo"} if self.device == "cpu" else {}),
            "PYTHONPATH": str(_SOURCE),
            "PYTHONSAFEPATH": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONUNBUFFERED": "1",
        }
