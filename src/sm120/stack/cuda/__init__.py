"""A CUDA toolkit made of wheels: a home of links that behaves like an installed one."""
