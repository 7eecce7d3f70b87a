"""From an exception or a signal to a failure that all ranks are told of, and to the hooks that hear of it."""
