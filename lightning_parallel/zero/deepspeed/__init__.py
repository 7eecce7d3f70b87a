"""DeepSpeed as an engine, for stages 1, 2 and 3."""
