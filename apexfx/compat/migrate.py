"""`python -m apexfx migrate`: which lines of a script change for apexfx, and what to write in their place.

The script is parsed, never imported or run, and nothing is rewritten. What stands for what is `CALLS` and `METHODS` below; the
arguments of the line that makes the step (`model`, `opt_level=`, `max_grad_norm=` ...) are read from the script's own calls.
Names are followed through imports and plain assignments, without regard to scope: what a function is handed under another name,
or a framework's trainer does, is not seen.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .names import ALTERNATIVES, MODULES, alternative, resolve

DELETE = "delete: "
_STEP = "the step does it"

# Called by its full name -> what stands in its place.
CALLS = {
    "apex.amp.scale_loss": f"{DELETE}the loss scale is in the step's graph",
    "apex.amp.master_params": f"{DELETE}give max_grad_norm= to train_step",
    "apex.amp.state_dict": "step.state_dict(): model, optimizer and loss scale in one",
    "apex.amp.load_state_dict": "step.load_state_dict(...)",
    "apex.amp.half_function": 'precision={"<module path or op>": "float16"} in train_step',
    "apex.amp.float_function": 'precision={"<module path or op>": "float32"} in train_step',
    "apex.parallel.DistributedDataParallel": f"{DELETE}ddp=True in train_step (options: apexfx.BucketConfig)",
    "apex.parallel.convert_syncbn_model": f"{DELETE}sync_bn=True in train_step",
    "apex.parallel.SyncBatchNorm": "torch.nn.BatchNorm2d(...), and sync_bn=True in train_step",
    "apex.fp16_utils.FP16_Optimizer": f"{DELETE}opt_level=\"O2\" in train_step, whose parameters are the masters",
    "apex.fp16_utils.network_to_half": f"{DELETE}opt_level=\"O2\" in train_step",
    "torch.autocast": f"{DELETE}opt_level=\"O1\" and dtype= in train_step (around evaluation it may stay)",
    "torch.amp.GradScaler": f"{DELETE}float16 has a dynamic loss scale in the step's graph; loss_scale= sets it",
    "torch.nn.parallel.DistributedDataParallel": f"{DELETE}ddp=True in train_step (options: apexfx.BucketConfig)",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": f"{DELETE}sync_bn=True in train_step",
    "torch.nn.utils.clip_grad_norm_": f"{DELETE}give max_grad_norm= to train_step",
    "torch.nn.utils.clip_grad_value_": "no counterpart in a step: keep the loop, and use apexfx.transform",
    "torch.compile": f"{DELETE}a step is compiled as a whole (fullgraph, dynamic and inner are options of train_step)",
    "torch.nn.DataParallel": f"{DELETE}start one process a device (torchrun), and give ddp=True to train_step",
    "torch.distributed.fsdp.FullyShardedDataParallel": "refused: parameters have to be whole on every rank",
    "torch.distributed.fsdp.fully_shard": "refused: parameters have to be whole on every rank",
}  # fmt: skip

# Other spellings -> the name in `CALLS`.
_SPELLINGS = {
    "torch.amp.autocast": "torch.autocast", "torch.cuda.amp.autocast": "torch.autocast",
    "torch.cpu.amp.autocast": "torch.autocast",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler", "torch.cpu.amp.GradScaler": "torch.amp.GradScaler",
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.modules.batchnorm.SyncBatchNorm.convert_sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "apex.parallel.distributed.DistributedDataParallel": "apex.parallel.DistributedDataParallel",
}  # fmt: skip

# (what the object is, method) -> what stands in its place.
METHODS = {
    ("scaler", "scale"): f"{DELETE}{_STEP}", ("scaler", "unscale_"): f"{DELETE}{_STEP}", ("scaler", "update"): f"{DELETE}{_STEP}",
    ("scaler", "step"): f"{DELETE}{_STEP}", ("scaler", "get_scale"): "step.loss_scale",
    ("scaler", "state_dict"): "step.state_dict(): model, optimizer and loss scale in one",
    ("scaler", "load_state_dict"): "step.load_state_dict(...)",
    ("optimizer", "step"): f"{DELETE}{_STEP}", ("optimizer", "zero_grad"): f"{DELETE}{_STEP}",
    ("model", "zero_grad"): f"{DELETE}{_STEP}",
    ("model", "no_sync"): f"{DELETE}accumulate= in train_step reduces once for so many calls",
}  # fmt: skip

_TOP_MODULES = ("amp_C", "apex_C")
_OPTIONS = ("opt_level", "dtype", "keep_batchnorm_fp32", "loss_scale", "max_grad_norm", "accumulate", "sync_bn", "ddp")
_OF_TRANSFORM = ("opt_level", "dtype", "keep_batchnorm_fp32", "sync_bn", "ddp")
_READING = ("item", "detach", "cpu", "clone", "float")  # what a loss is made to be logged by
_CONVERTERS = ("apex.parallel.convert_syncbn_model", "torch.nn.SyncBatchNorm.convert_sync_batchnorm")
_WRAPPERS = ("apex.parallel.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel")
_REPLACED_BY_ARGUMENT = (*_WRAPPERS, *_CONVERTERS, "torch.compile", "apex.fp16_utils.network_to_half",
                         "apex.fp16_utils.FP16_Optimizer")


@dataclass(frozen=True)
class Change:
    """One statement that changes: where it is, as written, and what to write in its place."""

    path: str
    line: int
    code: str
    instead: str


def changes(path: str, source: str) -> list[Change]:
    """Return what changes in a script, in the order of its lines; of a statement that changes twice, both.

    Raises:
        SyntaxError: it is no Python.
    """
    script, lines = _Script(ast.parse(source, path)), source.splitlines()
    rows = dict.fromkeys((statement.lineno, instead) for statement, instead in script.changes())
    return [Change(path, line, lines[line - 1].strip(), instead) for line, instead in sorted(rows, key=lambda row: row[0])]


def text(rows: Sequence[Change]) -> str:
    """Return changes as text, two lines each."""
    lines = [f"{row.path}:{row.line}: {row.code}\n    -> {row.instead}" for row in rows]
    return "\n".join([*lines, f"{len(rows)} change{'' if len(rows) == 1 else 's'}"])


def check(paths: Sequence[str]) -> tuple[list[Change], list[str]]:
    """Return the changes in files, and in the Python files of folders, and a sentence for each file that is no Python.

    Raises:
        FileNotFoundError: a path that is not there.
    """
    rows, unread = [], []
    for path in _files(paths):
        try:
            rows += changes(str(path), path.read_bytes().decode())
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            unread.append(f"{path} is not read as Python: {error}")
    return rows, unread


def as_rows(rows: Sequence[Change]) -> list[dict[str, object]]:
    """Return changes as what JSON holds."""
    return [asdict(row) for row in rows]


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            inside = (file for file in sorted(path.rglob("*.py")))
            yield from (file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
        elif path.exists():
            yield path
        else:
            raise FileNotFoundError(f"apexfx migrate: {path} is not there; give a Python file or a folder")


class _Script:
    """A parsed script, and what its names stand for.

    Attributes:
        statements: (its own expressions, without those of statements inside of it, statement), in order.
        imported: a name -> the full name of what was imported under it.
        kinds: a variable, as written -> "model", "optimizer" or "scaler".
        options: of train_step, as the script's calls ask for them: keyword -> source text.
        wrapped: variables that hold a wrapper of the model, of which `.module` is the model.
        scopes: a statement -> the function, or the block without gradients, that it stands in: an evaluation is not a step.
        outputs: (scope, variable) -> the call of the model that it holds.
        training: scopes of an autocast and a backward; the autocast of an evaluation says nothing of a step.
        losses: (scope, variable) that a backward starts from.
        new_steps: where a model and its optimizer are both there -> their names as written, and what is left out.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.scopes = {statement: scope for scope, _, statement in _statements(tree, tree)}
        self.statements = [(expressions, statement) for _, expressions, statement in _statements(tree, tree)]
        self.imported: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.options: dict[str, str] = {}
        self.wrapped: set[str] = set()
        self.outputs: dict[tuple[ast.AST, str], ast.Call] = {}
        self.new_steps: dict[ast.stmt, tuple[str, str, str]] = {}
        for _, statement in self.statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._import(statement)
        calls = [call for expressions, _ in self.statements for call in _calls(expressions)]
        self.losses = {(self.scopes[statement], self._loss_of(call)) for expressions, statement in self.statements
                       for call in _calls(expressions)}  # fmt: skip
        called = {self._full_name(call.func) for call in calls}
        self.is_changed = bool(called & {"apexfx.train_step", "apexfx.transform"})
        self.has_backward = any(getattr(call.func, "attr", "") == "backward" for call in calls)
        self.has_initialize = "apex.amp.initialize" in called
        in_scope = [(self._full_name(call.func), getattr(call.func, "attr", ""), self.scopes[statement])
                    for expressions, statement in self.statements for call in _calls(expressions)]
        self.training = {scope for name, _, scope in in_scope if name == "torch.autocast"} & {
            scope for _, method, scope in in_scope if method == "backward"}
        for expressions, statement in self.statements:
            for call in _calls(expressions):
                self._read(call, statement)
            self._read_forward(statement)

    def changes(self) -> Iterator[tuple[ast.stmt, str]]:
        """Yield (statement, what stands in its place), and what else a statement that stays has to heed."""
        deleted = set()
        for statement, instead in self._replacements():
            deleted |= {statement} if instead.startswith(DELETE) else set()
            yield statement, instead
        for expressions, statement in self.statements:
            saves = any(self._full_name(call.func) == "torch.save" for call in _calls(expressions))
            if saves and self.new_steps and "accumulate" in self.options:
                yield statement, ("call step.flush() on every rank before saving, where the batches of an epoch are no multiple "
                                  f"of accumulate={self.options['accumulate']}")
            for name in dict.fromkeys(map(_dotted, _nodes(expressions))):
                if statement not in deleted and name.endswith(".module") and name.removesuffix(".module") in self.wrapped:
                    yield statement, f"{name} -> {name.removesuffix('.module')}"

    def _replacements(self) -> Iterator[tuple[ast.stmt, str]]:
        imports = [statement for _, statement in self.statements if isinstance(statement, (ast.Import, ast.ImportFrom))]
        is_given = any("import apexfx" in self._instead_of_import(statement).split("; ") for statement in imports)
        needs_import = bool(self.new_steps) and not is_given and "apexfx" not in self.imported
        for expressions, statement in self.statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if instead := self._instead_of_import(statement):
                    yield statement, instead
                elif needs_import and _imports_torch(statement):
                    yield statement, "keep it, and below: import apexfx"
                    needs_import = False
            elif statement in self.new_steps:
                yield from ((statement, instead) for instead in self._instead_of_new_step(statement))
            elif instead := self._instead_of_forward(statement):
                yield statement, instead
            else:
                instead_of_calls = (self._instead_of_call(call, statement) for call in _calls(expressions))
                yield from ((statement, instead) for instead in instead_of_calls if instead)

    # ---- what the names stand for --------------------------------------------------------------------------------------------

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                full = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or full] = full
            elif not statement.level:
                self.imported[alias.asname or alias.name] = f"{statement.module}.{alias.name}"

    def _full_name(self, node: ast.expr) -> str:
        """Return the full name of what was imported, "" for anything else."""
        first, dot, rest = _dotted(node).partition(".")
        full = f"{self.imported[first]}{dot}{rest}" if first in self.imported else ""
        return _SPELLINGS.get(full, full)

    def _loss_of(self, call: ast.Call) -> str:
        """Return the variable that `loss.backward()`, `scaler.scale(loss)` or `amp.scale_loss(loss, ...)` names."""
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method == "backward":
            return _dotted(_dividend(call.func.value))
        return _dotted(call.args[0]) if call.args and method in ("scale", "scale_loss") else ""

    def _read(self, call: ast.Call, statement: ast.stmt) -> None:
        """Note what a call says of the model, the optimizer and the options of a step."""
        name, targets = self._full_name(call.func), _targets(statement)
        if name == "apex.amp.initialize":
            self._read_initialize(call, statement)
        elif name in (*_WRAPPERS, *_CONVERTERS, "torch.compile") and call.args:
            self._name("model", _dotted(call.args[0]), *targets)
            self.wrapped |= set(targets) if name in _WRAPPERS else set()
            if name in _CONVERTERS:
                self.options["sync_bn"] = "True"
            elif name in _WRAPPERS:
                self.options["ddp"] = _ddp(call)
        elif name == "torch.amp.GradScaler":
            self._name("scaler", *targets)
        elif name == "torch.autocast" and (self.scopes[statement] in self.training or not self.training):
            self._read_autocast(call)
        elif name == "torch.nn.utils.clip_grad_norm_":
            self.options["max_grad_norm"] = _argument(call, 1, "max_norm") or "..."
        elif targets and (name.startswith("apex.optimizers.") or name.rpartition(".")[0] == "torch.optim"):
            self._name("optimizer", *targets)
            model = _owner_of_parameters(call)
            self._name("model", model)
            if not self.has_initialize and not self.is_changed and self.has_backward:
                self.new_steps[statement] = (model or "model", targets[0], "")

    def _read_initialize(self, call: ast.Call, statement: ast.stmt) -> None:
        targets = _targets(statement)
        model, optimizer = _argument(call, 0, "models"), _argument(call, 1, "optimizers")
        self._name("model", model, *targets[:1])
        self._name("optimizer", optimizer, *targets[1:])
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        for name in ("models", "optimizers", "verbosity"):
            options.pop(name, None)
        self.options["opt_level"] = options.pop("opt_level", _argument(call, 3, "opt_level") or '"O1"')
        self.options |= {name: options.pop(name) for name in _OPTIONS if name in options}
        left_out = ", ".join(name or "**" for name in options)
        self.new_steps[statement] = (model or "model", optimizer or "optimizer", left_out and f"  # without {left_out}")

    def _read_autocast(self, call: ast.Call) -> None:
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        enabled = words.get("enabled", "True")
        self.options["opt_level"] = '"O1"' if enabled == "True" else f'"O1" if {enabled} else "O0"'
        dtypes = [text for text in map(ast.unparse, call.args) if "float" in text or "dtype" in text]
        if dtype := words.get("dtype", next(iter(dtypes), "")):
            self.options["dtype"] = dtype

    def _read_forward(self, statement: ast.stmt) -> None:
        """Note where an output of the model is kept, and by what a loss is divided to accumulate."""
        targets, value = _targets(statement), getattr(statement, "value", None)
        if isinstance(value, ast.Call) and self.kinds.get(_dotted(value.func)) == "model":
            self.outputs |= {(self.scopes[statement], name): value for name in targets}
        divided = _divisor(statement) if self._is_loss(statement) else None
        for node in ast.walk(value) if isinstance(statement, ast.Expr) else ():
            if isinstance(node, ast.Attribute) and node.attr == "backward" and isinstance(node.value, ast.BinOp):
                divided = node.value.right
        if divided is not None:
            self.options["accumulate"] = ast.unparse(divided)

    def _name(self, kind: str, *names: str) -> None:
        self.kinds |= dict.fromkeys(filter(None, names), kind)

    # ---- what stands in a statement's place ----------------------------------------------------------------------------------

    def _instead_of_import(self, statement: ast.Import | ast.ImportFrom) -> str:
        instead = []
        for alias in statement.names:
            is_from = isinstance(statement, ast.ImportFrom)
            module = (statement.module or "") if is_from else alias.name
            full = f"{module}.{alias.name}" if is_from else module
            full, renamed = _SPELLINGS.get(full, full), f" as {alias.asname}" if alias.asname else ""
            if module.partition(".")[0] not in ("apex", *_TOP_MODULES) or getattr(statement, "level", 0):
                instead += [f"{DELETE}{alias.name}"] if is_from and full in CALLS and not self.is_changed else []
            elif full == "apex" or full.startswith("apex.amp"):
                instead.append("import apexfx")
            elif full in CALLS:
                instead.append(f"{DELETE}{alias.name}")
            elif full in ALTERNATIVES or resolve(module) is None and resolve(full) is None:
                instead.append(f"not provided: use {alternative(full)}")
            elif full in MODULES or not is_from:
                instead.append(f"import {resolve(full)} as {alias.asname or full.rpartition('.')[2]}")
            else:
                instead.append(f"from {resolve(module)} import {alias.name}{renamed}")
        return "; ".join(dict.fromkeys(instead))

    def _instead_of_call(self, call: ast.Call, statement: ast.stmt) -> str:
        instead = self._instead_of_called(call)
        if instead.startswith(DELETE) and self._full_name(call.func) in _REPLACED_BY_ARGUMENT:
            if unwrapped := self._unwrapped(statement):
                return f"{unwrapped}  # {instead.removeprefix(DELETE)}"
        return instead

    def _unwrapped(self, statement: ast.stmt) -> str:
        """Return `ddp_net = net` for `ddp_net = DDP(net)`, "" where nothing is left to do, or where statements are inside."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
            return ""
        left = _Unwrap(lambda call: self._full_name(call.func) in _REPLACED_BY_ARGUMENT).visit(copy.deepcopy(statement))
        is_named_alike = {ast.unparse(left.value)} == {ast.unparse(target) for target in getattr(left, "targets", [])}
        is_bare = isinstance(left, ast.Expr) and not isinstance(left.value, ast.Call)
        return "" if is_named_alike or is_bare else ast.unparse(left)

    def _instead_of_called(self, call: ast.Call) -> str:
        name, method = self._full_name(call.func), getattr(call.func, "attr", "")
        if name == "torch.nn.utils.clip_grad_norm_" and (norm := _argument(call, 2, "norm_type")) not in ("", "2", "2.0"):
            return f"no counterpart: a step clips the 2-norm, not norm_type={norm}; keep the loop, with apexfx.transform"
        if self.is_changed:
            return CALLS[name] if name in (*_WRAPPERS, *_CONVERTERS) or name.startswith("apex.") and name in CALLS else ""
        if name in _WRAPPERS and (ddp := _ddp(call)) != "True":
            return f"{DELETE}ddp={ddp} in train_step"
        if name in CALLS:
            return CALLS[name]
        if method == "backward":
            return f"{DELETE}{_STEP}"
        return METHODS.get((self.kinds.get(_dotted(call.func.value), ""), method), "") if method else ""

    def _instead_of_forward(self, statement: ast.stmt) -> str:
        """Return what stands for `output = model(x)` and `loss = loss_fn(output, y)`, "" for any other statement."""
        targets, value = _targets(statement), getattr(statement, "value", None)
        if value is None or self.is_changed or not targets:
            return ""
        if self._is_loss(statement):
            return self._instead_of_loss(statement, targets[0], value)
        scope = self.scopes[statement]
        losses = [other for other in self.scopes if self.scopes[other] is scope and self._is_loss(other)]
        read = {_dotted(node) for other in losses for node in ast.walk(other.value)}
        if read.intersection(targets) and any(self.outputs.get((scope, name)) is value for name in targets):
            return f"{DELETE}{_STEP}; where the output is read elsewhere, give objective= in place of the loss function"
        return ""

    def _is_loss(self, statement: ast.stmt) -> bool:
        """Whether a statement assigns what a backward starts from."""
        is_assigned = getattr(statement, "value", None) is not None
        return is_assigned and any((self.scopes[statement], name) in self.losses for name in _targets(statement))

    def _instead_of_loss(self, statement: ast.stmt, name: str, value: ast.expr) -> str:
        computed, divisor = _dividend(value), _divisor(statement)
        divides_only = isinstance(statement, ast.AugAssign) or _dotted(computed) == name  # loss /= n, loss = loss / n
        is_read = isinstance(computed, ast.Call) and getattr(computed.func, "attr", "") in _READING
        if isinstance(computed, ast.Constant) or is_read:
            return ""
        note = "" if divisor is None else f"accumulate={ast.unparse(divisor)} averages so many calls"
        if batch := self._batch(computed, self.scopes[statement]):
            return f"{name} = step({', '.join(batch)})" + (note and f"  # {note}")
        if divisor is not None and divides_only:
            return f"{DELETE}{note}; where it is no number of batches, divide in an objective"
        return (f"{name} = step(*batch), with this in objective(model, *batch), a function that returns the loss"
                + (note and f"; {note}, and is no part of it"))

    def _loss_calls(self) -> list[ast.Call]:
        """Return the calls `loss_fn(model(inputs), targets)` from which a backward starts; none where a loss is anything else."""
        losses = [(statement, _dividend(statement.value)) for _, statement in self.statements if self._is_loss(statement)]
        if any("objective(" in self._instead_of_loss(statement, "", value) for statement, value in losses):
            return []
        return [value for statement, value in losses if self._batch(value, self.scopes[statement])]

    def _batch(self, call: ast.expr, scope: ast.AST) -> list[str]:
        """Return the inputs and targets of `loss_fn(model(inputs), targets)`, [] for anything else: keyword arguments, too."""
        if not isinstance(call, ast.Call) or not call.args:
            return []
        first = call.args[0]
        forward = first if isinstance(first, ast.Call) else self.outputs.get((scope, _dotted(first)))
        if forward is None or self.kinds.get(_dotted(forward.func)) != "model" or not forward.args:
            return []
        if call.keywords or forward.keywords or any(isinstance(x, ast.Starred) for x in (*call.args, *forward.args)):
            return []
        inputs = [ast.unparse(argument) for argument in forward.args]
        return [inputs[0] if len(inputs) == 1 else f"({', '.join(inputs)})", *map(ast.unparse, call.args[1:])]

    def _instead_of_new_step(self, statement: ast.stmt) -> tuple[str, str]:
        """Return the lines that make the step, and the transformed model, with the script's own names and options."""
        model, optimizer, left_out = self.new_steps[statement]
        options = {name: self.options[name] for name in _OPTIONS if name in self.options} or {"opt_level": '"O0"'}
        loss = [ast.unparse(call.func) for call in self._loss_calls()]
        trained = [model, loss[0], optimizer] if loss else [model]
        words = {} if loss else {"optimizer": optimizer, "objective": "objective"}
        step = f"step = {_call('apexfx.train_step', trained, words | options)}{left_out}"
        if self.has_initialize:
            return step, "or, to keep the loop: amp and parallel of apexfx in place of Apex's, and compile=True here"
        kept = _call("apexfx.transform", [model], {name: options[name] for name in _OF_TRANSFORM if name in options})
        return f"keep it, and below: {step}", f"or, to keep the loop, clipping and GradScaler too: {model} = {kept}"


