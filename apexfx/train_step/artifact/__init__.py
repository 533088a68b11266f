"""A compiled step in a file: a program that is the same takes its graphs from there, and captures and compiles nothing.

`recorder` looks on while a step is compiled and makes rows of what a graph is good for: Dynamo's guards, as `guards` can ask them
of another process, and what Inductor has written (`stored_code`). `archive` is the file. `graphs` runs a step by it: `match`
says whether a call is one that the file has.
"""
