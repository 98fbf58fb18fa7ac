"""Development tasks: lint, types, tests, benchmarks of the toolkit itself."""
