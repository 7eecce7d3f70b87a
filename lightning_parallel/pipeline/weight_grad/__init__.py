"""A backward in two halves: gradients of inputs now (I), gradients of weights later (W), of modules as they are.

    weights = backward_inputs([loss], [None])  # I: what a whole backward gives, but for the products of weights
    ...
    weights.run()  # W: those products, added to `p.grad` as autograd would have

The one idea: autograd's graph says all that is needed, after the forward and without its knowledge. I runs the engine
with every leaf as its target but those weights whose products wait, so that their half of a node is not computed; a
hook on the node keeps the gradient that came in. W makes the product as autograd does and hands it to the engine where
the node would have: views, casts, hooks and accumulation in between are autograd's own. So a micro-batch's backward may
be whole or split whichever way its forward ran, and a whole one costs nothing.

Left out: a second derivative of what was split; products of nodes that `products` does not know, which come with I.
"""

from lightning_parallel.pipeline.weight_grad.graph import SplitPlan, plan
from lightning_parallel.pipeline.weight_grad.saved import hook_on_saved_tensors
from lightning_parallel.pipeline.weight_grad.split import backward_inputs
from lightning_parallel.pipeline.weight_grad.waiting import WeightGradients, run_together

__all__ = ["SplitPlan", "WeightGradients", "backward_inputs", "hook_on_saved_tensors", "plan", "run_together"]
