"""A sequence in slices: blocks called slice by slice, so that stages work on one sequence at the same time (TeraPipe).

The one idea: around the blocks the user's step runs on whole micro-batches, as with any schedule. Calls of blocks are
noted instead of made (`plan`), and made later, slice by slice, each slice with the keys and values of the slices before
it (`attention`). Whether that gives what the whole block gives is tried before it is relied on (`check`).
"""
