"""Data sources, tasks, partitions and batches."""
