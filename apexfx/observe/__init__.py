"""Looks at what a captured graph computes, node by node: `interpreter` runs it, and observers look at each node.

`non_finite` is an observer: where something that is not finite begins. `graph_data` is a graph as JSON-able data, `bundle` a run
of one as a folder, and `replay` runs that again.
"""
