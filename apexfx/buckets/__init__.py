"""Which gradient travels when: the bucket plan as data, and what follows from it for both executors.

Read in this order: `bucket` (one allreduce and the places in its buffer), `plan` (the artefact: built, edited, saved, replayed),
`ddp_layout` (torch DDP's own buckets), `flat_buffer` and `reduce` (the eager executor of a plan), `windows` and `flops` (how much
compute a graph leaves beside each allreduce).
"""
