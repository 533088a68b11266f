"""Lines that guarantee something: each is taken out in a copy of the package, and a test has to die of it.

    python -m tests.planted_faults [NUMBER ...]

Thirty guarantee an order, an alias or a liveness: 1 to 20, and 38 to 47, which a reviewer of those drew. 21 to 34 are of what a
training program may do at the edges of its model; 35 to 37 of updates that a step skips, and of the gradients that leave it;
48 to 56 of steps that leave nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    """A fault of the package.

    Attributes:
        guarantee: what the line is there for.
        file: of the package.
        line: as it stands there, once.
        instead: what takes its place.
        tests: which of the suite is to die, as arguments of pytest; none of them needs Inductor.
    """

    guarantee: str
    file: str
    line: str
    instead: str
    tests: tuple[str, ...]

    def planted(self) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            ValueError: the line is not there, or more than once.
        """
        text = (ROOT / "apexfx" / self.file).read_text()
        if text.count(self.line) != 1:
            raise ValueError(f"{self.file} has {text.count(self.line)} times, expected once: {self.line!r}")
        return text.replace(self.line, self.instead)


_APART = ("tests/distributed/test_ranks_apart.py",)
_EARLY = ("tests/passes/test_update_early.py", "tests/train_step/test_styles.py")
_SCHEDULE = ("tests/passes/test_schedule_comm.py",)
_RECOMPUTE = ("tests/passes/test_recompute.py",)
_CASTS = ("tests/passes/test_cancel_casts.py",)
_CHANGES = ("tests/train_step/test_missing_gradients.py", "tests/train_step/test_optimizer_changes.py",
            "tests/train_step/test_model_changes.py", "tests/train_step/test_failed_calls.py")
_PARTS = ("tests/train_step/test_parts.py",)
_SHARDED = ("tests/distributed/test_sharded.py",)
_GATHERS = ("tests/passes/test_gather_shards.py",)
_SHARED_UPDATE = ("tests/distributed/test_sharded_update.py",)
_MATRICES = ("tests/distributed/test_orthogonalize_rows.py",)
_MUON = ("tests/distributed/test_muon.py::test_muon_over_ranks_has_the_bits_of_ddp",)
_BETWEEN_CALLS = ("tests/distributed/test_sharded_between_calls.py",)
_SHARED = ("tests/train_step/test_shared_memory.py",)
_STEP = ("tests/passes/test_unscale_clip_update.py", "tests/train_step/test_step.py", "tests/train_step/test_styles.py",
         *_CHANGES)
_PIECES = ("tests/train_step/test_in_pieces.py",)
_MISSING = ("tests/train_step/test_missing_gradients.py",)
_TRACED = ("tests/optimizers/test_traced_step.py",)
_OPTIMIZERS = ("tests/train_step/test_optimizers.py",)
_PRECISION = ("tests/passes/test_precision.py", "tests/passes/test_precision_ops.py", "tests/passes/test_precision_values.py")
_SAFEGUARD = ("tests/train_step/test_safeguard.py",)
_FLUSH = ("tests/train_step/test_flush.py",)
_MEAN = ("tests/train_step/test_mean.py",)
_DERIVATIVES = ("tests/train_step/test_derivatives.py",)
_WRITTEN = "tests/compiler/test_written_memory.py"
_UNUSED = ("tests/test_unused_outputs.py",)

