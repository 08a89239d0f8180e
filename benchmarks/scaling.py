"""Time and memory of one PPO iteration against the number of environments, the width of the networks and ranks.

    python benchmarks/scaling.py                                     # on a GPU if there is one
    python benchmarks/scaling.py --execution eager graph auto --out scaling.json
    python benchmarks/scaling.py --device cpu --threads 1 --max-seconds 20
    python benchmarks/scaling.py --sizes --widths --ranks 1 2 4      # processes that may share a GPU

The environment costs nothing; every size is a process of its own. Memory is the peak less what the environment takes.
The exponents are fitted to the larger half of the sizes: 1.00 is time (or memory) in proportion.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from report import report

from canter.bench import Workload, measure_ranks, measure_sizes, slope, with_envs, with_width

AXES = {"envs": with_envs, "width": with_width}


def measure(args, name, sizes, execution):
    """Report every size as it is measured, and at the end the exponents fitted to all."""
    work = Workload(num_envs=args.envs, hidden_dims=tuple(args.hidden), rnn_type="lstm" if args.recurrent else None)
    how = {"device": args.device, "execution": execution, "precision": args.precision}
    how |= {"warm_up": args.warm_up, "iterations": args.iterations}
    print(
        f"\n{execution} {args.precision}\n{name:>8}{'collect':>10}{'learn':>10}{'iteration':>11}{'steps/s':>13}"
        f"{'ready s':>9}{'GiB':>8}"
    )
    rows = []
    for size, t, left_out in measure_sizes(work, sizes, AXES[name], args.max_seconds, **how):
        if t is None:
            print(f"{size:>8}  {left_out}", flush=True)
            continue
        print(
            f"{size:>8}{t.collect:10.2f}{t.learn:10.2f}{t.iteration:11.2f}{t.rate:13,.0f}{t.ready:9.1f}{t.memory:8.2f}",
            flush=True,
        )
        rows.append({"size": size, **t._asdict(), "iteration": t.iteration, "rate": t.rate})
        report({"axis": name, "execution": execution, "precision": args.precision, **rows[-1]}, args.out)
    if rows:
        fits = {what: slope([(row["size"], row[what]) for row in rows]) for what in ("iteration", "memory")}
        report({"axis": f"{name} fit", "execution": execution, "precision": args.precision, **fits}, args.out)


def measure_processes(args, execution):
    """Report every number of ranks, with its efficiency and the share of time that the host waits in collectives."""
    work = Workload(num_envs=args.envs, hidden_dims=tuple(args.hidden), rnn_type="lstm" if args.recurrent else None)
    how = {"device": args.device, "execution": execution, "precision": args.precision}
    how |= {"warm_up": args.warm_up, "iterations": args.iterations}
    first = None
    for size, t in measure_ranks(work, args.ranks, **how):
        first = first or t.rate / size
        row = {**t._asdict(), "iteration": t.iteration, "rate": t.rate, "efficiency": 100 * t.rate / size / first}
        row |= {"share": 100 * t.collectives / t.iteration, "envs": args.envs, "memory": None}
        print(
            f"{size} ranks: {t.iteration:.2f} ms, {t.rate:,.0f} steps/s, efficiency {row['efficiency']:.0f} %, "
            f"{row['share']:.0f} % in collectives",
            flush=True,
        )
        kind = {"axis": "ranks", "device": args.device, "execution": execution, "precision": args.precision}
        report({**kind, "size": size, **row}, args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--sizes", type=int, nargs="*", default=[2**k for k in range(6, 18)], help="environments")
    parser.add_argument("--widths", type=int, nargs="*", default=[2**k for k in range(6, 12)], help="first layers")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="processes that train together")
    parser.add_argument("--envs", type=int, default=4096 if has_gpu else 256, help="fixed while the width varies")
    parser.add_argument("--hidden", type=int, nargs="*", default=[512, 256, 128], help="fixed while the number varies")
    parser.add_argument("--recurrent", action="store_true", help="with an LSTM of 256")
    parser.add_argument("--execution", nargs="*", default=["auto"])
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU")
    parser.add_argument("--warm-up", type=int, default=8 if has_gpu else 2)
    parser.add_argument("--iterations", type=int, default=10 if has_gpu else 5)
    parser.add_argument("--max-seconds", type=float, default=60.0, help="a size that would take longer is left out")
    parser.add_argument("--out", type=Path, help="append one line of JSON per size")
    args = parser.parse_args()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # every size is a process of its own
    for execution in args.execution:
        measure(args, "envs", args.sizes, execution)
        measure(args, "width", args.widths, execution)
        measure_processes(args, execution)


if __name__ == "__main__":
    main()
