"""What Python a graph was captured from: facts about all that Dynamo guarded, by which another program is compared with it.

Dynamo guards the objects of one process: this function, that class. Here a function is its code, a class the code of its
methods, a module its class; numbers, flags and texts are themselves.
"""

from __future__ import annotations

import abc
import builtins
import collections
import contextlib
import copy
import enum
import functools
import hashlib
import importlib
import re
import sys
import types
from _abc import _get_dump
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._torch import OpOverload, OpOverloadPacket
from ...compiler.dynamo_layers import SCOPES
from ..optimizer_state import same_tensors

Row = list[Any]  # where a value was read, what was asked of it, what that was asked with, the answer

_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, torch.dtype, torch.device, torch.Size,
          torch.layout, torch.memory_format, slice, range, enum.Enum)
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
            types.GetSetDescriptorType, types.ClassMethodDescriptorType)
CONTAINERS = (list, dict, set, collections.deque)  # what may change where it is
_OF_RANKS = [getattr(dist, name) for name in ("get_rank", "get_group_rank", "get_node_local_rank") if hasattr(dist, name)]
_MAPPINGS = (dict, types.MappingProxyType)
_NOT_OF_CLASS = ("__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__annotations__", "__firstlineno__",
                 "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__", "__slots__",
                 "__slotnames__")  # the last is put there by the first copy of an object
# Guards by what they ask. Those of the process are compared by `_torch.process_state()`.
_OF_PROCESS = {"GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE", "GLOBAL_STATE", "SHAPE_ENV",
               "AUTOGRAD_SAVED_TENSORS_HOOKS", "FUNCTORCH_STACK_MATCH", "DUAL_LEVEL"}
_OF_TYPE = {"TYPE_MATCH", "NN_MODULE", "NOT_NONE_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK",
            "EMPTY_NN_MODULE_HOOKS_DICT", "TENSOR_MATCH", "WEAKREF_ALIVE"}
