"""The command `python -m apexfx simulate`: its options, and its text: a table by number of ranks, and the timeline of each."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from ..._torch import fake_process_group
from ...config import BucketConfig
from .devices import DEVICES, Costs, Device
from .models import MODELS, load
from .network import PRESETS, Network, flat
from .profile import Profile, analytic, measured
from .sharded import OPTIMIZERS, SHARDS, TracedStep, traced
from .simulator import BucketChoice, Prediction, best_bucket, best_of, simulate
from .timeline import LEGEND

_DTYPES = ("float32", "float16", "bfloat16")
_WIDTH = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", default="resnet50", metavar="NAME",
                        help=f"{', '.join(MODELS)}, or package.module:function of a function that returns (model, inputs) "
                             "(default: %(default)s)")
    parser.add_argument("--ranks", type=_ranks, default="8,64,512,4096", metavar="N,N,...",
                        help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--batch", type=_positive(int), metavar="N", help="on one rank (default: the model's own)")
    parser.add_argument("--dtype", choices=_DTYPES,
                        help="of compute and of the gradients that are sent (default: bfloat16)")
    parser.add_argument("--sync-bn", action="store_true", help="synchronize every batch norm")
    parser.add_argument("--optimizer", choices=OPTIMIZERS,
                        help="fused; what it reads and writes counts, and muon's products of matrices (default: adam)")
    parser.add_argument("--device", choices=DEVICES,
                        help="whose data sheet gives the times of ops, by their shapes (default: h100)")
    parser.add_argument("--measured", action="store_true",
                        help="run the model here, on the CPU in float32 with SGD, and take the times from that, in place of "
                             "--device, --dtype and --optimizer")
    parser.add_argument("--network", choices=PRESETS, default="nvlink4+ib400",
                        help="between the ranks (default: %(default)s)")
    parser.add_argument("--latency-us", type=_positive(float), metavar="US",
                        help="with --bandwidth: a network of your own")
    parser.add_argument("--bandwidth", type=_positive(float), metavar="GB/S", help="of a node's link, in one direction")
    parser.add_argument("--ranks-per-node", type=_positive(int), metavar="N",
                        help="that share such a link, and are joined by NVLink (default: 1)")
    parser.add_argument("--shard", choices=SHARDS,
                        help="model: it is under fully_shard(); optimizer: train_step(ddp=True, shard=\"optimizer\")")
    parser.add_argument("--blocks", metavar="PATTERN,...",
                        help="with --shard model: paths of the modules that fully_shard() is given besides the model, as in "
                             "'blocks.*' (default: the model's own)")
    parser.add_argument("--clip", action="store_true",
                        help="with --shard: gradients are clipped by their norm, for which every update waits")
    parser.add_argument("--bucket-mib", type=_sizes, default=(), metavar="MIB",
                        help="where a bucket closes (default: BucketConfig's, a quarter of the gradients within bounds); with "
                             "--shard optimizer also several, as in 25,5,100: the best is named, and the first is simulated")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected whole numbers of at least 1, as in 8,64,512")
    return tuple(map(int, parts))


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(map(_positive(float), text.split(",")))


def _positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not (0 < number < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} was given, expected a {'whole ' if kind is int else ''}number above 0")
        return number

    return parse


def text(options: argparse.Namespace) -> str:
    """Return what to print, and write the files asked for.

    Raises:
        ValueError: options that do not fit each other, or a model that cannot be found or run.
    """
    network, where = _network(options)
    decided = {"device": "h100", "dtype": "bfloat16", "optimizer": "adam"}
    asked = [f"--{name} {value}" for name in decided if (value := getattr(options, name)) is not None]
    if options.measured and asked:
        raise ValueError("apexfx: --measured runs the model here, on the CPU in float32 with SGD, and "
                         f"{', '.join(asked)} was given; leave one of them out")
    decided = {name: getattr(options, name) or default for name, default in decided.items()}
    options = argparse.Namespace(**{**vars(options), **decided})
    blocks = _blocks(options)
    model, inputs = load(options.model, options.batch, device="cpu" if options.measured else "meta")
    profile, device = _profile(options, model, inputs)
    itemsize = max(spec.dtype.itemsize for spec in profile.gradients)
    configs = [BucketConfig(message_size=max(1, round(mib * 2**20 / itemsize))) for mib in options.bucket_mib] or [BucketConfig()]
    predictions, choices = [], []
    for num_ranks in options.ranks:
        tried, how = [], {"costs": Costs.on(device)}
        for config in configs:
            if options.shard is not None:
                how |= {"device": device, "step": _traced(options, model, inputs, num_ranks, blocks, config)}
            tried.append(simulate(profile, network, num_ranks, config, **how))
        predictions.append(tried[0])
        choices.append(best_bucket(profile, network, num_ranks, configs[0], **how) if options.shard is None else
                       best_of(configs, tried, itemsize) if len(tried) > 1 else [])
    if options.json:
        _write(options, profile, predictions, choices)
    rows = [_row(*row, profile.synchronizes) for row in zip(predictions, choices)]
    sent = "collectives ms" if options.shard else "allreduce ms"
    headers = ("ranks", "step ms", "compute ms", "copies ms", sent, "exposed ms", "exposed", "SyncBN tax ms",
               "efficiency", "best bucket MiB", "step there ms")
    title = (f"{options.model}: {profile.num_bytes / 2**20:.1f} MiB of gradients in {len(profile.gradients)}, "
             f"{len(predictions[0].buckets)} {'buckets' if blocks is None else 'groups'}; {profile.source}; {where}")
    table = tabulate(rows, headers=[header.replace(" ", "\n", 1) for header in headers], disable_numparse=True)
    none = f"warning: --sync-bn was given, and {options.model} runs no batch norm: there is nothing to synchronize"
    notes = [none] if options.sync_bn and not profile.synchronizes else []
    return "\n".join([title, *notes, "", table, "", *_pictures(predictions)])


def _network(options: argparse.Namespace) -> tuple[Network, str]:
    if (options.latency_us is None) != (options.bandwidth is None):
        raise ValueError("apexfx: one of --latency-us and --bandwidth was given; give both, or a preset by --network")
    if options.latency_us is None:
        if options.ranks_per_node is not None:
            raise ValueError("apexfx: --ranks-per-node was given without --latency-us and --bandwidth; a preset has its own")
        return PRESETS[options.network], options.network
    ranks_per_node = options.ranks_per_node or 1
    network = flat(options.latency_us * 1e-6, options.bandwidth * 1e9, ranks_per_node=ranks_per_node)
    return network, f"{options.latency_us:g} us, {options.bandwidth:g} GB/s, {ranks_per_node} to a node"


def _blocks(options: argparse.Namespace) -> str | None:
    """Return which modules are under `fully_shard`; None where the model is not."""
    if len(options.bucket_mib) > 1 and options.shard != "optimizer":
        raise ValueError("apexfx: several sizes were given by --bucket-mib without --shard optimizer; give one")
    if options.shard is None and options.clip:
        raise ValueError("apexfx: --clip was given without --shard; whole gradients are there when they are clipped anyway")
    if options.shard != "model":
        if options.blocks is not None:
            raise ValueError("apexfx: --blocks was given without --shard model, which gathers them; leave it out")
        return None
    if options.bucket_mib:
        raise ValueError("apexfx: --bucket-mib was given with --shard model, which sums the gradients of a block; leave it out")
    if options.blocks is None and options.model not in MODELS:
        raise ValueError(f"apexfx: --shard model was given for {options.model!r}, and not which of its modules fully_shard() is "
                         "given; name them, as in --blocks 'blocks.*', or give --blocks '' for the whole model at once")
    return options.blocks if options.blocks is not None else MODELS[options.model].blocks


def _profile(options: argparse.Namespace, model: torch.nn.Module, inputs: Any) -> tuple[Profile, Device]:
    if options.measured:
        return measured(model, inputs, sync_bn=options.sync_bn), DEVICES["cpu-core"]
    device = DEVICES[options.device]
    return analytic(model, inputs, device, dtype=getattr(torch, options.dtype), sync_bn=options.sync_bn,
                    optimizer_passes=OPTIMIZERS[options.optimizer][0], muon=options.optimizer == "muon"), device


def _traced(options: argparse.Namespace, model: torch.nn.Module, inputs: Any, num_ranks: int, blocks: str | None,
            config: BucketConfig) -> TracedStep:
    how = {} if options.measured else {"optimizer": options.optimizer, "dtype": getattr(torch, options.dtype)}
    with fake_process_group(num_ranks):
        return traced(model, inputs, shard=options.shard, sync_bn=options.sync_bn, clips=options.clip, blocks=blocks,
                      config=config, **how)


def _row(prediction: Prediction, choices: list[BucketChoice], synchronizes: bool) -> tuple[str, ...]:
    best = (f"{choices[0].mib:.2f}", f"{1e3 * choices[0].step_s:.2f}") if choices else ("-", "-")
    tax = f"{1e3 * prediction.sync_tax_s:.2f}" if synchronizes else "-"
    times = (prediction.step_s, prediction.compute_s, prediction.bookkeeping_s, prediction.communication_s, prediction.exposed_s)
    return (f"{prediction.num_ranks}", *(f"{1e3 * s:.2f}" for s in times),
            f"{100 * prediction.exposed_s / prediction.step_s:.1f} %", tax, f"{100 * prediction.efficiency:.1f} %",
            *best)


def _pictures(predictions: list[Prediction]) -> list[str]:
    longest = max(prediction.step_s for prediction in predictions)
    lines = []
    for prediction in predictions:
        lines += [f"{prediction.num_ranks} ranks, {1e3 * prediction.step_s:.2f} ms",
                  prediction.timeline.picture(_WIDTH, longest), ""]
    return [*lines, LEGEND]


def _write(options: argparse.Namespace, profile: Profile, predictions: list[Prediction],
           choices: list[list[BucketChoice]]) -> None:
    rows = [{**prediction.to_json(), "bucket_sizes": [asdict(choice) for choice in tried]}
            for prediction, tried in zip(predictions, choices)]
    data = {"model": options.model, "source": profile.source, "gradient_bytes": profile.num_bytes, "rows": rows}
    Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
