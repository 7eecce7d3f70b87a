"""Whether micro-batches give what the whole batch gives: compared once, on every stage."""
