"""`python -m apexfx migrate`: which lines of a script change for apexfx, and what to write in their place.

The script is parsed, never imported or run, and nothing is rewritten. What stands for what is `CALLS` and `METHODS` below; the
arguments of the line that makes the step (`model`, `opt_level=`, `max_grad_norm=` ...) are read from the script's own calls
(`migrate_script.py`), and what its objective is from the statements that compute a loss (`migrate_losses.py`). What a function is
handed under another name, or a framework's trainer does, is not seen.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..graph.printing import count_text
from .migrate_losses import Loss
from .migrate_script import CONVERTERS, OPTIONS, SPELLINGS, WRAPPERS, NewStep, Script, buckets_of
from .migrate_syntax import argument, calls, divisor, dotted, nodes, targets
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
    "apex.parallel.DistributedDataParallel": f"{DELETE}ddp=True in train_step",
    "apex.parallel.convert_syncbn_model": f"{DELETE}sync_bn=True in train_step",
    "apex.parallel.SyncBatchNorm": "torch.nn.BatchNorm2d(...), and sync_bn=True in train_step",
    "apex.fp16_utils.FP16_Optimizer": f"{DELETE}opt_level=\"O2\" in train_step, whose parameters are the masters",
    "apex.fp16_utils.network_to_half": f"{DELETE}opt_level=\"O2\" in train_step",
    "torch.autocast": f"{DELETE}opt_level=\"O1\" and dtype= in train_step",
    "torch.amp.GradScaler": f"{DELETE}float16 has a dynamic loss scale in the step's graph; loss_scale= sets it",
    "torch.nn.parallel.DistributedDataParallel": f"{DELETE}ddp=True in train_step",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": f"{DELETE}sync_bn=True in train_step",
    "torch.nn.utils.clip_grad_norm_": f"{DELETE}give max_grad_norm= to train_step",
    "torch.nn.utils.clip_grad_value_": "no counterpart in a step: keep the loop, and use apexfx.transform",
    "torch.compile": f"{DELETE}a step is compiled as a whole (options: fullgraph, dynamic, inner, inner_options)",
    "torch.nn.DataParallel": f"{DELETE}start one process a device (torchrun), and give ddp=True to train_step",
    "torch.distributed.fsdp.FullyShardedDataParallel": "refused: parameters have to be whole on every rank",
    "torch.distributed.fsdp.fully_shard": "refused: parameters have to be whole on every rank",
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

_CLIP = "torch.nn.utils.clip_grad_norm_"
_TOP_MODULES = ("amp_C", "apex_C")
_OF_TRANSFORM = ("opt_level", "dtype", "keep_batchnorm_fp32", "sync_bn", "ddp", "process_group")
_REPLACED_BY_ARGUMENT = (*WRAPPERS, *CONVERTERS, "torch.compile", "apex.fp16_utils.network_to_half",
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
    script, lines = Script(ast.parse(source, path)), source.splitlines()
    on_line = Counter(statement.lineno for _, statement in script.statements)

    def code(statement: ast.stmt) -> str:
        alone = on_line[statement.lineno] == 1  # not so of `a(); b()`
        text = lines[statement.lineno - 1] if alone else ast.get_source_segment(source, statement)
        return text.strip().partition("\n")[0]

    rows = dict.fromkeys((statement.lineno, code(statement), instead) for statement, instead in _Advice(script).changes())
    return [Change(path, *row) for row in sorted(rows, key=lambda row: row[0])]


def text(rows: Sequence[Change]) -> str:
    """Return changes as text, two lines each or more."""
    lines = [f"{row.path}:{row.line}: {row.code}\n    -> {row.instead.replace(chr(10), chr(10) + ' ' * 7)}" for row in rows]
    return "\n".join([*lines, count_text(len(rows), "change")])


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


class _Advice:
    """What changes in a script, statement by statement."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._of_losses = self._instead_of_losses()
        removed = {id(call.func) for call, statement in script.calls() if _removes(self._instead_of_call(call, statement))}
        self._staying = {node.id for expressions, _ in script.statements for node in nodes(expressions)
                         if isinstance(node, ast.Name) and id(node) not in removed}

    def changes(self) -> Iterator[tuple[ast.stmt, str]]:
        """Yield (statement, what stands in its place), and what else a statement that stays has to heed."""
        script, deleted = self._script, set()
        for statement, instead in self._replacements():
            deleted |= {statement} if instead.startswith(DELETE) else set()
            yield statement, instead
        for expressions, statement in script.statements:
            saves = any(script.full_name(call.func) == "torch.save" for call in calls(expressions))
            if saves and script.new_steps and "accumulate" in script.options:
                yield statement, ("call step.flush() on every rank before saving, where the batches of an epoch are no multiple "
                                  f"of accumulate={script.options['accumulate']}")
            for name in dict.fromkeys(map(dotted, nodes(expressions))):
                if statement not in deleted and name.endswith(".module") and name.removesuffix(".module") in script.wrapped:
                    yield statement, f"{name} -> {name.removesuffix('.module')}"

    def _replacements(self) -> Iterator[tuple[ast.stmt, str]]:
        script = self._script
        imports = [statement for _, statement in script.statements if isinstance(statement, (ast.Import, ast.ImportFrom))]
        is_imported = any("import apexfx" in self._instead_of_import(statement).split("; ") for statement in imports)
        needs_import = bool(script.new_steps) and not is_imported and "apexfx" not in script.imported
        for expressions, statement in script.statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if instead := self._instead_of_import(statement):
                    yield statement, instead
                elif needs_import and _imports_torch(statement):
                    yield statement, "keep it, and below: import apexfx"
                    needs_import = False
            elif statement in script.new_steps:
                yield from ((statement, instead) for instead in self._instead_of_new_step(statement))
            elif statement in self._of_losses:
                yield statement, self._of_losses[statement]
            else:
                of_calls = [self._instead_of_call(call, statement) for call in calls(expressions)]
                if script.autocast.get(statement) and not any(of_calls):  # `with context:`, which was made elsewhere
                    of_calls = [CALLS["torch.autocast"]]
                yield from ((statement, instead) for instead in of_calls if instead)

    # ---- imports and calls ---------------------------------------------------------------------------------------------------

    def _instead_of_import(self, statement: ast.Import | ast.ImportFrom) -> str:
        instead = []
        for alias in statement.names:
            is_from = isinstance(statement, ast.ImportFrom)
            module = (statement.module or "") if is_from else alias.name
            full = f"{module}.{alias.name}" if is_from else module
            full, renamed = SPELLINGS.get(full, full), f" as {alias.asname}" if alias.asname else ""
            goes = is_from and full in CALLS and (alias.asname or alias.name) not in self._staying
            if module.partition(".")[0] not in ("apex", *_TOP_MODULES) or getattr(statement, "level", 0):
                instead += [f"{DELETE}{alias.name}"] if goes and not self._script.is_changed else []
            elif full == "apex" or full.startswith("apex.amp"):
                instead.append("import apexfx")
            elif goes:
                instead.append(f"{DELETE}{alias.name}")
            elif full in ALTERNATIVES or resolve(module) is None and resolve(full) is None:
                instead.append(f"not provided: use {alternative(full)}")
            elif full in MODULES or not is_from:
                instead.append(f"import {resolve(full)} as {alias.asname or full.rpartition('.')[2]}")
            else:
                instead.append(f"from {resolve(module)} import {alias.name}{renamed}")
        return "; ".join(dict.fromkeys(instead))

    def _instead_of_call(self, call: ast.Call, statement: ast.stmt) -> str:
        instead = self._instead_of_called(call, statement)
        if instead.startswith(DELETE) and self._script.full_name(call.func) in _REPLACED_BY_ARGUMENT:
            if unwrapped := self._unwrapped(statement):
                return f"{unwrapped}  # {instead.removeprefix(DELETE)}"
        is_argument = any(call in (*other.args, *(word.value for word in other.keywords)) for other in ast.walk(statement)
                          if isinstance(other, ast.Call))
        if is_argument and self._script.full_name(call.func) == "torch.amp.GradScaler":
            return f"without the argument {ast.unparse(call)}: {instead.removeprefix(DELETE)}"
        return instead

    def _unwrapped(self, statement: ast.stmt) -> str:
        """Return `ddp_net = net` for `ddp_net = DDP(net)`, "" where nothing is left to do, or where statements are inside."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
            return ""
        left = _Unwrap(lambda call: self._script.full_name(call.func) in _REPLACED_BY_ARGUMENT).visit(copy.deepcopy(statement))
        is_named_alike = {ast.unparse(left.value)} == {ast.unparse(target) for target in getattr(left, "targets", [])}
        is_bare = isinstance(left, ast.Expr) and not isinstance(left.value, ast.Call)
        return "" if is_named_alike or is_bare else ast.unparse(left)

    def _instead_of_called(self, call: ast.Call, statement: ast.stmt) -> str:
        script = self._script
        name, method = script.full_name(call.func), getattr(call.func, "attr", "")
        if name == _CLIP and (norm := argument(call, 2, "norm_type")) not in ("", "2", "2.0"):
            return f"no counterpart: a step clips the 2-norm, not norm_type={norm}; keep the loop, with apexfx.transform"
        if script.is_changed:
            return CALLS[name] if name in (*WRAPPERS, *CONVERTERS) or name.startswith("apex.") and name in CALLS else ""
        if name in WRAPPERS and name != "torch.nn.DataParallel":
            ddp, left_out = buckets_of(name, call)
            return f"{DELETE}ddp={ddp} in train_step" + (left_out and f", {left_out}")
        if name == "torch.autocast" and script.stays_under_autocast(statement):
            return ""
        if name in (_CLIP, "apex.amp.master_params") and (kept := _kept_norm(statement, script)):
            return kept
        if name == _CLIP and script.is_several:
            return f"{DELETE}give max_grad_norm={argument(call, 1, 'max_norm')} to the step of these parameters"
        if name in CALLS:
            return CALLS[name]
        if method == "backward":
            return f"{DELETE}{_STEP}"
        return METHODS.get((script.kinds.get(dotted(call.func.value), ""), method), "") if method else ""

    # ---- losses --------------------------------------------------------------------------------------------------------------

    def _instead_of_losses(self) -> dict[ast.stmt, str]:
        """Return what stands for the statements that compute losses, and for those among them that read what they assign."""
        instead: dict[ast.stmt, str] = {}
        for loss in self._script.losses:
            first, last = loss.statements[0], loss.statements[-1]
            for statement in loss.statements:
                instead.setdefault(statement, self._instead_of_part(loss))
            divides = f"{DELETE}{_averages(loss)}; where it is no number of batches, divide in an objective"
            instead |= dict.fromkeys(loss.dividing, divides)
            if self._is_left():
                continue
            instead[last] = self._instead_of_loss(loss)
            for name, readers in loss.read.items():
                between = [reader for reader in readers if first.lineno < reader.lineno < last.lineno and reader not in instead]
                instead |= dict.fromkeys(between, f"keep it, below the step: it reads {name}")
        return instead

    def _instead_of_part(self, loss: Loss) -> str:
        returned = f"; it returns {' and '.join(loss.read)}, too, for line {_first_line(loss)}" if loss.read else ""
        if self._is_left():
            return f"left to you: into the objective of the step that is to minimize {loss.name or 'this'}{returned}"
        return (f"{DELETE}{_STEP}" if self._supervised(loss) else "into objective(model, *batch)") + returned

    def _instead_of_loss(self, loss: Loss) -> str:
        names = ", ".join(filter(None, [loss.name or loss.read and "_", _tuple(list(loss.read))]))
        step = f"{names} = step" if names else "step"
        note = f"  # {_averages(loss)}" if divisor(loss.statements[-1]) is not None else ""
        if (parts := self._supervised(loss)) is not None:
            return f"{step}({', '.join(parts.batch(is_apart=bool(loss.read)))}){note}"
        if len(self._script.loss_names) > 1:
            total, each = " + ".join(self._script.loss_names), ", ".join(self._script.loss_names)
            return (f"total, ({each}) = step(*batch), with all that computes {each} in objective(model, *batch), a function that "
                    f"returns ({total}, ({each}))")
        returned = f"({names})" if loss.read else "the loss"
        return (f"{step}(*batch), with this in objective(model, *batch), a function that returns {returned}"
                + note.replace("  #", ";"))

    def _is_left(self) -> bool:
        """Whether it is not clear which losses a step is to minimize: there are several, of several optimizers or loops."""
        script = self._script
        scopes = {script.scopes[loss.statements[-1]] for loss in script.losses}
        return script.is_several or len(script.loss_names) > 1 and len(scopes) > 1

    def _supervised(self, loss: Loss) -> _Supervised | None:
        """Return the parts of `loss_fn(model(inputs), *targets)`; None for anything else: for keyword arguments, too."""
        *others, last = loss.statements
        call, outputs = loss.value, [name for other in others for name in targets(other)]
        if len(self._script.loss_names) > 1 or not isinstance(call, ast.Call) or not call.args or isinstance(last, ast.AugAssign):
            return None
        forward = call.args[0] if not others else others[0].value if outputs == [dotted(call.args[0])] else None
        if not isinstance(forward, ast.Call) or not self._script.is_model(forward) or not forward.args:
            return None
        parts = _Supervised(ast.unparse(call.func), (outputs or [""])[0], tuple(forward.args), tuple(call.args[1:]))
        read = {dotted(node) for x in parts.arguments for node in ast.walk(x)}
        is_plain = not (call.keywords or forward.keywords or any(isinstance(x, ast.Starred) for x in parts.arguments))
        has_model = any(map(self._script.is_model, calls(parts.arguments)))
        return parts if is_plain and not has_model and not read.intersection(outputs) else None

    # ---- the line that makes the step ----------------------------------------------------------------------------------------

    def _instead_of_new_step(self, statement: ast.stmt) -> list[str]:
        """Return the lines that make the step, and the transformed model, with the script's own names and options."""
        script, step = self._script, self._script.new_steps[statement]
        options = {name: script.options[name] for name in OPTIONS if name in script.options} or {"opt_level": '"O0"'}
        keep = "" if script.has_initialize else "keep it, and below:"
        if script.is_several:
            lines = self._steps_to_write(step, options)
        else:
            lines = [_joined(keep, self._new_step(step, options))]
        if script.has_initialize:
            return [*lines, "or, to keep the loop: amp and parallel of apexfx in place of Apex's, and compile=True here"]
        kept = {name: options[name] for name in _OF_TRANSFORM if name in options}
        transformed = (f"{model} = {_call('apexfx.transform', [model], kept)}" for model in step.models)
        return [*lines, f"or, to keep the loop, clipping and GradScaler too: {'; '.join(transformed)}"]

    def _new_step(self, step: NewStep, options: dict[str, str]) -> str:
        losses = self._script.losses
        parts = [parts for loss in losses if (parts := self._supervised(loss)) is not None]
        model, optimizer = _module_of(step.models), _listed(step.optimizers)
        objective = parts[0].objective() if losses and losses[0].read and parts else ""
        if not losses or len(parts) < len(losses) or len({each.loss_fn for each in parts}) > 1 or len(step.models) > 1:
            arguments, words, objective = [model], {"optimizer": optimizer, "objective": "objective"}, ""
        elif objective:
            arguments, words = [model], {"optimizer": optimizer, "objective": "objective"}
        else:
            arguments, words = [model, parts[0].loss_fn, optimizer], {}
        return f"{objective}step = {_call('apexfx.train_step', arguments, words | options)}{step.left_out}"

    def _steps_to_write(self, step: NewStep, options: dict[str, str]) -> list[str]:
        models = list(dict.fromkeys(model for each in self._script.new_steps.values() for model in each.models))
        options = {name: text for name, text in options.items() if name != "max_grad_norm"}
        lines = []
        for optimizer in step.optimizers:
            objective = f"{optimizer.rpartition('.')[2]}_objective"
            call = _call("apexfx.train_step", [_module_of(models)], {"optimizer": optimizer, "objective": objective} | options)
            lines.append(f"left to you, below all of these: {optimizer}_step = {call}, where {objective}(models, *batch) returns "
                         f"the loss that {optimizer} is to minimize (examples/step_gan.py)")
        return lines


