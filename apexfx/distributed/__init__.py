"""What ranks agree on, and what happens when one of them does not come.

Read in this order: `agreement` (are we about to do the same, and do we still?), `broadcast` (rank 0's parameters),
`gradient_sync` (every gradient is averaged, or an error says which is not), `backward_callback`.
"""
