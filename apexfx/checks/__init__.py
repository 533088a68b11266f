"""Whether a training step means what it should: `check_loop`, the loop that it replaces; `check_splits`, any split of its batch;
`check_bits`, the same bits on any number of ranks. The first two compute by `in_float64`; `watched_loop` looks on at a loop.
"""
