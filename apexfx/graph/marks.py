"""The keys of `node.meta` that are ours: what each says of a node, and in which files it is set -> read."""

# Of an input of a graph.
NAME = "apexfx_name"  # its name in the user's program: capture, scatter_gradients -> whatever prints a name or looks for one
KIND = "apexfx_kind"  # "param", "buffer", "state", "input" or "symint": capture -> precision, passes, observe, prover
OTHER_NAMES = "apexfx_aliases"  # those of a tensor that has several: capture -> precision
REPLACED = "apexfx_replaced"  # whether the forward puts another tensor in its place: capture -> model_casts
INPUT_NAMES = "apexfx_inputs"  # in the meta of the module, the names of all: capture -> graph/inputs, printing

# Of where a node comes from. The first three, and the rule, go on to the nodes that passes put in for it.
MODULE_PATHS = "apexfx_module_paths"  # all paths of the module, or modules, in which it was traced: capture -> nodes
OUTSIDE_OF_MODEL = "apexfx_outside_of_model"  # in a step, traced in no module of the model: capture -> precision, model_casts
OF_STEP = "apexfx_of_step"  # of no line of the user's: the loss times its scale, sums of gradients: capture -> precision
INSERTED_BY = "apexfx_pass"  # the pass that put it in: pipeline, step_compiler -> collectives, outline_layers, node_places
COMPUTED_AGAIN = "apexfx_computed_again"  # a copy: recompute -> recompute
IN_BACKWARD = "apexfx_backward"  # in meta["custom"], which what it is lowered to has too: step_compiler -> non_finite

# Of its dtype.
RULE = "apexfx_rule"  # kind and family of the rule by which precision has decided, and why: cast_inserter, casts -> op_dtypes
CAST_ROW = "apexfx_cast"  # of a cast that a pass has put in, its row of the ledger: passes/precision -> op_dtypes, cancel_casts
OP_DTYPE = "apexfx_op"  # in meta["custom"], the `OpDtype.node` that it belongs to: op_dtypes -> numerics_report

# Of the end of a training step.
BUCKET = "apexfx_bucket"  # the bucket that it carries, by index: bucket_allreduce, schedule_shards -> passes, memory, tools
AFTER_BACKWARD = "apexfx_delayed"  # of an allreduce that is to start after all of backward: bucket_allreduce -> schedule_comm
BUCKET_OF_ROWS = "apexfx_rows"  # of rows that are updated in their parameter's place: scatter_gradients -> gather_updated, tools
MAKES_WHOLE = "apexfx_whole"  # makes whole parameters of rows: schedule_shards, gather_updated -> gather_updated, memory, tools
TRACED_UPDATE = "apexfx_traced_update"  # of a gradient that is read by an update of plain ops: unscale_clip_update -> prover
SKIP_VERDICT = "apexfx_verdict"  # not 0 where a step is skipped; False where none ever is: unscale_clip_update -> skip_writes
