"""From a lock to an environment that is proven; or one that exists, adopted."""
