"""transform(): a model that runs as rewritten graphs, and is otherwise the model it was made from."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import passes as passes_
from . import subclassing
from ._torch import COMPILED_CALL, REPLICATE
from .backend import compiler_for
from .compiler.model_setup import check_model, set_up
from .compiler.private_code import with_private_code
from .compiler.process_groups import averaged_over_none
from .compiler.refusals import COMPILES_ITSELF
from .compiler.traceable import TraceableClasses, traced_forward
from .compiler.transformed import get_compiled
from .config import TransformConfig
from .graph.printing import first_names
from .report.data import Report
from .subclassing import subclass

if TYPE_CHECKING:
    from .compiler.graph_compiler import GraphCompiler

log = logging.getLogger(__name__)


def transform(model: nn.Module, **options: Any) -> nn.Module:
    """Return `model` as one whose forward and backward run as rewritten graphs.

    The result is of a subclass of the model's class and has the attributes of the model itself, in one `__dict__`: what is set
    on either later, the mode of `.train()` and `.eval()` too, both have. Names, `state_dict()` keys, `isinstance`, optimizers
    already built, `.to()`, `deepcopy` and `torch.save` behave as before. A forward, or `.compile()`, that is set on one of them
    is not the other's. Graphs are captured at the first call, or by `.capture(*inputs)`.

    Args:
        model: any module that is not transformed already. It is left usable; under O3 its parameters become half
            (buffers stay: graphs cast them where they are read, and running statistics keep float32).
        opt_level: "O0" float32; "O1", the default, casts per op by rule; "O2" half except batch norm, float32
            parameters as masters; "O3" half, parameters included.
        dtype: the half type or its name; default float16 for a model on CUDA, bfloat16 on the CPU.
        keep_batchnorm_fp32: override of the level's (O2 True, O3 False).
        precision: overrides by module path pattern or op name, e.g. `{"layer4.*": "float32"}`.
        sync_bn: batch norm statistics over all ranks.
        ddp: True or a `BucketConfig`: parameters are broadcast from rank 0 once, gradients averaged by bucketed
            allreduce nodes in the backward graph. Needs an initialised process group.
        process_group: for sync_bn and ddp; default the world.
        passes, skip: your own passes, run after the built-in ones of their stage; names of passes to leave out.
        inner: "inductor" (default; the first call compiles), "eager" or "cudagraphs": what runs the rewritten graphs.
        inner_options: for Inductor, those of `torch.compile(options=)` that are a number, a text, True, False or None:
            `{"cpp_wrapper": True}`, `{"max_autotune": True}`. Over ranks they have to be the same.
        fullgraph, dynamic: as in torch.compile; fullgraph also makes a rewrite that matches nothing an error.
        verify: "auto" (default): the code that Inductor makes of a graph is compared with the graph at its first call, where
            memory does (docs/proof.md); "code": whatever memory there is; "off": not at all; "final": as "auto", and all
            invariants after each stage; "each": also every pass on the real inputs.
        check_indices: None (default): labels and indices that come in with a batch on the CPU are looked at before each call, and
            an IndexError names tensor, number and op where one is out of range; True: on a device, too, for which the call
            waits; False: not at all.
        methods: names of methods other than forward that run as graphs, too: `("encode", "decode")`. All others run as they are
            written where they are called from outside, with no pass over them.

    Raises:
        ValueError, TypeError: an option that does not exist, does not fit, or contradicts another.
        RankMismatchError: ranks hold different models.
    """
    config = TransformConfig.from_options(options)
    check_model(model, config, "transform", give="transform the module",
                inner="transform the inner module and wrap the result, or use ddp=True instead of the wrapper")
    if slots := [cls.__name__ for cls in type(model).__mro__ if vars(cls).get("__slots__")]:
        raise ValueError(f"apexfx: class {slots[0]} has __slots__, whose values the transformed model would not share; leave "
                         "__slots__ out of it")
    notes = _notes_of_modules(model, config)
    if (none := averaged_over_none(config)) and any(p.requires_grad for p in model.parameters()):
        notes.append(f"{none} by this model: give ddp=True to train it, or wrap the result in DistributedDataParallel")
    passes_.check_names(config)
    _check_methods(type(model), config.methods)
    compiler = compiler_for(config)
    for note in notes:
        compiler.report.note(note)
        log.info(note)
    set_up(model, config, compiler.groups, compiler.agreement)
    return make_transformed(model, config, compiler)


transform.__signature__ = inspect.Signature(  # the options and their defaults, as help() and notebooks show them
    [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="nn.Module"),
     *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inspect.signature(TransformConfig).parameters.values())],
    return_annotation="nn.Module")


def _notes_of_modules(model: nn.Module, config: TransformConfig) -> list[str]:
    """Ask the modules whose class has a say in it, as amp's have, whether they can be transformed, and what to note."""
    notes = [module.apexfx_before_transform(f"submodule {name!r}" if name else "the model", config.opt_level)
             for name, module in model.named_modules() if hasattr(type(module), "apexfx_before_transform")]
    return [note for note in notes if note]


