"""A rank's actions of a schedule, run: the engine, and what it hands each action to."""
