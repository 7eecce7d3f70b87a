"""Who takes part in a job, under which number, and where the ranges lie."""
