"""`python -m apexfx diagnose`: what a training script loses, by running it unchanged for some steps.

In the order in which a run uses them: `command` runs the script, `session` divides its steps into phases, `constructors` and
`observer` note what the script does and where (`places`), `experiments` measure what a change would save, by making it in some of
the steps, and `findings` are what is reported.
"""
