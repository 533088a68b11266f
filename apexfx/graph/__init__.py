"""The vocabulary over fx graphs that passes share: values, new nodes, op names, mutation, collectives, printing, invariants.

`nodes` comes first: every node carries its fake value in `meta["val"]`, and a new one is made by `call(..., like=node)`. `marks`
has the other keys of `meta` that are ours.

Two fifths of the room (`order`, `mutation`, `shared_memory`, `unused_gradients`) keep an edited graph from training wrongly
without a word.
"""

from .nodes import call as call
from .nodes import count_ops as count_ops
from .nodes import insert_after as insert_after
from .nodes import module_path as module_path
from .nodes import op_name as op_name
from .nodes import refake as refake
from .nodes import set_value as set_value
from .nodes import source_line as source_line
from .nodes import value as value
from .printing import format_graph as format_graph
