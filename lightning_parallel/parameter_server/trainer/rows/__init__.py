"""Which worker trains on, evaluates and predicts which rows."""
