"""What a model's parts cost, and the schedule that follows from it."""