def _check_methods(cls: type[nn.Module], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _own_methods(cls):
            raise ValueError(f"apexfx: methods={names!r} was given, and {name!r} is no method of {cls.__name__}'s own beside its "
                             f"forward; it has {first_names(_own_methods(cls)) or 'none'}")


def _own_methods(cls: type[nn.Module]) -> list[str]:
    """Return the names of the public methods that a model's class adds to those of torch's modules."""
    methods = {name: inspect.getattr_static(cls, name) for name in dir(cls)
               if name[0] != "_" and not hasattr(nn.Module, name) and name not in _INSPECTION}
    return [name for name, method in methods.items()
            if inspect.isfunction(method) and not method.__module__.startswith("torch.")]


class TransformedModule:
    """What `transform()` adds to a model's class. `compiler.transformed.get_compiled()` finds its state."""

    def _get_name(self) -> str:
        return f"Apexfx{type(self).__name__}"

    def __reduce_ex__(self, protocol: int) -> Any:
        # The state comes apart, once the new object is known: what is in it may refer to the model, as a bound method does.
        return _empty, _class_of(self), (source_of(self), get_compiled(self).config, self._apexfx_forward)

    def __setstate__(self, state: tuple[nn.Module, TransformConfig, Any]) -> None:
        source, config, forward = state
        _compile(self, source, config, compiler_for(config), forward)

    def __copy__(self) -> nn.Module:
        return _with_source(self, _empty(*_class_of(self)), copy.copy(source_of(self)), self._apexfx_forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        duplicate = memo[id(self)] = _empty(*_class_of(self))
        return _with_source(self, duplicate, *copy.deepcopy((source_of(self), self._apexfx_forward), memo))

    def __prepare_scriptable__(self) -> nn.Module:  # asked for by torch.jit.script
        raise RuntimeError(f"apexfx: {COMPILES_ITSELF}")


class Inspection:
    """The public attributes of a transformed model; one that the model has itself already stays the model's."""

    @property
    def report(self) -> Report:
        """What every pass did, graph by graph; `print` it."""
        return get_compiled(self).report

    def capture(self, *args: Any, **kwargs: Any) -> Report:
        """Capture and compile the graphs for these inputs now, leaving buffers and random state as they were.

        The forward runs: inputs, parameters and other attributes are as it leaves them; that it wrote a parameter is warned of.
        """
        return get_compiled(self).capture(self, args, kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally inside the block; the first backward after it averages the sum over ranks."""
        sync = get_compiled(self).compiler.gradient_sync
        return sync.no_sync() if sync is not None else contextlib.nullcontext()

    def print_readable(
        self, *, stage: str = "forward", after: str | None = None, graph: int = 0, print_output: bool = True
    ) -> str:
        """Print and return a graph as Python: as captured, or after the pass named `after` (default: the last)."""
        text = self.report.code(stage=stage, after=after, graph=graph)
        if print_output:
            print(text)
        return text


_INSPECTION = ("report", "capture", "no_sync", "print_readable")
_SLOTS = ("_apexfx", "_apexfx_forward", COMPILED_CALL)  # what a transformed model has apart from its source


def source_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of the module that `model` was made from."""
    return subclassing.source_class(type(model), TransformedModule)


def source_of(model: nn.Module) -> nn.Module:
    """Return the module that `model`, which is transformed, was made from."""
    return get_compiled(model).source


@functools.cache
def _transformed_class(cls: type[nn.Module], public: tuple[str, ...], methods: tuple[str, ...]) -> type[nn.Module]:
    from ._torch_compilers import not_traced
    from .compiler.compiled_model import ForwardOfClass

    @functools.wraps(cls.forward)  # keeps the signature, which Hugging Face inspects
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return get_compiled(self).call(self, args, kwargs)

    def method_of(name: str) -> Callable[..., Any]:
        own = getattr(cls, name)

        @functools.wraps(own)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = get_compiled(self)
            if torch.compiler.is_compiling() and compiled.classes.in_use:  # a part of the forward, or of another of these
                return own(self, *args, **kwargs)
            return compiled.methods[name].call(self, args, kwargs)

        return method

    # An outer torch.compile would inline the model past our backend; what it calls is compiled.
    forward = not_traced(forward, COMPILES_ITSELF)

    def replicas(self: Any) -> Any:
        raise RuntimeError("apexfx: nn.DataParallel runs copies of the model, and the graphs of a transformed one use the "
                           "original's parameters; start one process a GPU and use ddp=True")

    names = {**{name: Inspection.__dict__[name] for name in public}, **{name: method_of(name) for name in methods},
             REPLICATE: replicas}
    made = subclass(cls, TransformedModule, __qualname__=f"Apexfx{cls.__qualname__}", __slots__=_SLOTS,
                    forward=ForwardOfClass(forward), **names)
    # Models of transformers (5) look up what they record, as hidden states, by how their class prints.
    recorded = vars(sys.modules.get("transformers.utils.output_capturing", object)).get("_CAN_RECORD_REGISTRY", {})
    if str(cls) in recorded:
        dict.__setitem__(recorded, str(made), dict.__getitem__(recorded, str(cls)))
    return made


def _class_of(model: nn.Module) -> tuple[type[nn.Module], tuple[str, ...], tuple[str, ...]]:
    """Return what `_empty` makes another module of the class of `model` from."""
    public = tuple(name for name in _INSPECTION if getattr(type(model), name, None) is Inspection.__dict__[name])
    return source_class(model), public, get_compiled(model).config.methods


def _empty(cls: type[nn.Module], public: tuple[str, ...], methods: tuple[str, ...] = ()) -> nn.Module:
    """Return a transformed module of the class made from `cls` that holds nothing yet."""
    return object.__new__(_transformed_class(cls, public, methods))


def make_transformed(source: nn.Module, config: TransformConfig, compiler: GraphCompiler) -> nn.Module:
    """Return a transformed module that has the attributes of another, which is not.

    Args:
        config: the options; `compiler` was made of them.
        compiler: compiles the graphs.
    """
    taken = dir(source)  # parameters, buffers and submodules included
    public = tuple(name for name in _INSPECTION if name not in taken)
    if len(public) < len(_INSPECTION):
        log.info("%s has its own %s; use apexfx.last_report() for ours", type(source).__name__,
                 ", ".join(sorted(set(_INSPECTION) - set(public))))
    transformed = _empty(type(source), public, config.methods)
    _compile(transformed, source, config, compiler)
    return transformed


def _with_source(model: nn.Module, duplicate: nn.Module, source: nn.Module, forward: Callable[..., Any] | None) -> nn.Module:
    """Make the empty `duplicate` a transformed module of `source`, with the options of `model`; return it."""
    from .compiler.graph_compiler import make_compiler

    config = get_compiled(model).config
    _compile(duplicate, source, config, make_compiler(config, get_compiled(model).compiler.groups), forward)
    return duplicate


def _compile(model: nn.Module, source: nn.Module, config: TransformConfig, compiler: GraphCompiler,
             forward: Callable[..., Any] | None = None) -> None:
    """Give a transformed module that holds nothing yet the attributes of its source, and what its forward calls.

    Args:
        forward: what was set on it as its forward, or None.
    """
    from .compiler.compiled_model import CompiledModel

    if not source.__dict__:  # it is being made itself, and holds what is made here
        raise RuntimeError("apexfx: a module was copied or loaded that holds what transform() has returned for it, as in a hook "
                           "that is a method of the result; copy or save the result in its place")
    object.__setattr__(model, "__dict__", source.__dict__)
    own_forward, cls = source.__dict__.get("forward"), type(source)
    classes = TraceableClasses(compiler.groups.batch_norm, compiler.report)
    traced = own_forward or with_private_code(traced_forward(model, cls, compiler.groups.batch_norm))
    compiled = CompiledModel(model, traced, config, compiler, classes, of_inputs=own_forward is not None, source=source)
    for slot, value in zip(_SLOTS, (compiled, forward, None)):
        object.__setattr__(model, slot, value)
    for name in config.methods:
        method = with_private_code(getattr(cls, name))
        compiled.methods[name] = CompiledModel(model, method, config, compiler, classes, name=name, source=source)
    if compiler.gradient_sync is None:  # which raises
        compiled.watch_first_backward(model, _own_methods(cls))
