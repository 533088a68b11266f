"""The timeline of a data-parallel step on paper: buckets, links and compute that share a processor, without any rank.

Read in this order: `devices` (what an op takes), `profile` (what a step takes on one rank), `network` (what an allreduce takes),
`timeline` (a program run on paper), `simulator` (a step of many ranks as such a program), `graph_plan` (the buckets of a compiled
step), `models` (what can be named), `command` (`python -m apexfx simulate`).
"""
