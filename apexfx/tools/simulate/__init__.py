"""Predict the timeline of a data-parallel step: buckets, links, and compute that shares a processor with them. No rank runs.

Read in this order: `devices` (what an op takes), `profile` (what a step takes on one rank), `network` (what a collective takes),
`timeline` (simulates a program of compute and collectives), `simulator` (a step of many ranks as such a program), `sharded` (one
that is sharded), `models` (what can be named), `command` (`python -m apexfx simulate`).
"""
