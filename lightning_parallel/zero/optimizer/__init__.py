"""What optimizers keep while ranks divide it: state dicts of one process, guards, and which optimizers may be
divided.
"""
