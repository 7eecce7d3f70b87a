"""When parameters that ranks divide are whole: for a step, or block by block."""
