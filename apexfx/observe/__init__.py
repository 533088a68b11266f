"""Looks at what a captured graph computes, node by node: `interpreter` runs it, and observers look at each node.

`non_finite` is an observer: where something that is not finite begins. `graph_data` is a graph as JSON-able data, `digests` tells
bits apart, `bundle` is a run of a graph as a folder, and `replay` runs that again.

`reference` is an observer, too: the same ops in a wide dtype. `numerics_report` is what it says of each op. `beside_float64` runs
a graph in float64 for the code that was made of it; `wide_ops` evaluates a node for both.

The first two are half of the room: an op's own error is told from what it was given, forward and backward, and its share of the
whole by a second derivative, and no part of torch does either.
"""