@dataclass(frozen=True)
class _Supervised:
    """A loss `loss_fn(model(*inputs), *targets)`, and the variable that holds the output, "" where none does."""

    loss_fn: str
    output: str
    inputs: tuple[ast.expr, ...]
    targets: tuple[ast.expr, ...]

    @property
    def arguments(self) -> tuple[ast.expr, ...]:
        return self.inputs + self.targets

    def batch(self, *, is_apart: bool) -> list[str]:
        """Return the arguments of the step: several inputs of a model are one of a loss function's, apart for an objective."""
        inputs = [ast.unparse(x) for x in self.inputs]
        return [*(inputs if is_apart or len(inputs) == 1 else [f"({', '.join(inputs)})"]), *map(ast.unparse, self.targets)]

    def objective(self) -> str:
        """Return the function that returns the output beside the loss."""
        names = self._names()
        inputs, targets_ = ", ".join(names[:len(self.inputs)]), ", ".join(["", *names[len(self.inputs):]])
        return (f"def objective(model, {', '.join(names)}):\n    {self.output} = model({inputs})\n"
                f"    return {self.loss_fn}({self.output}{targets_}), {self.output}\n")

    def _names(self) -> list[str]:
        names = [_root(x) for x in self.arguments]
        if len(set(names)) == len(names) and not set(names) & {"", "self", "model", self.output, self.loss_fn.partition(".")[0]}:
            return names
        return [*_numbered("inputs", len(self.inputs)), *_numbered("targets", len(self.targets))]