_OF_VALUE = {"ID_MATCH", "EQUALS_MATCH", "CONSTANT_MATCH", "BOOL_MATCH", "NONE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH",
             "MODULE_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "RANGE_ITERATOR_MATCH"}
_OF_ATTRIBUTE = {"HASATTR": "attr", "NOT_PRESENT_IN_GENERIC_DICT": "attr", "DICT_CONTAINS": "key", "DICT_NOT_CONTAINS": "key",
                 "SET_CONTAINS": "item", "SET_NOT_CONTAINS": "item"}


# Sources of what each call is given, and of what a module holds itself.
_LOOKED_AT = re.compile(r"L\['(?:batch|named_inputs)'\]|L\['inputs'\]\.(?!model\b|objective\b)")
_OF_MODULE = re.compile(r"L\['inputs'\]\.model(?:\._modules\['[^']*'\])*(?:\._(?:parameters|buffers)\['[^']*'\]|\.\w+)?")

_OF_VARS = re.compile(r"(.*\.__dict__)\[")
_OF_BATCH = re.compile(r"(L\['(?:batch|named_inputs)'\](?:\[[^][]*\])*)\.")


class NotComparable(Exception):
    """Another program could not be told from this one; the text says by what."""


class Facts:
    """Says what values are, in texts that are the same in another process.

    Attributes:
        codes: of the functions that were looked at.
    """

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self._classes: dict[type, str] = {}
        self._bases: dict[type, str] = {}

    def of(self, value: Any) -> str:
        """Return what `value` is; of any other object, what its class is."""
        if is_plain(value):
            return text(value)
        if isinstance(value, Tensor):
            strides = tuple(value.stride()) if value.layout == torch.strided else value.layout
            return (f"{type(value).__name__} {value.dtype} {tuple(value.shape)} strides {strides} on {value.device}"
                    + ", requires_grad" * value.requires_grad + ", conjugated" * value.is_conj() + ", negated" * value.is_neg())
        if isinstance(value, types.FunctionType):
            return f"function {value.__module__}.{value.__qualname__} {self._function(value)}"
        if isinstance(value, types.CodeType):
            self.codes.update(_all_codes(value))
            return f"code of {value.co_qualname} {code_digest(value)}"
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            return f"method {self.of(value.__func__)}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            constants = sorted(name for name, each in vars(value).items() if is_plain(each) and not name.startswith("_")) \
                if type(value) is types.ModuleType and not _is_own_name(value.__name__) else []
            return f"module {value.__name__}{f' with {constants}' if constants else ''}"
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return f"op {value}"
        if isinstance(value, _BUILTIN):
            return f"{type(value).__name__} {value.__qualname__}"
        if isinstance(value, functools.partial) and is_plain([*value.args, *value.keywords.values()]):
            return f"partial of {self.of(value.func)} {text([value.args, list(value.keywords.items())])}"
        if isinstance(value, _MAPPINGS):
            return f"{self._class(type(value))} of {[key if is_plain(key) else type(key).__name__ for key in value]}"
        if isinstance(value, (tuple, frozenset, *CONTAINERS)):
            return f"{self._class(type(value))} of {len(value)}"
        # Dynamo guards what an object has, and not that it has no more, which vars() and an `except AttributeError` tell.
        names = f" with {[*vars(value)]}" if type(value).__dictoffset__ and not isinstance(value, nn.Module) else ""
        return f"a {self._class(type(value))}{names}"

    def _function(self, function: types.FunctionType) -> str:
        self.codes.update(_all_codes(function.__code__))
        defaults = [text(each) if is_plain(each) else type(each).__name__
                    for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())]
        wrapped = [self.of(function.__wrapped__)] if hasattr(function, "__wrapped__") else []
        names = sorted(name for name in vars(function) if not name.startswith("_"))
        return _digest(code_digest(function.__code__), *defaults, *wrapped, *names)

    def _class(self, cls: type) -> str:
        if cls not in self._classes:
            parts = [self._own(base) for base in cls.__mro__ if _is_compared(base)]
            self._classes[cls] = " ".join([f"class {cls.__module__}.{cls.__qualname__}", *([_digest(*parts)] if parts else [])])
        return self._classes[cls]

    def _own(self, cls: type) -> str:
        """Return a hash of what a class itself adds to those below it: its functions, and constants."""
        if cls not in self._bases:
            self._bases[cls] = _digest(f"{cls.__module__}.{cls.__qualname__}", *self._attributes(cls))
        return self._bases[cls]

    def _attributes(self, cls: type) -> Iterator[str]:
        if isinstance(cls, abc.ABCMeta) and not _is_own_code(cls):
            yield f"registered {sorted(each.__qualname__ for ref in _get_dump(cls)[0] if (each := ref()) is not None)}"
        for name, attribute in sorted(vars(cls).items()):
            functions = [getattr(attribute, part, None) for part in ("__func__", "fget", "func")]
            for function in (attribute, *functions):
                if isinstance(function, types.FunctionType):
                    yield f"{name} {self._function(function)}"
            if name not in _NOT_OF_CLASS and is_plain(attribute):
                yield f"{name} {text(attribute)}"


def is_plain(value: Any) -> bool:
    """Return whether a value is told by its text: a number, a flag, a text, a dtype, a container of them."""
    return all(map(is_plain, value)) if type(value) in (tuple, list, set, frozenset) else isinstance(value, _PLAIN)


def text(value: Any) -> str:
    """Return the text of a plain value, that of a set in an order of its own."""
    if type(value) in (set, frozenset):
        return f"{type(value).__name__} {sorted(map(text, value))}"
    return f"{type(value).__name__} [{', '.join(map(text, value))}]" if type(value) in (tuple, list) else repr(value)


def _is_told(value: Any) -> bool:
    """Return whether two values of one text are the same to a graph: of a module, Dynamo guards what it reads."""
    return is_plain(value) or isinstance(value, (
        types.FunctionType, types.MethodType, types.CodeType, type, types.ModuleType, OpOverload, OpOverloadPacket, nn.Module,
        *_BUILTIN))


def _is_own_code(place: Any) -> bool:
    return _is_own_name(place.__module__)


def _is_own_name(module: str) -> bool:
    return module.partition(".")[0] in ("torch", *sys.stdlib_module_names)


def _decides_what_is_of_it(value: Any) -> bool:
    """Return whether a class has code of its own for `isinstance`, which Dynamo runs and does not read."""
    found = [getattr(type(value), name) for name in ("__instancecheck__", "__subclasscheck__")] if isinstance(value, type) else []
    return any(isinstance(each, types.FunctionType) and not _is_own_code(each) for each in found)


