"""Where a model is cut: its blocks, its units, and the stage of each."""
