"""What every pass did to a model, as data, text and HTML.

Read in this order: `records` (the data), `data` (`Report`, the class that users hold), `text` and `html` (its two forms),
`cast_ledger`, `fold_repeats` and `text_diff` (parts of both), `memory`, `ops` and `report_diff` (what methods of the
report return).

A third of the room (`profile`, `measure`, `spans`, `node_places`, `node_numbers`) times and counts per op what torch's profiler
gives per kernel: graphs name their ops, and a span of one has to be led back to a node.
"""

from .data import Report as Report
