"""Checks in every backward that each gradient was averaged, and averages what the graphs could not.

The allreduce itself is nodes in the backward graph. What a graph cannot see is a gradient computed outside of it: by a
forward that bypassed the transformed model, by a frame that Dynamo left to eager, by a loss that uses a parameter itself. So
each parameter compares the gradient that autograd is about to accumulate with those that graphs have averaged in this
backward: the same tensor, untouched, is an average. Nor can a graph see that its collectives meet those of another step on a
rank that skipped a backward: before the graph's, the ranks compare how many forwards they have run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import in_backward, register_own, tensor_version
from ..buckets.eager_reduce import reduce_gradients
from ..buckets.plan import given_plan
from ..config import BucketConfig
from ..errors import UnsynchronizedGradientError
from ..graph.printing import first_names
from ..graph.unused_gradients import GraphRun
from ..ops.ranks_agreed import end_comparison, waiting
from .agreement import Agreement, Communication
from .backward_callback import BackwardCallback
from .no_sync import SET_ASIDE, Synchronizer, local_gradients
from .used_anywhere import UsedAnywhere

log = logging.getLogger(__name__)


_Average = tuple[int, int]  # address and version of a gradient as it left a graph: autograd adds in place, or makes another


@dataclass
class _Watched:
    """A parameter whose gradients are looked at, while it lives.

    Attributes:
        hook: the parameter's.
        is_in_graphs: whether any graph has held it.
        is_averaged_again: whether something was added to its average in any backward.
    """

    hook: ParameterHook
    is_in_graphs: bool = False
    is_averaged_again: bool = False


@dataclass
class _Backward:
    """What is known of the backward under way; parameters by id.

    Attributes:
        averages: what graphs have averaged and autograd is yet to accumulate.
        local: those that a graph leaves local on purpose.
        unaccumulated: those that were given a gradient that is no average, and that have not accumulated it:
            `torch.autograd.grad` returns it.
        outside: no graph had a part in the gradient.
        partly_outside: something was added to an average.
        graphs_average: whether a graph averages.
        flush_due: whether it ends an accumulation.
    """

    averages: dict[int, list[_Average]] = field(default_factory=dict)
    local: set[int] = field(default_factory=set)
    unaccumulated: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    partly_outside: set[int] = field(default_factory=set)
    graphs_average: bool = False
    flush_due: bool = False


@dataclass
class _GraphBackward:
    """What is done around the backward of one run of a graph.

    Attributes:
        sync: the gradient side of the graph's model.
        parameters, run, communication, reduces, inputs, waits: as of `GradientSync.on_forward`.
        places: of the parameters' gradients among the graph's, each with the parameter's id.
        ends_accumulation: local gradients are averaged at the end of the backward.
    """

    sync: GradientSync
    parameters: Sequence[nn.Parameter]
    run: GraphRun
    communication: Communication
    reduces: bool
    inputs: Sequence[int] | None
    waits: bool
    places: Sequence[tuple[int, int]]
    ends_accumulation: bool
    used_anywhere: UsedAnywhere | None = None

    def before(self, tangents: Sequence[Tensor | None]) -> None:
        self.sync.begin_graph(self)
        if self.reduces and self.inputs is not None and self.sync.agreement is not None:
            self.used_anywhere = UsedAnywhere(self.sync.group, self.inputs, self.run.used(tangents), self.parameters[0].device)

    def after(self, gradients: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        sync = self.sync
        end_comparison(sync.group.group_name)  # of a graph that was not to communicate
        if (used := self.run.used(tangents)) != -1:
            if self.used_anywhere is not None:
                used |= self.used_anywhere.get()
            elif used == 0 and sync.agreement is not None:
                names = sync.shown_keys({*map(id, self.parameters)})
                raise _error(f"a graph of {names} ran in this backward though nothing uses what it computes on this rank, and "
                             "whether another rank does is asked of graphs with several outputs alone. Detach what is computed "
                             "from its output and not used, or leave it out.")
            gradients = self.run.without_unused(gradients, used)
        for place, key in self.places:
            if (gradient := gradients[place]) is not None:
                sync.backward.averages.setdefault(key, []).append((gradient.data_ptr(), tensor_version(gradient)))
        return gradients


class ParameterHook:
    """Looks at every gradient of one parameter, for all data-parallel models that hold it."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self._key = id(parameter)
        self._models: list[weakref.ref[GradientSync]] = []  # the one that ran forward last comes last
        self._has_average = False  # of the gradient at hand: graphs averaged a part of it
        self._is_average = True  # ... and nothing else is in it
        parameter.register_hook(self._on_gradient)
        parameter.register_post_accumulate_grad_hook(self._on_accumulated)

    def add_model(self, model: GradientSync) -> None:
        """Note that `model` runs forward with this parameter."""
        if not self._models or self._models[-1]() is not model:
            self.remove_model(model)
            self._models.append(weakref.ref(model))

    def remove_model(self, model: GradientSync) -> None:
        """Note that `model` is gone."""
        self._models = [ref for ref in self._models if ref() not in (None, model)]

    def _owner(self) -> GradientSync | None:
        """Return the model that the gradient at hand belongs to: one whose graph left it local, or the last to run."""
        models = [model for ref in self._models if (model := ref()) is not None]
        return next((model for model in models if self._key in model.backward.local), models[-1] if models else None)

    def _on_gradient(self, gradient: Tensor | None) -> None:
        self._is_average = True
        if gradient is None:  # a graph has none for this parameter, and autograd says so
            return
        averages: list[_Average] = []
        for ref in self._models:
            if (model := ref()) is not None:
                model.notice_dropped_backward()
                averages += model.backward.averages.pop(self._key, ())  # a reentrant checkpoint accumulates several times
        if (owner := self._owner()) is not None:
            self._has_average = bool(averages)
            self._is_average = self._has_average and self._key not in owner.backward.local and _is_sum(gradient, averages)
            if not self._is_average:
                owner.backward.unaccumulated.add(self._key)

    def _on_accumulated(self, _: Tensor) -> None:
        if not self._is_average and (owner := self._owner()) is not None:
            owner.on_accumulated(self._key, self.parameter(), has_average=self._has_average)