class _Unwrap(ast.NodeTransformer):
    """Put the first argument in the place of each call that `is_wrapper` names."""

    def __init__(self, is_wrapper: Callable[[ast.Call], bool]) -> None:
        self._is_wrapper = is_wrapper

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[0] if node.args and self._is_wrapper(node) else node


def _call(function: str, arguments: Sequence[str], options: dict[str, str]) -> str:
    return f"{function}({', '.join([*arguments, *(f'{name}={value}' for name, value in options.items())])})"


def _statements(tree: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, list[ast.AST], ast.stmt]]:
    """Yield (scope, the statement's own expressions, statement) in order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield scope, [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)], node
        yield from _statements(node, node if _opens_scope(node) else scope)


def _opens_scope(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        called = [item.context_expr.func for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(_dotted(function).rpartition(".")[2] in ("no_grad", "inference_mode") for function in called)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _imports_torch(statement: ast.Import | ast.ImportFrom) -> bool:
    modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [alias.name for alias in statement.names]
    return not getattr(statement, "level", 0) and any(module.partition(".")[0] == "torch" for module in modules)


def _nodes(expressions: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for expression in expressions:
        if not isinstance(expression, (ast.excepthandler, ast.match_case)):  # they hold statements, which have their own turn
            yield from ast.walk(expression)


def _calls(expressions: Sequence[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in _nodes(expressions) if isinstance(node, ast.Call))


def _dotted(node: ast.AST) -> str:
    """Return `self.model` for such an expression, "" for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _targets(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    parts = [part for target in targets for part in getattr(target, "elts", [target]) if part is not None]
    return list(filter(None, map(_dotted, parts)))


def _argument(call: ast.Call, place: int, name: str) -> str:
    """Return an argument's source text, "" where it is not given."""
    words = [word.value for word in call.keywords if word.arg == name]
    return ast.unparse([*words, *call.args[place:place + 1]][0]) if words or len(call.args) > place else ""


def _ddp(call: ast.Call) -> str:
    """Return the `ddp=` that has the buckets of a wrapper."""
    sizes = [ast.unparse(word.value) for word in call.keywords if word.arg == "bucket_cap_mb"]
    return f'apexfx.BucketConfig(layout="ddp", bucket_cap_mb={sizes[0]})' if sizes and sizes[0] != "None" else "True"


def _owner_of_parameters(call: ast.Call) -> str:
    """Return `model` of `AdamW(model.parameters())`, "" where no name stands in front of it."""
    owners = [_dotted(node.func.value) for node in ast.walk(call) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute) and node.func.attr in ("parameters", "named_parameters")]  # fmt: skip
    return next(iter(owners), "").removesuffix(".module")


def _divisor(statement: ast.stmt) -> ast.expr | None:
    """Return n of `loss = ... / n` and `loss /= n`."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.AugAssign):
        return value if isinstance(statement.op, ast.Div) else None
    return value.right if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) else None


def _dividend(value: ast.expr) -> ast.expr:
    return value.left if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) else value
