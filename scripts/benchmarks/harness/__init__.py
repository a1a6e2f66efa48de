"""What all benchmarks share: ranks, measurement, results, tables, reports and plots."""
