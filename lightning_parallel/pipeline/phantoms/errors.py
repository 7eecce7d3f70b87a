"""What is raised where the user's step needs what another stage holds, in words.

The one idea: what is to be done depends on what it is that the step read: a value, a parameter or its gradient.
"""

from __future__ import annotations

import re

from lightning_parallel.pipeline.phantoms.callers import called_past_its_module
from lightning_parallel.pipeline.phantoms.stand_in import StandIn


class PhantomError(RuntimeError):
    """The user's step read or wrote something that lives on another stage."""


class Unread(PhantomError):
    """It asked for data where only shapes are known."""


class Overwritten(Unread):
    """It wrote what is not known here into a tensor that is."""


def unread(x: StandIn, what: str) -> str:
    """The message of `Unread` for a stand-in, or for what was computed from one and has its origin.

    Args:
        x: what the step needs.
        what: how it is used.
    """
    if x.origin.startswith("the gradient of"):
        return (
            f"The module reads {x.origin}, which this stage does not hold: {what}. Clip with self.clip_gradients(...)"
            " or Trainer(gradient_clip_val=...), which count every stage; take norms over parameters whose grad this"
            " rank holds."
        )
    if x.stands_for == "parameter" and (call := called_past_its_module(x)) is not None:
        return (
            f"The step calls {call}, and so uses {x.origin}, which this stage does not hold. Stages follow calls of"
            " whole modules alone: call the module, and let its forward do what you need of it, or make that a module"
            " of its own."
        )
    if x.origin.startswith("parameter `"):
        return (
            f"The step uses {x.origin}, which this stage does not hold: {what}. Compute such a term from a module's own"
            " forward, tie the parameter to a module of this stage, or use the optimizer's weight_decay."
        )
    routers = " A mixture of experts of transformers does without: output_router_logits=False."
    if "packed_sequence" in what:
        return (
            f"The step reads {x.origin}, whose data this stage does not hold: {what}. Pack, run the recurrent layer and"
            " pad in the forward of one module, and let the step call that."
        )
    return (
        f"The step reads {x.origin}, whose data this stage does not hold: {what}. Pass the value through the blocks"
        " (as an argument of the block where the stage begins), or choose blocks= so that producer and reader share a"
        f" stage.{routers if re.search(r'router|[.]gate`', x.origin) else ''}"
    )
