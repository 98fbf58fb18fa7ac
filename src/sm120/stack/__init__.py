"""What is installed to run kernels: stack file → lock → environment, or an interpreter that is adopted."""

from sm120.stack.install.environment import ensure_environment, look
from sm120.stack.install.record import Environment
from sm120.stack.selection import selected
from sm120.stack.spec import Stack, load_stack

__all__ = ["Environment", "Stack", "ensure_environment", "load_stack", "look", "selected"]
