"""What the names of a script stand for, and what its calls ask of a training step."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .migrate_losses import Loss, Losses
from .migrate_syntax import argument, calls, dotted, is_of_evaluation, statements, targets

# Other spellings of a full name.
SPELLINGS = {
    "torch.amp.autocast": "torch.autocast", "torch.cuda.amp.autocast": "torch.autocast",
    "torch.cpu.amp.autocast": "torch.autocast",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler", "torch.cpu.amp.GradScaler": "torch.amp.GradScaler",
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.modules.batchnorm.SyncBatchNorm.convert_sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "apex.contrib.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "apex.parallel.distributed.DistributedDataParallel": "apex.parallel.DistributedDataParallel",
}  # fmt: skip

# What names of torch usually stand for: of a script that imports * from a file of its own, where they may come from.
_USUAL = {
    "torch": "torch", "nn": "torch.nn", "optim": "torch.optim",
    "autocast": "torch.autocast", "GradScaler": "torch.amp.GradScaler", "DDP": "torch.nn.parallel.DistributedDataParallel",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel", "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
}  # fmt: skip

OPTIONS = ("opt_level", "dtype", "keep_batchnorm_fp32", "loss_scale", "max_grad_norm", "accumulate", "sync_bn", "ddp",
           "process_group")
CONVERTERS = ("apex.parallel.convert_syncbn_model", "torch.nn.SyncBatchNorm.convert_sync_batchnorm")
WRAPPERS = ("apex.parallel.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel")

_APEX_ARGUMENTS = ("module", "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params",
                   "retain_allreduce_buffers", "allreduce_always_fp32", "num_allreduce_streams", "allreduce_communicators",
                   "gradient_average", "gradient_predivide_factor", "gradient_average_split_factor", "prof")
_TORCH_ARGUMENTS = ("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group",
                    "bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph")
_OF_BUCKETS = ("message_size", "delay_allreduce", "allreduce_always_fp32", "gradient_average", "gradient_predivide_factor")
_DEFAULTS = {"gradient_average": "True", "gradient_predivide_factor": "1.0", "num_allreduce_streams": "1", "prof": "False"}
_NOT_NEEDED = ("module", "device_ids", "output_device", "dim", "process_group", "check_reduction", "gradient_as_bucket_view",
               "static_graph", "init_sync")
_LEFT_OUT = {
    "allreduce_trigger_params": "give their names as trigger_params= of BucketConfig",
    "broadcast_buffers": "buffers are those of rank 0 at the start, and not before each forward",
    "find_unused_parameters": "it is not needed where all ranks use the same parameters in a step",
}


@dataclass(frozen=True)
class NewStep:
    """A step to be made, by the names that the script has for what it needs."""

    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    left_out: str = ""


class Script:
    """A parsed script. Names are followed through imports and plain assignments, without regard to scope.

    Attributes:
        statements: (its own expressions, without those of statements inside of it, statement), in order.
        scopes: a statement -> the function, or the block without gradients, that it stands in: an evaluation is not a step.
        kinds: a variable, as written -> "model", "optimizer" or "scaler".
        options: of train_step, as the script's calls ask for them: keyword -> source text.
        wrapped: variables that hold a wrapper of the model, of which `.module` is the model.
        losses: what backwards start from, each statement that computes one once.
        new_steps: the statement at which models and optimizers are all there -> the step.
        is_changed: whether apexfx is in it already.
        autocast: blocks, and functions, under autocast -> whether that is around a step, and not around an evaluation.
    """

    def __init__(self, tree: ast.Module) -> None:
        rows = list(statements(tree, tree))
        self.scopes = {statement: scope for scope, _, statement in rows}
        self.statements = [(expressions, statement) for _, expressions, statement in rows]
        self.imported: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.options: dict[str, str] = {}
        self.wrapped: set[str] = set()
        self.new_steps: dict[ast.stmt, NewStep] = {}
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._conditions = {inside: ast.unparse(node.test) for node in ast.walk(tree)
                            if isinstance(node, ast.If) and not node.orelse and "is_available" not in ast.unparse(node.test)
                            for inside in node.body}
        self._scaled_if: dict[str, str] = {}  # a scaler -> the condition under which it is one, and else None
        for _, statement in self.statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._import(statement)
        called = {self.full_name(call.func) for call, _ in self.calls()}
        self.is_changed = bool(called & {"apexfx.train_step", "apexfx.transform"})
        self.has_backward = any(getattr(call.func, "attr", "") == "backward" for call, _ in self.calls())
        self.has_initialize = "apex.amp.initialize" in called
        for call, statement in self.calls():
            self._read(call, statement)
        self._name("model", *self._models())
        self.losses = [] if self.is_changed else self._find_losses(Losses(rows, self.is_model))
        self.autocast = self._autocast_blocks()
        for call, statement in self.calls():
            if self.full_name(call.func) == "torch.autocast" and any(self._around_steps(statement)):
                self._read_autocast(call)
        self._unite()
        for loss in self.losses:
            if loss.number is not None and not self.is_several:
                self.options["accumulate"] = ast.unparse(loss.number)
        if (groups := set(self._process_groups())) and len(groups) == 1 and "" not in groups:
            self.options["process_group"] = groups.pop()

    @property
    def is_several(self) -> bool:
        """Whether there are steps of several optimizers with a loss each, as in a generative adversarial network."""
        return len({name for step in self.new_steps.values() for name in step.optimizers}) > 1 and len(self.loss_names) != 1

    @property
    def loss_names(self) -> list[str]:
        """The variables that backwards start from."""
        return list(dict.fromkeys(loss.name for loss in self.losses))

    def calls(self) -> Iterator[tuple[ast.Call, ast.stmt]]:
        """Yield each call, and the statement that it stands in."""
        return ((call, statement) for expressions, statement in self.statements for call in calls(expressions))

    def full_name(self, node: ast.AST) -> str:
        """Return the full name of what was imported, "" for anything else."""
        first, dot, rest = dotted(node).partition(".")
        full = f"{self.imported[first]}{dot}{rest}" if first in self.imported else ""
        return SPELLINGS.get(full, full)

    def is_model(self, call: ast.Call) -> bool:
        """Return whether a call is that of a model."""
        return self.kinds.get(dotted(call.func)) == "model"

    def stays_under_autocast(self, statement: ast.stmt) -> bool:
        """Return whether what a statement calls autocast for is, or is also, an evaluation."""
        return not all(self._around_steps(statement))

    # ---- how it is read ------------------------------------------------------------------------------------------------------

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                full = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or full] = full
            elif alias.name == "*" and statement.module not in sys.stdlib_module_names:
                self.imported = _USUAL | self.imported
            elif not statement.level:
                self.imported[alias.asname or alias.name] = f"{statement.module}.{alias.name}"

    def _read(self, call: ast.Call, statement: ast.stmt) -> None:
        """Note what a call says of the model, the optimizer and the options of a step."""
        name, assigned = self.full_name(call.func), targets(statement)
        if name == "apex.amp.initialize":
            self._read_initialize(call, statement)
        elif name in (*WRAPPERS, *CONVERTERS, "torch.compile") and call.args:
            self._name("model", dotted(call.args[0]), *assigned)
            self.wrapped |= set(assigned) if name in WRAPPERS else set()
            condition = self._conditions.get(statement)
            if name in CONVERTERS:
                self.options["sync_bn"] = f"bool({condition})" if condition else "True"
            elif name in WRAPPERS:
                ddp, _ = buckets_of(name, call)
                self.options["ddp"] = ddp if not condition else f"bool({condition})" if ddp == "True" else \
                    f"{ddp} if {condition} else False"
        elif name == "torch.amp.GradScaler":
            self._name("scaler", *assigned)
            value = getattr(statement, "value", None)
            if isinstance(value, ast.IfExp) and ast.unparse(value.orelse) == "None":
                self._scaled_if |= {f"{scaler} is not None": ast.unparse(value.test) for scaler in assigned}
        elif (function := self._functions.get(dotted(call.func))) is not None:
            parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            given = [*zip(parameters, call.args), *((word.arg or "", word.value) for word in call.keywords)]
            self._name("scaler", *(parameter for parameter, value in given if isinstance(value, ast.Call)
                                   and self.full_name(value.func) == "torch.amp.GradScaler"))
        elif name == "torch.nn.utils.clip_grad_norm_":
            self.options["max_grad_norm"] = argument(call, 1, "max_norm") or "..."
        elif assigned and (name.startswith("apex.optimizers.") or name.rpartition(".")[0] == "torch.optim"):
            self._name("optimizer", *assigned)
            models = _owners_of_parameters(call)
            self._name("model", *models)
            if not self.has_initialize and not self.is_changed and self.has_backward:
                self.new_steps[statement] = NewStep(models or ("model",), tuple(assigned[:1]))

    def _read_initialize(self, call: ast.Call, statement: ast.stmt) -> None:
        assigned, models, optimizers = targets(statement), _names(call, 0, "models"), _names(call, 1, "optimizers")
        self._name("model", *models, *assigned[:len(models) or 1])
        self._name("optimizer", *optimizers, *assigned[len(models) or 1:])
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        for name in ("models", "optimizers", "verbosity", "num_losses"):
            options.pop(name, None)
        self.options["opt_level"] = options.pop("opt_level", argument(call, 3, "opt_level") or '"O1"')
        self.options |= {name: options.pop(name) for name in OPTIONS if name in options}
        left_out = ", ".join(name or "**" for name in options)
        self.new_steps[statement] = NewStep(models or ("model",), optimizers or ("optimizer",),
                                            left_out and f"  # without {left_out}")

    def _find_losses(self, losses: Losses) -> list[Loss]:
        started = (losses.of(statement, call) for call, statement in self.calls())
        rows = list({loss.statements[-1]: loss for loss in started if loss is not None}.values())
        for name in {loss.name for loss in rows}:  # the branches of an if compute it alike
            read = {key: readers for loss in rows if loss.name == name for key, readers in loss.read.items()}
            rows = [dataclasses.replace(loss, read=read) if loss.name == name else loss for loss in rows]
        return rows

    def _autocast_blocks(self) -> dict[ast.stmt, bool]:
        """Find what is under autocast.

        Around a step is what computes a loss; where nothing under autocast does, as with a forward in another file, all that
        does not look like an evaluation.
        """
        called = {statement for call, statement in self.calls() if self.full_name(call.func) == "torch.autocast"}
        contexts = {name for statement in called for name in targets(statement)}
        blocks = [statement for _, statement in self.statements
                  if statement in called and isinstance(statement, (ast.With, ast.FunctionDef))
                  or contexts.intersection(_contexts_of(statement))]
        of_losses = {statement for loss in self.losses for statement in loss.statements}
        computing = {block for block in blocks if of_losses.intersection(ast.walk(block))}
        return {block: block in computing or getattr(block, "name", "") == "forward"
                or not computing and not self._evaluates(block) for block in blocks}

    def _evaluates(self, block: ast.AST) -> bool:
        body = getattr(block, "body", ())
        return is_of_evaluation(block) or all(isinstance(inside, ast.With) and is_of_evaluation(inside) for inside in body) \
            or block in self.scopes and self.scopes[block] in self.scopes and self._evaluates(self.scopes[block])

    def _around_steps(self, statement: ast.stmt) -> list[bool]:
        """Return, for each block that a call of autocast in a statement is for, whether it is around a step."""
        if statement in self.autocast:
            return [self.autocast[statement]]
        assigned = set(targets(statement))
        return [around for block, around in self.autocast.items() if assigned.intersection(_contexts_of(block))] or [True]

    def _read_autocast(self, call: ast.Call) -> None:
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        enabled = words.get("enabled", "True")
        enabled = self._scaled_if.get(enabled, enabled)
        self.options["opt_level"] = '"O1"' if enabled == "True" else f'"O1" if {enabled} else "O0"'
        dtypes = [text for text in map(ast.unparse, call.args) if "float" in text or "dtype" in text]
        if dtype := words.get("dtype", next(iter(dtypes), "")):
            self.options["dtype"] = dtype if enabled == "True" else f"{dtype} if {enabled} else None"  # which O0 refuses

    def _unite(self) -> None:
        """Let optimizers that step for one loss share a step, where the last of them is made."""
        optimizers = tuple(dict.fromkeys(name for step in self.new_steps.values() for name in step.optimizers))
        if len(optimizers) > 1 and len(self.loss_names) == 1:
            last, step = list(self.new_steps.items())[-1]
            self.new_steps = {last: NewStep(self._models(), optimizers, step.left_out)}

    def _models(self) -> tuple[str, ...]:
        return _whole(name for step in self.new_steps.values() for name in step.models)

    def _process_groups(self) -> Iterator[str]:
        """Yield the process group of each wrapper and converter, "" for all ranks: a step has one for both."""
        for call, _ in self.calls():
            if (name := self.full_name(call.func)) in (*WRAPPERS, *CONVERTERS):
                place = 6 if name.endswith("DistributedDataParallel") else 1 if name.startswith("torch.nn.Sync") else sys.maxsize
                group = argument(call, place, "process_group") if not name.startswith("apex.parallel.Dist") else ""
                yield "" if group == "None" else group

    def _name(self, kind: str, *names: str) -> None:
        self.kinds |= dict.fromkeys(filter(None, names), kind)


def buckets_of(name: str, call: ast.Call) -> tuple[str, str]:
    """Return the `ddp=` that stands for a wrapper, and which of its arguments that leaves out, in words."""
    is_apex = name.startswith("apex.")
    places = zip(_APEX_ARGUMENTS if is_apex else _TORCH_ARGUMENTS, call.args)
    arguments = {name: ast.unparse(value) for name, value in places} | {
        word.arg or "**": ast.unparse(word.value) for word in call.keywords}
    arguments = {name: text for name, text in arguments.items() if text not in ("None", "False", _DEFAULTS.get(name))
                 or name == "gradient_average" and text == "False"}
    options = {name: arguments.pop(name) for name in _OF_BUCKETS if is_apex and name in arguments}
    if not is_apex and (size := arguments.pop("bucket_cap_mb", "")):
        options = {"layout": '"ddp"', "bucket_cap_mb": size}
    left_out = [f"without {name}" + (f": {_LEFT_OUT[name]}" if name in _LEFT_OUT else "") for name in arguments
                if name not in _NOT_NEEDED]
    config = ", ".join(f"{name}={text}" for name, text in options.items())
    return f"apexfx.BucketConfig({config})" if options else "True", "; ".join(left_out)


def _contexts_of(statement: ast.AST) -> set[str]:
    """Return the variables whose contexts a block enters."""
    return {dotted(item.context_expr) for item in statement.items} - {""} if isinstance(statement, ast.With) else set()


def _owners_of_parameters(call: ast.Call) -> tuple[str, ...]:
    """Return `model` of `AdamW(model.parameters())`, and of parts of it; several where no module holds them all."""
    owners = [dotted(node.func.value).removesuffix(".module") for node in ast.walk(call) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Attribute) and node.func.attr in ("parameters", "named_parameters")]  # fmt: skip
    return _whole(filter(None, owners))


def _whole(models: Iterable[str]) -> tuple[str, ...]:
    """Return `net` for `net.body` and `net.head`."""
    names = tuple(dict.fromkeys(models))
    roots = {name.partition(".")[0] for name in names}
    return tuple(roots) if len(names) > 1 and len(roots) == 1 and roots != {"self"} else names


def _names(call: ast.Call, place: int, name: str) -> tuple[str, ...]:
    """Return the variables that an argument names: one, or those of a list."""
    values = [*(word.value for word in call.keywords if word.arg == name), *call.args[place:place + 1]]
    parts: Sequence[ast.expr] = getattr(values[0], "elts", values[:1]) if values else ()
    return tuple(filter(None, map(dotted, parts)))
