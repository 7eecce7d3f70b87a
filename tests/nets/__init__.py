"""Nets: what runs do today, written down, so that no change of behaviour passes unseen.

`test_layouts.py` holds weights to the bit and each rank's order of collectives; `test_saved.py` resumes from
checkpoints that lie beside it. Where a change is meant, ``python -m tests.nets.record`` writes the first anew and
``python -m tests.nets.write_checkpoints`` the second; the difference in git is then what has changed.
"""
