"""A module's torchmetrics objects: filled where steps end, read alike on every rank."""