def _is_compared(cls: type) -> bool:
    of_torch = cls.__module__.partition(".")[0] == "torch" and not issubclass(cls, nn.Module)
    return cls not in (nn.Module, object) and cls.__module__ != "builtins" and not of_torch  # torch patches nn.Module itself


def code_digest(code: types.CodeType) -> str:
    """Return a hash of what a function does, wherever it is written."""
    constants = [code_digest(each) if isinstance(each, types.CodeType) else
                 repr(sorted(map(repr, each))) if isinstance(each, frozenset) else repr(each) for each in code.co_consts]
    return _digest(code.co_code.hex(), *map(repr, (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
                                                   code.co_argcount, code.co_kwonlyargcount, code.co_flags)), *constants)


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _all_codes(each)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:12]


class _Globals:
    """The globals of a traced function as they are, and what Dynamo adds to them: modules and built-in functions."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        if name.startswith("__builtins_dict__"):
            return vars(builtins)
        if name.startswith("__import_"):
            return importlib.import_module(name.removeprefix("__import_").replace("_dot_", "."))
        return SCOPES[name]


class Scope:
    """Evaluates the places at which Dynamo has read values: sources of guards.

    Args:
        function: that is traced.
        arguments: what it is called with, by name.
    """

    def __init__(self, function: types.FunctionType, arguments: dict[str, Any]) -> None:
        self._function = function
        self._names = {"L": arguments, "G": _Globals(function.__globals__)}

    def without_tensors(self) -> Scope:
        """Return the same without the batch and the lists of tensors, which whoever holds it keeps alive."""
        inputs = self._names["L"]["inputs"]
        return Scope(self._function, {"inputs": types.SimpleNamespace(model=inputs.model, objective=inputs.objective)})

    def value(self, source: str | types.CodeType) -> Any:
        return eval(source, dict(self._names))

    def in_any_process(self, source: str) -> str:
        """Return a source without the numbers of this process."""
        for name in re.findall(r"G\['(___unnamed_scope_\w+|_\d+_c\d+)'\]", source):
            value = self._function.__globals__.get(name)
            names = [stable for stable, scope in SCOPES.items() if scope is value]
            names += [f"__import_{value.__name__.replace('.', '_dot_')}"] if isinstance(value, types.ModuleType) else []
            source = source.replace(name, names[0] if names else name)
        return source


def rows_of(guards: Iterable[Any], scope: Scope, facts: Facts) -> list[Row]:
    """Return what Dynamo's guards hold a graph to, as rows that another process can ask.

    Args:
        guards: as torch.compile gives them to a `guard_filter_fn`.

    Raises:
        NotComparable: one of them is about something that means nothing in another process.
    """
    rows: dict[str, Row] = {}
    for guard in guards:
        kind, source = guard.guard_type, scope.in_any_process(guard.orig_guard.name)
        if kind in _OF_PROCESS:
            continue
        options = getattr(guard.orig_guard.create_fn, "keywords", None) or {}
        given: Any = None
        if kind == "DUPLICATE_INPUT":
            given = scope.in_any_process(options["source_b"].name)
        elif kind in _OF_ATTRIBUTE:
            given = options.get(_OF_ATTRIBUTE[kind])
        if kind not in _OF_TYPE | _OF_VALUE | {"DUPLICATE_INPUT"} and not (kind in _OF_ATTRIBUTE and type(given) in (str, int)):
            raise NotComparable(f"Dynamo's {kind} of {readable(source)}")
        try:
            answer, value = _ask(kind, given, source, scope, facts), scope.value(source)
        except Exception as error:
            raise NotComparable(f"{readable(source)}, which Dynamo has read ({type(error).__name__}: {error})") from error
        if guard.has_value and facts.of(value) != facts.of(guard.value):
            raise NotComparable(f"{readable(source)}, which Dynamo has found elsewhere")
        if (owner := _OF_BATCH.match(source)) and kind in _OF_VALUE and isinstance(scope.value(owner[1]), Tensor):
            raise NotComparable(f"{readable(source)}, an attribute of a tensor of the batch")
        if isinstance(value, types.FunctionType) and value in _OF_RANKS:
            raise NotComparable(f"{readable(source)}(), another number on each rank that shares the file")
        if _decides_what_is_of_it(value):
            raise NotComparable(f"{readable(source)}, a class with an isinstance of its own")
        if kind in _OF_VALUE and not _is_told(value):
            raise NotComparable(f"{readable(source)}, one {type(value).__name__} of perhaps several")
        rows[f"{kind} {source} {given}"] = [source, kind, given, answer]
        if owner := _OF_VARS.match(source):
            rows[owner[1]] = [owner[1], "DICT_KEYS_MATCH", None, facts.of(scope.value(owner[1]))]
    return list(rows.values())


class Values:
    """What Dynamo has read besides the batch and what modules hold themselves: globals, closures, attributes of objects.

    Args:
        rows: of a call.
        scope: of it, when they were found to hold.
    """

    def __init__(self, rows: Iterable[Sequence[Any]], scope: Scope) -> None:
        self._scope, sources = scope.without_tensors(), []
        for source in dict.fromkeys(source for source, *_ in rows):
            if not _LOOKED_AT.search(source) and not _OF_MODULE.fullmatch(source):
                with contextlib.suppress(Exception):  # what is there while the graph is captured alone
                    self._scope.value(source)
                    sources.append(source)
        self._code = compile(f"[{', '.join(sources)}]", "<sources>", "eval")
        self._before = [dict(each) if isinstance(each, types.MappingProxyType)
                        else copy.copy(each) if isinstance(each, CONTAINERS) else each for each in self._now()]

    def have_changed(self) -> bool:
        """Return whether one of them is not what it was, by a comparison of objects, and of what compares itself."""
        return not same_tensors(self._now(), self._before)

    def _now(self) -> list[Any]:
        try:
            values = self._scope.value(self._code)
        except Exception as error:  # there is nothing any more
            return [error]
        orders = (list(each) for each in values if isinstance(each, _MAPPINGS))  # {1: 1, 2: 2} == {2: 2, 1: 1}
        return [*map(type, values), *values, *orders]  # 1 == True


def row_of_write(place: str, value: Any, scope: Scope, facts: Facts) -> Row:
    """Return what holds a graph to a program in which a forward that puts `value` at `place` changes nothing by it.

    Raises:
        NotComparable: something else is there.
    """
    source = scope.in_any_process(place)
    try:
        is_there = isinstance(value, _PLAIN) and facts.of(scope.value(source)) == text(value)
    except Exception:  # nothing is
        is_there = False
    if not is_there:
        raise NotComparable(f"{readable(source)}, which the forward changes")
    return [source, "EQUALS_MATCH", None, text(value)]


def _ask(kind: str, given: Any, source: str, scope: Scope, facts: Facts) -> str:
    value = scope.value(source)
    if kind == "DUPLICATE_INPUT":
        return repr(value is scope.value(given))
    if kind == "HASATTR":
        return repr(hasattr(value, given))
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return repr(given in vars(value))
    return repr(given in value) if kind in _OF_ATTRIBUTE else facts.of(value)


def first_difference(rows: Iterable[Sequence[Any]], scope: Scope) -> tuple[str, str, str] | None:
    """Return of what is not as rows say it (what, as it was, as it is) the first; None where all is as it was."""
    facts = Facts()
    for source, kind, given, before in rows:
        try:
            now = _ask(kind, given, source, scope, facts)
        except Exception as error:
            now = f"nothing that could be read there ({type(error).__name__}: {error})"
        if now != before:
            about = {"DUPLICATE_INPUT": "is {}", "HASATTR": "has {}", "NOT_PRESENT_IN_GENERIC_DICT": "has its own {}"}
            text = about.get(kind, "contains {}").format(readable(str(given))) if given is not None else ""
            return f"{readable(source)} {text}".rstrip(), before, now
    return None


def readable(source: str) -> str:
    """Return the source of a guard as a user would write it: "model.blocks.0.drop.p"."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    source = re.sub(r"\b[LG]\['(?:__import_)?([^']*)'\]", lambda found: found[1].replace("_dot_", "."), source)
    return source.removeprefix("inputs.")
