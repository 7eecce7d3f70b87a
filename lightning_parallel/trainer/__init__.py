"""What stands between the machinery and Lightning's Trainer: launching, logging, signals, refusals."""

# Whoever imports Lightning first imports the strategies too, to register their strings, and these import what is in
# this folder. Here that happens before any module of it is half imported, whichever of them is the first import.
import lightning.pytorch  # noqa: F401
