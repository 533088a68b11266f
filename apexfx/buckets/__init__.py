"""Which gradient is reduced when, and with which others: the bucket plan as data, and what follows from it for both executors.

Read in this order: `bucket` (one allreduce: its gradients and their places in its buffer), `plan` (all of them: derived, edited,
saved, replayed), `ddp_layout` (grouped as torch DDP does), `flat_buffer` and `eager_reduce` (the eager executor of a plan),
`windows` and `flops` (how much compute a graph leaves beside each allreduce).
"""
