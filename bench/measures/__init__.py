"""The figures of the benchmark, one subject per file."""
