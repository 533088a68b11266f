"""Looks at what a captured graph computes, node by node: `interpreter` runs it, and observers look at each node.

`non_finite` is an observer: where something that is not finite begins. `graph_data` is a graph as JSON-able data, `digests` tells
bits apart, `bundle` is a run of a graph as a folder, and `replay` runs that again.

`reference` is an observer, too: the same ops in a wide dtype. `numerics_report` is what it says of each op.

These two are half of the room: an op's own error is told from what it was given, forward and backward, and its share of the whole
by a second derivative, and no part of torch does either.
"""
