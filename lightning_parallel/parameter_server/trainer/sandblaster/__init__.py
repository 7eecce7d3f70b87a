"""Steps that all workers make together (Sandblaster), as the Trainer sees them."""
