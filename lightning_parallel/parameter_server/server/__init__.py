"""A server: the ranges that lie on it, their chains and their history."""
