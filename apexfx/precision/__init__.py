"""Which op runs in which dtype: one policy for the graph passes and for the eager executor of amp.

Read in this order: `rules` (the table, and what a rule does to dtypes),
`policy` (which rule holds for a call, and what else both executors decide alike), `call_casts` (arguments and results),
`casts` (cast nodes, and the row of the cast ledger), `argument_marks` (marks for a user's own functions),
`half_model` (a model in half except its batch norms), `op_dtypes` (what decided the dtype of an op).

Half of the room is the table, with a reason in every row, and the decisions that two executors make alike.
"""
