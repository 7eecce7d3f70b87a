"""The warnings of third parties that our commands keep from the user, named one by one. Importing changes nothing."""

import warnings


def ignore_third_party_warnings() -> None:
    """Ignore, for the rest of the process, what the user of a command can do nothing about."""
    # Lightning's data loading uses a name that torch has renamed.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # So do DeepSpeed's collectives.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # Advice to load in more processes: the demo's data sets lie in memory.
    warnings.filterwarnings("ignore", message=r"The '.*_dataloader' does not have many workers")
