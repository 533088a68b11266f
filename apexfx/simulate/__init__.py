"""The timeline of a data-parallel step on paper: buckets, links and compute that share a processor, without any rank.

Read in this order: `profile` (what one process takes), `network` (what a link takes), `simulator` (a step of both), `timeline`
(as a picture), `page` (the command), `models` (names it knows), `graph_plan` and `calibration`.
"""
