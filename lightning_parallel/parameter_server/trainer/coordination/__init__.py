"""How the workers of a run find each other, meet outside of steps, come late and leave early."""
