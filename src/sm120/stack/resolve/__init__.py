"""From a stack to its lock: what the machine's package indexes offer, and what of it fits together."""
