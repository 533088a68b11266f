"""Where a captured graph computes with a history, where without one, and where in inference mode."""

from __future__ import annotations

from torch import fx

from .._torch import enter_inference_mode, exit_inference_mode, set_grad_enabled

ON, OFF, INFERENCE = "on", "off", "inference"


def gradient_modes(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the mode behind each node: ON where gradients are recorded, OFF under no_grad, or INFERENCE.

    What is called where gradients are off begins with OFF: there the first switch turns them on.
    """
    modes: dict[fx.Node, str] = {}
    switches = (node for node in graph.nodes if node.target in (set_grad_enabled, enter_inference_mode))
    first = next(switches, None)
    mode = OFF if first is not None and bool(first.args[0]) is (first.target is set_grad_enabled) else ON
    for node in graph.nodes:
        if node.target is enter_inference_mode:  # with False it switches gradients on, too
            mode = INFERENCE if node.args[0] else ON
        elif node.target is exit_inference_mode:
            mode = modes[node.args[0].prev]
        elif node.target is set_grad_enabled and mode != INFERENCE:
            mode = ON if node.args[0] else OFF
        modes[node] = mode
    return modes
