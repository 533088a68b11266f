"""Any optimizer in the graph of a step, by its own `step()`: `optimizer_trace` makes the graphs, `traced_update` holds its state.

`step()` runs on a `shadow` of the optimizer; the `recorder` writes down what it does, numbers of Python among it
(`symbolic_numbers`, `ops_of_numbers`); `initial_state` is what its first step makes; `over_ranks` has Muon's matrices shared.
"""
