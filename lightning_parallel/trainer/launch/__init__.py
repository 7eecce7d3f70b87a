"""How the ranks of a run are started, waited for and ended."""