_hooks: Any = WeakTensorKeyDictionary()  # parameter -> its hook, by identity: tensors compare elementwise


class GradientSync(Synchronizer):
    """The gradient side of one data-parallel model on this rank.

    After a backward each parameter that received a gradient has its average over the ranks, or an error is raised before
    anything can use it:

    - A gradient that a graph averaged is left as it is.
    - One with a further share from outside of the graphs (the loss uses the parameter itself) is averaged once more at the
      end of the backward, and of every later one; the ranks agree on the first time.
    - One that no graph had a part in raises `UnsynchronizedGradientError`.

    Inside `no_sync()` gradients stay local, and are averaged whole by the first backward after it. A forward inside of it leaves
    its gradients local wherever its backward runs, as torch DDP does. Every rank enters it, or none: the flush and the allreduce
    nodes of a graph do not match each other, so the ranks compare which of them follows. `torch.autograd.grad` returns
    averages where the graphs made them; it raises where a part would have to be averaged at the end of the backward.

    Args:
        group: over which gradients are reduced.
        config: the bucket options.
        agreement: among the ranks; None for a group without peers to compare with.
        note: is told, in words, what the model's report should say.

    Attributes:
        backward: what is known of the backward under way.
    """

    def __init__(self, group: dist.ProcessGroup, config: BucketConfig, agreement: Agreement | None = None,
                 note: Callable[[str], None] = lambda _: None) -> None:
        self.group = group
        self.config = dataclasses.replace(config, plan=given_plan(config))  # a file is read once
        self.backward = _Backward()
        self.agreement = agreement
        self._note = note
        self._names: dict[int, str] = {}  # of the parameters, by id
        self._watched: dict[int, _Watched] = {}  # likewise
        self._registered: dict[str, ParameterHook] = {}  # of the parameter that last ran forward under each name
        self._pending: dict[int, Tensor] = {}  # those whose .grad holds local, not yet averaged micro-batches
        self._backward_callback = BackwardCallback()

    def watch(self, name: str, parameter: Tensor) -> None:
        """Look at the gradients of `parameter` from now on, under the name that errors use; to be called for each forward."""
        watched = self._watched.get(id(parameter))
        hook = watched.hook if watched is not None else None
        if hook is None or hook.parameter() is not parameter:  # the id may be that of a parameter that is gone
            if not (parameter.requires_grad and parameter.is_leaf):  # functional_call() may put results of ops in its place
                return
            if name in self._registered:
                self._forget_parameters()
            if (hook := _hooks.get(parameter)) is None:
                hook = _hooks[parameter] = ParameterHook(parameter)
            self._names[id(parameter)], self._watched[id(parameter)] = name, _Watched(hook)
        self._registered[name] = hook
        hook.add_model(self)

    def _forget_parameters(self) -> None:
        """Forget what is known of parameters that are gone."""
        for key in [key for key, watched in self._watched.items() if watched.hook.parameter() is None]:
            del self._names[key], self._watched[key]

    def stop(self) -> None:
        """Look at no gradient any more: the model is gone, and its parameters may be trained without it."""
        for watched in self._watched.values():
            watched.hook.remove_model(self)
        self._pending.clear()

    @property
    def in_graph(self) -> bool:
        """Whether the next forward uses the graph with allreduce nodes.

        After local micro-batches it does not: the graph would average this micro-batch alone, so the step that ends an
        accumulation runs local too, and `.grad` is reduced once as a whole.
        """
        return self.enabled and not self._pending

    def on_forward(self, parameters: Sequence[nn.Parameter], run: GraphRun, *, reduces: bool, communication: Communication,
                   inputs: Sequence[int] | None, waits: bool = False) -> None:
        """Prepare for the backward of a graph that has just run forward.

        Args:
            parameters: those in the graph that have a gradient.
            run: the graph's, in autograd's graph.
            reduces: whether the graph's backward holds the allreduce nodes.
            communication: what it communicates.
            inputs: the parameters' positions among its inputs; None for a graph that gives all of them a gradient or none.
            waits: whether the graph waits for the comparison of the ranks in front of its first collective.
        """
        keys = set(map(id, parameters))
        leaves = [id(getattr(following, "variable", None)) for following, _ in run.node.next_functions]
        places = [(place, key) for place, key in enumerate(leaves) if key in keys]
        if not places or not reduces:
            run.hide_unused()
        if not places:
            return
        for key in keys & self._watched.keys():
            self._watched[key].is_in_graphs = True
        graph = _GraphBackward(self, parameters, run, communication, reduces, inputs, waits, places, self.enabled and not reduces)
        register_own(run.node.register_prehook, graph.before)
        if reduces:
            register_own(run.node.register_hook, graph.after)

    def begin_graph(self, graph: _GraphBackward) -> None:
        """Begin the backward of a graph: decide whether it ends an accumulation, and have the ranks compare that."""
        self.notice_dropped_backward()
        self._backward_callback.queue(self._end_of_backward)
        # A forward from before no_sync() adds an average to what is local: averaged with it, that stays as it is.
        flush = graph.ends_accumulation or (graph.reduces and self.enabled and bool(self._pending))
        if not self._averages and (flush if graph.reduces else not self._pending):
            self._refuse_to_sum_twice(graph.parameters, flushes=flush)
        if self.agreement is not None and (graph.reduces or flush):
            end_comparison(self.group.group_name)  # of a backward that has raised before it communicated
            with self._local_unless_failed():
                end = self._local_unless_failed()(self.agreement.begin_run(graph.communication, flushes=flush))
            if graph.waits and graph.reduces and graph.inputs is None:
                waiting[self.group.group_name] = end
            else:
                end()
        if not graph.reduces:
            self.backward.local.update(map(id, graph.parameters))
        self.backward.graphs_average |= graph.reduces
        self.backward.flush_due |= flush

    def _refuse_to_sum_twice(self, parameters: Sequence[nn.Parameter], *, flushes: bool) -> None:
        """Raise where `.grad` would hold sums over the ranks, not averages, and local gradients: what follows sums both."""
        names = [self._names[id(p)] for p in parameters if flushes or p.grad is not None and bool(p.grad.any())]
        if names:
            raise _error(
                f"the gradient of {_shown(names)} would be made of sums over the ranks and of local gradients from "
                "no_sync(), and without gradient_average those sums would be summed once more. Call zero_grad() before "
                "no_sync(), run the forward of each backward on the same side of it, or leave gradient_average=True.")

    def on_training_forward(self) -> None:
        """Count a forward of the whole model: a backward is to follow on every rank."""
        if self.agreement is not None and self.enabled and not in_backward():
            self.agreement.begin()

    def on_accumulated(self, key: int, parameter: Tensor, *, has_average: bool) -> None:
        """Note that the parameter whose id is `key` has a gradient that graphs have not averaged, or have in part."""
        self.backward.unaccumulated.discard(key)
        if key in self.backward.local or not self.enabled:
            self._pending[key] = parameter
            local_gradients.setdefault(parameter, False)
        elif has_average:
            self.backward.partly_outside.add(key)
        else:
            self.backward.outside.add(key)
            self._backward_callback.queue(self._end_of_backward)

    def _end_of_backward(self) -> None:
        backward = self.backward
        returned = self.shown_keys(backward.unaccumulated)
        self._forget_backward()
        if backward.outside:
            raise _error(self._explain(backward.outside))
        if returned and backward.flush_due:
            raise _error(
                f"torch.autograd.grad() would return this rank's own gradient of {returned}: after no_sync() a backward stays "
                "local until .grad is averaged as a whole. Call backward().")
        if returned and backward.graphs_average and self.enabled:
            raise _error(
                f"torch.autograd.grad() would return a gradient of {returned} with a share that is this rank's own, from "
                "outside of the transformed model's graphs (the loss uses the parameter itself, or a graph break left a part of "
                "the model to eager). Call backward(), which averages it, or compute that share inside of the model's forward.")
        if backward.graphs_average and self.enabled and self._pending and not backward.flush_due:
            self._forget_local()
            raise _error(
                "this backward went through a forward from inside no_sync() and one from outside of it, so .grad holds "
                "averages and local gradients. Run them in backwards of their own, or both forwards on the same side.")
        if backward.flush_due:
            self.flush()
        elif backward.graphs_average:
            again = {key for key, watched in self._watched.items() if watched.is_averaged_again or key in backward.partly_outside}
            if again:
                self._average_again(again)

    def shown_keys(self, keys: Collection[int]) -> str:
        return _shown([name for key, name in self._names.items() if key in keys])

    def _explain(self, outside: set[int]) -> str:
        left_out = [name for key, name in self._names.items() if key in outside and not self._watched[key].is_in_graphs]
        bypassed = [name for key, name in self._names.items() if key in outside and self._watched[key].is_in_graphs]
        lines = [f"the gradient of {_shown(left_out + bypassed)} was computed outside of the transformed model's graphs, "
                 f"so it is this rank's own and not the average over {self.group.size()} ranks."]
        if left_out:
            lines.append(f"No captured graph holds {_shown(left_out)}: a graph break left its module to eager, or it is used "
                         "outside of the model's forward only. TORCH_LOGS=graph_breaks says where; fullgraph=True raises there.")
        if bypassed:
            lines.append(f"Graphs hold {_shown(bypassed)}, and none of them ran in this backward: call the model that "
                         "transform() returned, not the module it was made from, nor one of its methods that skips forward; "
                         "or a graph break in a loop has made Dynamo leave the code to eager (TORCH_LOGS=graph_breaks).")
        lines.append("A backward that is meant to stay local belongs inside `with model.no_sync():`.")
        return "\n".join(lines)

    def _average_again(self, keys: set[int]) -> None:
        """Average the `.grad` of parameters whose gradient has a share from outside of the graphs.

        Of what the graphs averaged before, an average is the same once more.

        Raises:
            RankMismatchError: not every rank has found the same parameters.
        """
        parameters = {key: p for key, watched in self._watched.items()
                      if key in keys and (p := watched.hook.parameter()) is not None}
        if not self._averages:
            raise _error(
                f"the gradient of {self.shown_keys(parameters)} has a share from outside of the transformed model's "
                "graphs (the loss uses the parameter itself, or a graph break left a part of the model to eager), which without "
                "gradient_average cannot be summed over the ranks alone. Compute that share inside of the model's forward.")
        if fresh := {key for key in parameters if not self._watched[key].is_averaged_again}:
            if self.agreement is not None:
                self.agreement.ensure("parameters whose gradient has a share from outside of the graphs",
                                      [name for key, name in self._names.items() if key in fresh])
            message = (f"apexfx: the gradient of {self.shown_keys(fresh)} has a share from outside of the graphs (the loss uses "
                       "the parameter itself, or a graph break left a part of the model to eager); it is averaged once more at "
                       "the end of each backward")
            self._note(message)
            log.info(message)
            if used_up := [key for key in fresh if parameters[key].grad is None]:
                raise _error(
                    f"the gradient of {self.shown_keys(used_up)} has a share from outside of the transformed model's graphs, "
                    "which is averaged at the end of the backward, and a hook has used and reset it before. Step the optimizer "
                    "after backward(), or compute that share inside of the model's forward.")
        for key in parameters:
            self._watched[key].is_averaged_again = True
        self._reduce((self._names[key], p) for key, p in parameters.items())

    @property
    def _averages(self) -> bool:
        """Whether gradients are divided by the number of ranks: then what is averaged may be averaged again."""
        return self.config.gradient_average if self.config.plan is None else self.config.plan.averages

    def notice_dropped_backward(self) -> None:
        """Forget what is left of a backward that has raised."""
        if self._backward_callback.was_dropped():
            self._forget_backward()

    def _forget_backward(self) -> None:
        self.backward = _Backward()
        self._backward_callback.clear()

    @contextlib.contextmanager
    def _local_unless_failed(self) -> Iterator[None]:
        """Give up accumulated gradients where the ranks do not agree about them."""
        try:
            yield
        except BaseException:
            self._forget_local()
            raise

    def _forget_local(self) -> list[str]:
        """Forget which gradients are local; return the names of those that were set aside."""
        local, self._pending = self._pending, {}
        return [self._names[key] for key, p in local.items() if local_gradients.pop(p, False)]

    def flush(self) -> None:
        """Average the accumulated `.grad` of every parameter over the ranks, be it frozen since, in the plan's buckets."""
        registered = [(name, p) for name, hook in self._registered.items() if (p := hook.parameter()) is not None]
        known = {id(p) for _, p in registered}
        # functional_call(), or an assignment, has put others in the place of those that accumulated.
        replaced = [(self._names[key], p) for key, p in self._pending.items() if key not in known]
        unaccumulated = [p for _, p in registered if not p.requires_grad and id(p) not in self._pending]
        if set_aside := self._forget_local():
            raise _error(SET_ASIDE.format(_shown(set_aside)))
        if not self._averages:
            self._refuse_to_sum_twice(unaccumulated, flushes=False)
        self._reduce([*registered, *sorted(replaced, key=lambda named: named[0])])

    def _reduce(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Average `.grad` of parameters, of which several may go by one name: their buckets know them by it."""
        rounds: list[dict[str, Tensor]] = []
        for name, p in named:
            first = next((taken for taken in rounds if name not in taken), None)
            if first is None:
                rounds.append(first := {})
            first[name] = p
        for parameters in rounds:
            reduce_gradients(parameters, self.config, self.group)


def _error(text: str) -> UnsynchronizedGradientError:
    return UnsynchronizedGradientError(f"apexfx: {text}")


def _is_sum(gradient: Tensor, averages: Sequence[_Average]) -> bool:
    """Return whether `gradient` is the sum of what graphs averaged, nothing else added.

    Autograd adds to the first of several gradients where nothing else holds its storage; or else it makes a tensor of the
    first two, and adds the others to that. So the version tells how many there were; under create_graph it does not.
    """
    if gradient.numel() == 0:
        return True
    address, version, num_added = gradient.data_ptr(), tensor_version(gradient), len(averages) - 1
    for was_at, left_as in averages:
        if was_at == address:
            return version == left_as + num_added
    return num_added > 0 and version == num_added - 1 and not torch.is_grad_enabled()


def _shown(names: Sequence[str]) -> str:
    return first_names([*map(repr, names)])