def _root(node: ast.expr) -> str:
    """Return `x` of `x`, `x.to(device)` and `x[i]`, "" for anything else."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else getattr(node, "value", None)
    return node.id if isinstance(node, ast.Name) else ""


def _joined(keep: str, lines: str) -> str:
    return f"{keep}{chr(10) if chr(10) in lines else ' '}{lines}" if keep else lines


def _numbered(name: str, number: int) -> list[str]:
    return [name] if number == 1 else [f"{name}{i}" for i in range(number)]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)})" if len(names) > 1 else "".join(names)


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]" if len(names) > 1 else "".join(names)


def _module_of(models: Sequence[str]) -> str:
    return f"torch.nn.ModuleList([{', '.join(models)}])" if len(models) > 1 else "".join(models)


def _averages(loss: Loss) -> str:
    number = "" if loss.number is None else ast.unparse(loss.number)
    return f"accumulate={number} averages so many calls, and each returns its loss undivided"


def _first_line(loss: Loss) -> int:
    return min(reader.lineno for readers in loss.read.values() for reader in readers)


def _removes(instead: str) -> bool:
    return bool(instead) and not instead.startswith("no counterpart")


def _kept_norm(statement: ast.stmt, script: Script) -> str:
    """Return what stands for `norm = clip_grad_norm_(...)`, where the norm is kept; "" elsewhere."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(value, ast.Call) or script.full_name(value.func) != _CLIP:
        return ""
    names = " = ".join(map(ast.unparse, statement.targets))
    return f"{names} = step.grad_norm, below the step, with max_grad_norm= in train_step"


class _Unwrap(ast.NodeTransformer):
    """Put the first argument in the place of each call that `is_wrapper` names."""

    def __init__(self, is_wrapper: Callable[[ast.Call], bool]) -> None:
        self._is_wrapper = is_wrapper

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[0] if node.args and self._is_wrapper(node) else node


def _call(function: str, arguments: Sequence[str], options: dict[str, str]) -> str:
    return f"{function}({', '.join([*arguments, *(f'{name}={value}' for name, value in options.items())])})"


def _imports_torch(statement: ast.Import | ast.ImportFrom) -> bool:
    modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [alias.name for alias in statement.names]
    return not getattr(statement, "level", 0) and any(module.partition(".")[0] == "torch" for module in modules)
