"""Predict the timeline of a data-parallel step: buckets, links, and compute that shares a processor with them. No rank runs.

Read in this order: `devices` (what an op takes), `profile` (what a step takes on one rank), `network` (what a collective takes),
`timeline` (simulates a program of compute and collectives), `sharded` (the graph of a sharded step as such a program),
`simulator` (a step of many ranks), `models` (what can be named), `command` (`python -m apexfx simulate`).
"""
