"""One step of the Trainer in micro-batches: what it is given, logs and returns."""
