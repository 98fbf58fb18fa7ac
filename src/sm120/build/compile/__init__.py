"""Configure → compile → wheel, by scikit-build-core's backend in the stack's Python."""

from sm120.build.compile.build import Compiled, Job, compile_wheel
from sm120.build.compile.jobs import Jobs, plan_jobs
from sm120.build.compile.remember import remember, remembered

__all__ = ["Compiled", "Job", "Jobs", "compile_wheel", "plan_jobs", "remember", "remembered"]
