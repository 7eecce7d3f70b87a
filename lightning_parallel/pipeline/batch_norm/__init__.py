"""BatchNorm under micro-batches."""
