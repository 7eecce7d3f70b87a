"""Expandable segments of PyTorch's CUDA allocator, the defragmentation (M_D) that ZeRO-R asks for.

The one idea: the environment is the supported way to ask for them, and it is read when CUDA starts; so it is written
before that, and never over what a user has decided. Buckets, which live as long as a run or a backward, need no other
arrangement.

Source:
    Rajbhandari et al., ZeRO, arXiv 1910.02054, section 6.3.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first since torch 2.9
_OPTION = "expandable_segments"


def ask_for_expandable_segments(environment: MutableMapping[str, str], started: bool) -> str | None:
    """Ask PyTorch to grow segments of CUDA memory in place of opening new ones.

    Args:
        environment: of this process, which is written to.
        started: whether CUDA has started, so that the environment has been read.

    Returns:
        What to tell the user where it is too late, None otherwise.

    Example:
        >>> environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
        >>> ask_for_expandable_segments(environment, started=False); environment
        {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:512,expandable_segments:True'}
    """
    given = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    if any(_OPTION in value or "backend:cudaMallocAsync" in value for value in given.values()):
        return None
    if started:
        return (
            "CUDA had started before the Trainer did, so its memory may fragment: set the environment variable"
            f" {_VARIABLES[0]}={_OPTION}:True, or move nothing to a GPU before Trainer.fit."
        )
    name, value = next(iter(given.items()), (_VARIABLES[1], ""))
    environment[name] = f"{value},{_OPTION}:True" if value else f"{_OPTION}:True"
    return None
