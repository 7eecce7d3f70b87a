"""The gradients of a step: kept apart from those that accumulate, and summed over the ranks that share them."""
