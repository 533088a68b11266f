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

from ..config import BucketConfig
from .devices import DEVICES
from .graph_plan import graph_plan
from .models import MODELS, load
from .network import PRESETS, Network, flat
from .profile import Profile, analytic, measured
from .simulator import BucketChoice, Costs, Prediction, accumulation_break_even, best_bucket, simulate
from .timeline import LEGEND

_DTYPES = ("float32", "float16", "bfloat16")
_OPTIMIZERS = {"sgd": 3, "momentum": 5, "adam": 7}  # reads and writes of each parameter
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
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, help="fused; what it reads and writes counts (default: adam)")
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
    parser.add_argument("--bucket-mib", type=_positive(float), metavar="MIB",
                        help="where a bucket closes (default: BucketConfig's, a quarter of the gradients within bounds)")
    parser.add_argument("--graph", action="store_true",
                        help="take the buckets from the backward graph that transform() makes, captured in a fake process "
                             "group of the most ranks, rather than from the eager executor's rule")
    parser.add_argument("--share", type=_positive(float), default=5.0, metavar="PERCENT",
                        help="of a step that exposed allreduces of gradients may take; the column micro-batches says how "
                             "many the step needs for that (default: %(default)s)")
    parser.add_argument("--trace", metavar="FILE",
                        help="write the step at the most ranks for chrome://tracing or perfetto")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} was given, expected whole numbers of at least 1, as in 8,64,512")
    return tuple(map(int, parts))


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


def text(given: argparse.Namespace) -> str:
    """Return what to print, and write the files asked for.

    Raises:
        ValueError: options that do not fit each other, or a model that cannot be found or run.
    """
    network, where = _network(given)
    decided = {"device": "h100", "dtype": "bfloat16", "optimizer": "adam"}
    asked = [f"--{name} {value}" for name in decided if (value := getattr(given, name)) is not None]
    if given.measured and asked:
        raise ValueError("apexfx: --measured runs the model here, on the CPU in float32 with SGD, and "
                         f"{', '.join(asked)} was given; leave one of them out")
    given = argparse.Namespace(**{**vars(given), **{name: getattr(given, name) or default for name, default in decided.items()}})
    if given.share >= 100:
        raise ValueError(f"apexfx: --share {given.share:g} was given, expected a percentage below 100")
    model, inputs = load(given.model, given.batch, device="cpu" if given.measured else "meta")
    profile, costs = _profile(given, model, inputs)
    config = BucketConfig()
    if given.bucket_mib is not None:
        itemsize = max(spec.dtype.itemsize for spec in profile.gradients)
        config = BucketConfig(message_size=max(1, round(given.bucket_mib * 2**20 / itemsize)))
    predictions = _predict(given, profile, network, config, costs)
    choices = [best_bucket(profile, network, num_ranks, config, costs=costs)
               for num_ranks in given.ranks]
    micro_batches = [accumulation_break_even(made, profile, given.share / 100) for made in predictions]
    if given.trace:
        predictions[-1].timeline.to_chrome_trace(given.trace, name=f"{given.model} on {given.ranks[-1]} ranks")
    if given.json:
        _write(given, profile, predictions, choices, micro_batches)
    synchronizes = profile != profile.without_sync()
    rows = [_row(*row, synchronizes) for row in zip(predictions, choices, micro_batches)]
    headers = ("ranks", "step ms", "compute ms", "copies ms", "allreduce ms", "exposed ms", "exposed", "SyncBN tax ms",
               "efficiency", "best bucket MiB", "step there ms", "micro- batches")
    title = (f"{given.model}: {profile.num_bytes / 2**20:.1f} MiB of gradients in {len(profile.gradients)}, "
             f"{len(predictions[0].buckets)} buckets; {profile.source}; {where}")
    table = tabulate(rows, headers=[header.replace(" ", "\n", 1) for header in headers], disable_numparse=True)
    none = f"warning: --sync-bn was given, and {given.model} runs no batch norm: there is nothing to synchronize"
    notes = [none] if given.sync_bn and not synchronizes else []
    explained = ("micro-batches: how many a step needs, all but the last inside no_sync(), so that exposed allreduces of "
                 f"gradients take at most {given.share:g} % of it")
    return "\n".join([title, *notes, "", table, "", explained, "", *_pictures(predictions)])


