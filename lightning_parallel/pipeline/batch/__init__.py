"""A batch: its rows, its fields, and its micro-batches."""