FAULTS = (
    Fault("state of another dtype is not written", "train_step/parts/apply_update.py",
          "        self._check(updated, states + [updated] * self.masters)\n", "",
          ("tests/train_step/test_optimizer_changes.py",)),
    Fault("a graph that takes floats which change is not in AOTAutograd's cache", "compiler/inner_compilers.py",
          ", torch_faults.cached_with_guards(gm)", "", ("tests/test_python_forwards.py",)),
    Fault("a float that one graph keeps is no constant of others", "compiler/torch_faults.py",
          "    forget_specialized_floats()  # not behind", "    # not behind", ("tests/test_python_forwards.py",)),
    Fault("an input that is returned takes no other output's place", "compiler/torch_faults.py",
          "if not any(getattr(value(node), \"requires_grad\", False) and", "if not any(not node and",
          ("tests/compiler/test_returned_inputs.py",)),
    Fault("what a graph replaces is known before its first run", "train_step/step_graphs.py",
          "if not variant.compiler.not_run:", "if True:", ("tests/train_step/test_safeguard.py",)),
    Fault("capture() leaves Python's random as it was", "random_state.py",
          "        random.setstate(state)\n", "        pass\n", ("tests/test_python_forwards.py",)),
    Fault("what writes memory stays behind its readers", "graph/order.py",
          "behind[row.node] |= reading.pop(m, set())", "reading.pop(m, set())", (*_EARLY, *_SCHEDULE)),
    Fault("a reader through a view counts", "graph/order.py",
          "for source in row.inputs for m in memory[source]}", "for source in row.inputs if source.op == \"placeholder\" "
          "for m in memory[source]}", _EARLY),
    Fault("an update that waits for all gradients stays", "passes/update_early.py",
          "names[:2] == [\"params\", \"grads\"] and \"lr_tensor\" in names and not waits",
          "names[:2] == [\"params\", \"grads\"] and \"lr_tensor\" in names", _EARLY),
    Fault("the end of a step stands behind every reader of a parameter", "passes/unscale_clip_update.py",
          "with gm.graph.inserting_before(gm.graph.output_node()):", "with gm.graph.inserting_before(node):", _STEP),
    Fault("a gradient in the memory of a parameter is copied", "passes/unscale_clip_update.py",
          "_copied(g, mode) if g is not None and storages(value(g)) & memory else g for g in _as_read(plan, grads, written)",
          "g for g in _as_read(plan, grads, written)", _STEP),
    Fault("a gradient in the memory of an input that is written is copied", "passes/unscale_clip_update.py",
          "        memory |= storages([value(node) for node in gm.graph.find_nodes(op=\"placeholder\")]) & written\n", "", _STEP),
    Fault("what reads memory stays behind what writes it", "graph/order.py",
          "            last[m] = row.node\n", "", _SCHEDULE),
    Fault("random numbers are drawn in the same order", "graph/order.py",
          "chain = \"effect\" if _has_effect(row) else", "chain =", _SCHEDULE),
    Fault("collectives keep their order", "graph/order.py",
          "\"collective\" if is_collective(row.node) and row.node not in new else None", "None", _SCHEDULE),
    Fault("a gather that a pass has just put in may pass other collectives", "graph/order.py",
          " and row.node not in new", "", (*_GATHERS, *_SHARED_UPDATE)),
    Fault("an op that reads strides gets those of the captured graph", "passes/channels_last.py",
          "reads = name.partition(\".\")[0] in _READ_STRIDES and", "reads = False and", ("tests/passes/test_channels_last.py",)),
    Fault("memory that is not laid out otherwise stays the same memory", "passes/channels_last.py",
          "                if _strides(laid_out) != _strides(value(node)) or storages(laid_out) & of_moved:\n",
          "                set_value(node, laid_out)\n                if True:\n", ("tests/passes/test_channels_last.py",)),
    Fault("an op of another package gets the strides of the captured graph", "passes/channels_last.py",
          "return namespace in _NAMESPACES and", "return", ("tests/passes/test_channels_last.py",)),
    Fault("what is to be computed again is not there", "passes/recompute.py",
          "        return all(memory not in self._again and self.graph", "        return all(self.graph", _RECOMPUTE),
    Fault("what is computed again reads what it read before", "passes/recompute.py",
          "\n                   and not any(start < place < at for place in self._writes.get(memory, ()))", "", _RECOMPUTE),
    Fault("ops that draw random numbers keep their order", "graph/order.py",
          ", (draws_random_numbers, \"draws random numbers\")):", ",):", ("tests/graph/test_order.py",)),
    Fault("nothing is computed again through what is written in place", "passes/recompute.py",
          "or not _is_cheap(node) or any(memory in self._writes for memory in self.graph.of(node)):",
          "or not _is_cheap(node):", _RECOMPUTE),
    Fault("a cast to the same dtype is a copy where its source is written later", "passes/cancel_casts.py",
          "self._plain(cast) and not self._written_after(source, now):", "self._plain(cast):", _CASTS),
    Fault("a round trip is a copy where its origin is written later", "passes/cancel_casts.py",
          "and not self._written_after(source, -1) and not self._written_after(origin, self.place[source]):",
          "and not self._written_after(source, -1):", _CASTS),
    Fault("a cast is not shared over a write to its source", "passes/cancel_casts.py",
          "\\\n                and not self._written_after(source, self.place[earlier], until=now):", ":", _CASTS),
    Fault("an input that is written is cast where it is read", "passes/model_casts.py",
          "        if target is None or storages(value(placeholder)) & touched:", "        if target is None:", _PRECISION),
    Fault("a sum over calls that the forward replaces is not rounded", "passes/model_casts.py",
          " if not placeholder.meta.get(REPLACED) else None", "", (f"{_WRITTEN}::test_sums_over_calls_are_exact",)),
    Fault("arguments that come to overlap otherwise are refused", "compiler/graph_compiler.py",
          "if placeholders[place].stride is not None]", "if not placeholders[place].in_a_local]",
          (f"{_WRITTEN}::test_arguments_that_come_to_overlap_otherwise_are_refused",)),
    Fault("what out= names is written", "graph/mutation.py",
          "    sources += tree_leaves(node.kwargs.get(\"out\"))\n", "", ("tests/graph/test_mutation.py",)),
    Fault("a batch norm is not moved over a write to what it reads", "passes/batch_norm_rewrite.py",
          "if \"c10d\" in namespace(step) or _storages(written(step)) & operands:", "if \"c10d\" in namespace(step):",
          ("tests/passes/test_sync_batchnorm.py", "tests/passes/test_fuse_batchnorm.py")),
    Fault("the ranks agree before a gradient leaves", "ops/ranks_agreed.py",
          "    end_comparison(ranks)\n", "    pass\n",
          ("tests/passes/test_bucket_allreduce.py::test_the_first_bucket_leaves_when_the_ranks_are_known_to_agree",)),
    Fault("leaves that nothing updates are refused", "train_step/leaves.py",
          "return [node.variable for node in nodes if", "return [node.variable for node in nodes[:0] if",
          ("tests/train_step/test_other_leaves.py",)),
    Fault("what is trained of a loss is that of the first rank", "train_step/components.py",
          "agreement, parameters=parameters, buffers=buffers)", "agreement)",
          ("tests/distributed/test_train_step.py::test_parameters_of_a_loss_are_those_of_rank_0_and_stay_equal",)),
    Fault("an output that nothing uses gives no gradient", "graph/unused_gradients.py",
          "        return used | ~self._of_any if used else 0", "        return -1", _UNUSED),
    Fault("gradients that a used output gives stay", "graph/unused_gradients.py",
          "        return tuple(g if used & inputs else None for", "        return tuple(None for", _UNUSED),
    Fault("what any rank uses gets the average on all", "distributed/used_anywhere.py",
          "        return sum(1 << i for i, count in zip(self._inputs, counts) if count)",
          "        return sum(1 << i for i, count in zip(self._inputs, counts) if count == dist.get_world_size())",
          ("tests/distributed/test_unused_outputs.py",)),
    Fault("what was gathered is applied once", "train_step/step_graphs.py",
          "        clear_accumulated(self._state.now.gradient_sums, self._state.mean.sums)\n", "", _FLUSH),
    Fault("what was gathered on each of several ranks is applied once", "train_step/function.py",
          "    clear_accumulated(inputs.gradient_sums, inputs.means)\n", "",
          ("tests/distributed/test_train_step.py::test_a_step_is_that_of_torch_ddp",)),
    Fault("a gradient that no call gathered is none", "train_step/function.py",
          "(total if total.dtype == dtype else total.to(dtype)) if here else None", "total.to(dtype)", _CHANGES),
    Fault("what earlier calls have gathered is applied", "train_step/step_graphs.py",
          "here or id(p) in accumulated for", "here for", _MISSING),
    Fault("the loss is that of one of several calls", "train_step/accumulation.py",
          "loss / calls if calls > 1 else loss", "loss", _FLUSH),
    Fault("a mean weighs what earlier calls have accumulated", "train_step/mean.py",
          "    earlier = before[2] * inverse[0] if", "    earlier = inverse[0] * 0 + 1 if", _MEAN),
    Fault("a call without a count contributes nothing", "train_step/mean.py",
          "torch.where(counts == 0, 0.0, factor / counts)", "factor / counts", _MEAN),
    Fault("a total of none is left out", "train_step/mean.py",
          "torch.where(count == 0, 0.0, total.reshape(()))", "total.reshape(())", _MEAN),
    Fault("an update of nothing is no skip of a safeguard", "train_step/parts/norm.py",
          "            skips.add_(end.verdict.fault)", "            skips.add_(end.skip)", _MEAN),
    Fault("nothing is updated where nothing is counted", "optimizers/end_of_step.py",
          "            return empty, -empty", "            return None, -empty", _MEAN),
    Fault("a recurrent op has no second derivative", "ops/recurrent.py",
          '        torch.library.register_autograd(f"apexfx::{name}_backward", self._refuse)', "        pass", _DERIVATIVES),
    Fault("updates are counted of what has a gradient", "train_step/parts/apply_update.py",
          "_counts(end.slot(self.step), [place - self.first for place in places]))",
          "_counts(end.slot(self.step), range(self.last - self.first)))", _CHANGES),
    Fault("a traced step is skipped whole", "optimizers/end_of_step.py",
          "new = [unless(skipped, *pair) for pair in zip(old, new, strict=True)]", "pass", _TRACED),
    Fault("a branch by the number of updates is chosen in the graph", "optimizers/traced/recorder.py",
          "[a if a is b else torch.where(path[place][0], a, b)", "[a", _TRACED),
    Fault("what parameters have in common stays that", "optimizers/traced/optimizer_trace.py",
          "                    raise SharedDiffer(index)\n", "                    pass\n", _TRACED),
    Fault("what one counts and another does not is not what they have in common", "optimizers/traced/optimizer_trace.py",
          "            if present[p] and p not in moved[index] and any(present[other] for other in moved[index]):\n",
          "            if False:\n", _TRACED),
    Fault("numbers that a step counts in its program are put back", "optimizers/traced/shadow.py",
          "            each.write(value)\n", "            pass\n", _TRACED),
    Fault("numbers that a step reads of its program are read again", "optimizers/settings.py",
          "each.value) for each in variables_of_program(optimizer)]", "0) for each in ()]", _TRACED),
    Fault("what moves to another place of the state is copied before that is written", "optimizers/traced/recorder.py",
          "tensor.untyped_storage()) in memory else", "tensor.untyped_storage()) is None else", _TRACED),
    Fault("what was set on a parameter is there for a traced step", "optimizers/traced/optimizer_trace.py",
          "as_parameter(p, copied(attributes)).grad", "as_parameter(p, {}).grad", _TRACED),
    Fault("a step that reads what is not trained is no graph", "optimizers/traced/optimizer_trace.py",
          "places[id(p)] if id(p) in places else _fake(self._mode, p, half)\n"
          "                                             for p in group[\"params\"]]",
          "places[id(p)] for p in group[\"params\"] if id(p) in places]", _TRACED),
    Fault("gradients leave a step for the parameters that have one", "train_step/state.py",
          "                p.grad = optimizers.layout.as_state(next(left), p) if here else None",
          "                p.grad = next(left, None)",
          _CHANGES),
    Fault("an op counts updates up in a copy: groups may share a count", "train_step/parts/apply_update.py",
          "step.clone() if counts_updates(self.op) else None,", "step if counts_updates(self.op) else None,", _STEP),
    Fault("each part of an update counts up in a copy of its own", "passes/update_early.py",
          "_read_again(args[names.index(\"step\")], mode)", "_read_again(args[names.index(\"step\")].args[0], mode)", _EARLY),
    Fault("a gradient is copied before its memory is written", "passes/unscale_clip_update.py",
          "    with insert_after(gradient):", "    with gradient.graph.inserting_before(gradient.graph.output_node()):", _STEP),
    Fault("what was gathered is copied before its memory is cleared", "train_step/accumulation.py",
          "earlier.to(dtype, copy=True) if held", "earlier.to(dtype) if held", _MISSING),
    Fault("what was gathered stays when the optimizer is read again", "train_step/state.py",
          "known[id(p)].to(dtype_of_sum(p)) if id(p) in known", "known[id(p)].to(dtype_of_sum(p)) if id(p) is None", _CHANGES),
    Fault("memory is looked at again once what is updated has moved", "graph/shared_memory.py",
          "self.shared or where != self._where or", "self.shared or self._where is None or", _SHARED),
    Fault("a state that was replaced is read again", "train_step/optimizer_changes.py",
          "chain.from_iterable(map(dict.values, held)), others, (_END,)", "others, (_END,)", _CHANGES),
    Fault("what an op writes is not cast", "passes/cast_inserter.py",
          "            if target is None or argument in fixed:", "            if target is None:", _PRECISION),
    Fault("a bucket that is full before its turn waits for it", "passes/bucket_allreduce.py",
          "            anchor = self.tail", "            anchor = last",
          ("tests/passes/test_bucket_allreduce.py", "tests/passes/test_bucket_allreduce_models.py")),
    Fault("what is in memory depends on what it was computed from", "graph/order.py",
          "                    mask |= contents.get(m, 0)\n", "", ("tests/graph/test_order.py",)),
    Fault("what the forward of a skipped step writes is undone", "passes/skip_writes.py",
          "        write.args = (target, kept)\n", "", _SAFEGUARD),
    Fault("what the update writes is not touched", "passes/skip_writes.py",
          "itertools.takewhile(lambda node: node is not verdict, gm.graph.nodes)", "gm.graph.nodes", _SAFEGUARD),
    Fault("gathered gradients are cleared in a skipped step too", "passes/skip_writes.py",
          "if node.meta.get(KIND) != \"state\"]", "]",
          ("tests/distributed/test_safeguard.py::test_one_poisoned_rank_has_all_skip",)),
    Fault("a spike leaves the loss scale alone", "train_step/parts/loss_scale.py",
          "self.may_be_spike or end.verdict.empty is not None", "end.verdict.empty is not None", _SAFEGUARD),
    Fault("what a part of a user's own keeps stays in a skipped step", "train_step/parts/own.py",
          "end.commit(*zip(*copies))", "end.commit(*zip(*copies), skipped=end.skip > 2)", _PARTS),
    Fault("gradients that leave the graph depend on no slot that it has written", "train_step/parts/own.py",
          "end.skip is not None or end.keeps_gradients", "end.skip is not None", _PARTS),
    Fault("two parts that are written alike are two", "train_step/parts/own.py",
          "source_digest(type(part), Part, repr(of_class))", "source_digest(type(part), Part)", _PARTS),
    Fault("clipping measures what a part has set", "train_step/parts/norm.py",
          "        if end.replaced:", "        if False:", _PARTS),
    Fault("what an attribute of a part says is no constant that the graph does not know of", "train_step/parts/own.py",
          "    if others := sorted(vars(part).keys() - fields.keys()):", "    if others := []:", _PARTS),
    Fault("a skipped norm is not in the average", "train_step/parts/safeguard.py",
          "left_out, more = skipped | ~norm.isfinite(),", "left_out, more = ~norm.isfinite(),", _SAFEGUARD),
    Fault("a buffer that the forward replaces is put back", "compiler/buffers_put_back.py",
          "buffers[name], self._replaces = put_back[key], True", "self._replaces = True", _SAFEGUARD),
    Fault("a buffer that was None, or becomes it, is as it was", "compiler/buffers_put_back.py",
          "if verdict.item():", "if False:", _SAFEGUARD),
    Fault("a buffer of two modules stays one", "compiler/buffers_put_back.py",
          "if (key := (id(now), id(buffer))) not in put_back:", "if key := (id(now), id(buffer)):", _SAFEGUARD),
    Fault("what earlier calls of an accumulation wrote is put back", "compiler/buffers_put_back.py",
          "if self._kept is None and (", "if (", _SAFEGUARD),
    Fault("what a call kept that did not run is forgotten", "train_step/state.py",
          "self.kept_buffers.forget()  # of a call that failed, or was captured alone", "pass", _SAFEGUARD),
    Fault("an optimizer outside of the graph is skipped", "train_step/state.py",
          "if not (self._components.may_skip or self.mean.last is not None) or not is_skipped(verdict):", "if True:", _SAFEGUARD),
    Fault("inputs that share memory are looked up in what is updated", "graph/shared_memory.py",
          "where != self._where or any(map(self._meets,", "where != self._where or any(map(lambda _: False,", _SHARED),
    Fault("what the forward writes is looked at where it lies", "train_step/step_compiler.py",
          "MemoryCheck(placeholders, updated, by_forward)", "MemoryCheck(placeholders, updated, [])", _SHARED),
    Fault("where written memory is shared, all is looked at in each call", "graph/shared_memory.py",
          "if self.shared or where", "if where", _SHARED),
    Fault("a hook on a parameter is seen at the next call", "train_step/state.py",
          "        return self._num_hooks != before and", "        return False and", _CHANGES),
    Fault("two tensors of equal numbers are two", "train_step/optimizer_changes.py",
          "map(is_, self._objects_now()", "map(lambda one, other: one is other or one == other, self._objects_now()", _CHANGES),
    Fault("a parameter that moved to another group is read again", "train_step/optimizer_changes.py",
          'for part in (group["params"], (_END,))', 'for part in (group["params"],)', _CHANGES),
    Fault("state that is shared is refused", "train_step/state.py",
          "check_state([*((", "list([*((", _SHARED),
    Fault("images of one channel that lie otherwise are copied", "passes/channels_last.py",
          " and images.is_contiguous() and not", " and not", ("tests/passes/test_channels_last.py",)),
    Fault("a hyperparameter is read again", "train_step/optimizer_changes.py",
          "self._facts_now() != self._facts", "False", _CHANGES),
    Fault("a number of the state that was written is read again", "train_step/optimizer_state.py",
          "return self._versions != [tensor_version(step) for step in self._counts.values()] or", "return", _SHARED),
    Fault("a number of the state that has moved is read again", "train_step/optimizer_state.py",
          " or self._where != self._where_now()", "", _SHARED),
    Fault("a number that has moved is no element of the vector", "optimizers/update.py",
          "viewed(own) is base and own.data_ptr() == base[i].data_ptr()", "viewed(own) is base", _SHARED),
    # Of parameters that are sharded.
    Fault("gradients are a mean over the ranks", "ops/gather_shards.py",
          "        return \"avg\", 1, 1", "        return \"sum\", 1, 1", _SHARDED),
    Fault("a gather whose gradient is wanted is where gradients are on", "passes/gather_shards.py",
          "while modes.get(first.prev, ON) != ON:", "while False:", _SHARDED),
    Fault("a norm is of the rows of all ranks", "train_step/parts/norm.py",
          "    if sharded_over is not None:", "    if False:", _SHARDED),
    Fault("whole parameters that an evaluation has left are dropped", "_torch_fsdp.py",
          "            if not group.is_sharded:", "            if False:", _SHARDED),
    Fault("a rank's padded rows are read by nobody", "ops/gather_shards.py", "[:length]\n", "[-length:]\n", _SHARDED),
    Fault("a sum is waited for", "ops/gather_shards.py",
          "rows = c10d.wait_tensor.default(c10d.reduce_scatter_tensor.default(flat, operation, n, ctx.group))",
          "rows = c10d.reduce_scatter_tensor.default(flat, operation, n, ctx.group)", _SHARDED),
    Fault("the mean of ranks stays as exact as it was summed", "ops/gather_shards.py",
          "view(shape).to(own)", "view(shape).to(grads[place].dtype).to(own)", _BETWEEN_CALLS),
    Fault("what was dropped is gathered again for the backward", "passes/schedule_shards.py",
          "            if not self._kept.intersection(gather.names):", "            if False:", _GATHERS),
    Fault("gradients of calls are added in the dtype of the update", "train_step/state.py",
          "[p.dtype for p in now.params] if now.gradient_sums", "[p.dtype for p in params] if now.gradient_sums", _SHARDED),
    Fault("a gather that is pending does not become whole later", "_torch_fsdp.py",
          "            group.wait_for_unshard()", "            pass", _BETWEEN_CALLS),
    Fault("gradients are added up where they are kept now", "train_step/sharded.py",
          "        self.accumulated.rows = rows", "        pass", _BETWEEN_CALLS),
    Fault("earlier gradients are this rank's rows", "passes/gather_shards.py",
          "value(inputs[place]).narrow(0, 0, self.placeholders[place].shape[0])", "value(inputs[place])", _SHARDED),
    # Of an update that is shared over the ranks.
    Fault("rows are copied before the update that is in the backward", "passes/update_early.py",
          "others = (*update.args[:1], *update.args[2:])", "others = ()", _SHARED_UPDATE),
    Fault("a sum of rows is waited for in front of the next start", "passes/update_early.py",
          "if is_gathered else following)", "if not is_gathered else following)", _SHARED_UPDATE),
    Fault("what moves up stays behind what it depends on", "graph/order.py",
          "set().union(*(behind[node] for node in nodes)).difference(nodes)", "()", _SHARED_UPDATE),
    Fault("ranks compare the order that the last pass has left", "train_step/step_compiler.py",
          "[*collectives, *graph.record.stages[-1].collectives]", "collectives", _SHARED_UPDATE),
    Fault("state that was loaded whole becomes rows", "optimizers/update_rules.py",
          "layout.placed(held, p) if held", "held if held", _SHARED_UPDATE),
    Fault("what every rank has whole is in a norm once", "train_step/parts/norm.py",
          "[g if g.dim() else on_first_rank(g, sharded_over) for g in grads]", "list(grads)", _SHARED_UPDATE),
    Fault("what has no rows is summed for every rank", "passes/scatter_gradients.py",
          "return super().reduce(index, flat, like=like)", "return flat", _SHARED_UPDATE),
    Fault("rows whose gradients were added to earlier ones are gathered", "passes/scatter_gradients.py",
          "            if gradient is not None:\n", "            if gradient is not None and BUCKET in gradient.meta:\n",
          _SHARED_UPDATE),
    Fault("a flush applies rows that are averaged already as they are", "train_step/flush.py",
          "    if not components.reduces_each_call:\n", "    if True:\n", _SHARED_UPDATE),
    Fault("averages are of rows", "train_step/slots.py",
          "self.layout.as_state(slot.make(self.layout.rows(p)), p)", "slot.make(p)", _SHARED_UPDATE),
    Fault("the last stack of matrices is filled up", "ops/orthogonalize_rows.py",
          "order += [None] * (-len(shapes) % world_size)", "pass", _MATRICES),
    Fault("a matrix is made orthogonal whole, and not by the rows of each rank", "ops/orthogonalize_rows.py",
          "orthogonal(padded[:length], a, b, c, eps, num_iterations)",
          "torch.cat([orthogonal(x, a, b, c, eps, num_iterations) for x in padded[:length].chunk(world_size)])", _MATRICES),
    Fault("parts of a step read rows of what Muon updates", "train_step/components.py",
          "full_matrices=not options.parts", "full_matrices=True", _MUON),
    Fault("code that is not near the ops is looked at in float64", "observe/code_errors.py",
          "each.least * whole / 2 for", "1e9 for", ("tests/observe/test_code_errors.py",)),
    Fault("no step follows a mismatch that was read late", "train_step/all_or_nothing.py",
          "if self._changed or late or self._communicated", "if self._changed or self._communicated", _APART),
    Fault("what was compared last is read before a step is saved", "train_step/step.py",
          "                self._components.agreement.finish()", "                pass", _APART),
)


def survives(fault: Fault, tests: Sequence[str] = ()) -> bool:
    """Return whether the tests pass with the fault in a copy of the package.

    Raises:
        ValueError: the line is not there, or more than once.
    """
    with tempfile.TemporaryDirectory() as folder:
        for part in ("apexfx", "tests", "csrc", "examples", "benchmarks", "docs"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, folder)
        Path(folder, "apexfx", fault.file).write_text(fault.planted())
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "not inductor"]
        command += ["-m", "long or not long"]
        command += tests or fault.tests
        run = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
    if run.returncode:
        print("  " + next((line for line in run.stdout.splitlines() if line.startswith(("FAILED", "failed"))), run.stdout)[:200])
    return run.returncode == 0


def main() -> None:
    chosen = [int(argument) for argument in sys.argv[1:]] or range(1, len(FAULTS) + 1)
    alive = []
    for number in chosen:
        fault = FAULTS[number - 1]
        print(f"{number}: {fault.guarantee}", flush=True)
        if survives(fault):
            alive.append(number)
            print("  SURVIVES", flush=True)
    print(f"{len(list(chosen)) - len(alive)} of {len(list(chosen))} died" + (f"; alive: {alive}" if alive else ""))


if __name__ == "__main__":
    main()