def _network(given: argparse.Namespace) -> tuple[Network, str]:
    if (given.latency_us is None) != (given.bandwidth is None):
        raise ValueError("apexfx: one of --latency-us and --bandwidth was given; give both, or a preset by --network")
    if given.latency_us is None:
        if given.ranks_per_node is not None:
            raise ValueError("apexfx: --ranks-per-node was given without --latency-us and --bandwidth; a preset has its own")
        return PRESETS[given.network], given.network
    ranks_per_node = given.ranks_per_node or 1
    network = flat(given.latency_us * 1e-6, given.bandwidth * 1e9, ranks_per_node=ranks_per_node)
    return network, f"{given.latency_us:g} us, {given.bandwidth:g} GB/s, {ranks_per_node} to a node"


def _profile(given: argparse.Namespace, model: torch.nn.Module, inputs: Any) -> tuple[Profile, Costs]:
    if given.measured:
        return measured(model, inputs, sync_bn=given.sync_bn), Costs.on(DEVICES["cpu-core"])
    device = DEVICES[given.device]
    profile = analytic(model, inputs, device, dtype=getattr(torch, given.dtype), sync_bn=given.sync_bn,
                       optimizer_passes=_OPTIMIZERS[given.optimizer])
    return profile, Costs.on(device)


def _predict(given: argparse.Namespace, profile: Profile, network: Network, config: BucketConfig,
             costs: Costs) -> list[Prediction]:
    if not given.graph:
        return [simulate(profile, network, num_ranks, config, costs=costs) for num_ranks in given.ranks]
    device = profile.gradients[0].device
    model, inputs = load(given.model, given.batch, device=device.type)
    plan = graph_plan(model, inputs, config, max(given.ranks), device=device,
                      dtype=torch.float32 if given.measured else getattr(torch, given.dtype))
    return [simulate(profile, network, num_ranks, plan=plan.for_world_size(num_ranks), costs=costs)
            for num_ranks in given.ranks]


def _row(made: Prediction, choices: list[BucketChoice], micro_batches: int, synchronizes: bool) -> tuple[str, ...]:
    best = choices[0]
    tax = f"{1e3 * made.sync_tax_s:.2f}" if synchronizes else "-"
    return (f"{made.num_ranks}", *(f"{1e3 * s:.2f}" for s in (made.step_s, made.compute_s, made.bookkeeping_s,
                                                             made.communication_s, made.exposed_s)),
            f"{100 * made.exposed_s / made.step_s:.1f} %", tax, f"{100 * made.efficiency:.1f} %",
            f"{best.mib:.2f}", f"{1e3 * best.step_s:.2f}", f"{micro_batches}")


def _pictures(predictions: list[Prediction]) -> list[str]:
    longest = max(made.step_s for made in predictions)
    lines = []
    for made in predictions:
        lines += [f"{made.num_ranks} ranks, {1e3 * made.step_s:.2f} ms", made.timeline.picture(_WIDTH, longest), ""]
    return [*lines, LEGEND]


def _write(given: argparse.Namespace, profile: Profile, predictions: list[Prediction], choices: list[list[BucketChoice]],
           micro_batches: list[int]) -> None:
    rows = [{**made.to_json(), "bucket_sizes": [asdict(choice) for choice in tried], "micro_batches": number}
            for made, tried, number in zip(predictions, choices, micro_batches)]
    data = {"model": given.model, "source": profile.source, "gradient_bytes": profile.num_bytes, "share": given.share / 100,
            "rows": rows}
    Path(given.json).write_text(json.dumps(data, indent=1) + "\n")
