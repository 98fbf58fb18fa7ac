"""What is installed to run kernels: stack file → environment with a lock."""

from sm120.stack.environment import Environment, ensure_environment
from sm120.stack.spec import Stack, load_stack

__all__ = ["Environment", "Stack", "ensure_environment", "load_stack"]
