"""What the files of an environment really are: libraries, RECORDs, wheels. Names prove nothing, files do."""

from sm120.host.binaries.libraries import kernel_libraries
from sm120.host.binaries.records import clashes
from sm120.host.binaries.wheels import wheel_facts

__all__ = ["clashes", "kernel_libraries", "wheel_facts"]
