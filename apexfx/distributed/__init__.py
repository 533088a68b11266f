"""What ranks agree on, and what happens when one of them does not come.

Read in this order: `agreement` (are we about to do the same?), `broadcast` and `lazy_broadcast` (rank 0's parameters),
`gradient_sync` (every gradient is averaged, or an error says which is not), `step_check` (do all ranks run the
same steps?), `watchdog` (waiting within a limit, and naming who did not come), `store` (what ranks read of each
other), `backward_callback`.
"""
