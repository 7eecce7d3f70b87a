"""A worker: what it pushes and pulls, alone or as a member of an island."""
