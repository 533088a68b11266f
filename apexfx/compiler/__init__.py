"""From a captured graph to compiled code: what stands between Dynamo and the inner compiler.

Read in this order: `model_index` and `capture` (which tensor and module of the graph is which of the model),
`pipeline` (runs the passes; `pass_verification` checks them), `rewritten_graph` (a captured graph from its forward passes to its
code, of models and of training steps), `graph_compiler` (what `torch.compile` calls for each graph of a model),
`lowered_passes` (over AOTAutograd's graphs), `inner_compilers` and `lowerings`, `cache` (what identifies all of that),
`compiled_model` (what a transformed model's forward calls), `traceable` (classes of modules that Dynamo can trace better:
`dynamo_batch_norm`, `dynamo_layers`), `refusals` (what does not go together), `buffers_put_back` (behind a step that is
skipped, and a forward that runs for something else), `torch_faults` (what torch's compilers get wrong, and what is done about
each).

The room is large because it alone stands between torch's compilers and a program: a quarter of it mends or refuses what Dynamo,
AOTAutograd and Inductor would leave out, or compute otherwise, without a word.
"""

from . import cache as cache  # so that torch.compiler.load_cache_artifacts() knows reports, which it may meet before a first call
