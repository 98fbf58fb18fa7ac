"""How many compilers run at a time, and why."""

from dataclasses import dataclass, replace

_GB = 1e9
_MOST_THREADS = 2  # nvcc's own threads help over architectures alone, and each needs memory of its own


@dataclass(frozen=True, kw_only=True)
class Jobs:
    jobs: int
    threads: int  # of one nvcc
    reason: str
    estimate_gb: float  # per nvcc thread
    tight: bool = False  # the memory may not be enough for them


def plan_jobs(
    *, cores: int, available: int, architectures: int, gb_per_thread: float, asked: int | None, measured: bool
) -> Jobs:
    """``available`` is in bytes; ``asked`` is what the user wants, whatever cores and memory say."""
    threads = max(1, min(architectures, _MOST_THREADS))
    each = gb_per_thread * threads
    free = available / _GB
    fitting = int(free / each)
    by_cores = max(1, cores // threads)
    need = f"{each:.1f} GB each{', as measured here' if measured else ''}"
    if asked is not None:
        jobs, reason = asked, f", as asked: {free:.1f} GB available would allow {fitting} at {need}"
    elif fitting < 1:
        jobs, reason = 1, f": {free:.1f} GB available, and a job may need {each:.1f} GB"
    elif by_cores <= fitting:
        jobs, reason = by_cores, f": {_count(cores, 'core')}; {free:.1f} GB available would allow {fitting} at {need}"
    else:
        jobs, reason = fitting, f": {free:.1f} GB available at {need}; {_count(cores, 'core')} would allow {by_cores}"
    work = _count(jobs, "job") + ("" if threads == 1 else f" of {threads} threads")
    return Jobs(jobs=jobs, threads=threads, reason=work + reason, estimate_gb=gb_per_thread, tight=jobs > fitting)


def halved(jobs: Jobs) -> Jobs:
    half = max(1, jobs.jobs // 2)
    return replace(jobs, jobs=half, reason=f"{_count(half, 'job')}: {jobs.jobs} ran out of memory", tight=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
