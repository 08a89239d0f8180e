"""Where a recorded minibatch of PPO spends its time: gathering, networks, loss, gradients, optimizer.

    python benchmarks/minibatch.py --out benchmarks/results/minibatch.jsonl

The recording of HalfCheetah-v5 as `cpu_training.py` trains it (64 rows, two networks of 64-64 tanh units) is cut after
the operation that ends a part, and each beginning is timed on one thread: microseconds of processor time, the lowest of
`--repeats` means. A part takes what its beginning takes more than the one before. The matrix products and the tanh are
also run alone, for comparison.
"""

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from cpu_training import TASKS
from report import report
from torch import fx

from canter.envs.wrap import wrap_env
from canter.execution import recording
from canter.execution.interpreter import to_interpreter
from canter.runners import OnPolicyRunner

TASK = "HalfCheetah-v5"
# The last operation of each part, by name; of operations with the same name the last one counts, or the first.
PARTS = {
    "gathering the rows": ("index_select", -1),
    "forward pass": ("addmm", -1),
    "losses and their gradients": ("mm", 0),
    "backward pass": ("_foreach_copy_", -1),
    "clipping": ("ne_", -1),
    "Adam": ("_foreach_sub_", -1),
}
KERNELS = ("addmm", "mm", "tanh", "tanh_backward")


def record_minibatch():
    """The graph of the recorded `learn_step`, the values of its outside arguments, and an index of rows."""
    graphs, simplify = [], recording.simplify

    def keep(recorded):
        outside = simplify(recorded)
        graphs.append((recorded.graph, outside))
        return outside

    recording.simplify = keep
    task = TASKS[TASK]
    rows = task["envs"] * task["steps"]
    algorithm = {
        "num_mini_batches": rows // task["batch"],
        "use_clipped_value_loss": False,
        "schedule": "fixed",
        "normalize_advantage_per_mini_batch": True,
        "empirical_normalization": True,
        "normalize_rewards": True,
    }
    policy = {"actor_hidden_dims": task["hidden"], "critic_hidden_dims": task["hidden"], "activation": "tanh"}
    cfg = {"num_steps_per_env": task["steps"], "algorithm": algorithm, "policy": policy, "seed": 1, "log_interval": 0}
    env = wrap_env(TASK, "cpu", num_envs=task["envs"], seed=1)
    OnPolicyRunner(env, cfg, None, "cpu", show_progress=False).learn(3)
    graph, outside = next(found for found in graphs if "_fused_adam_" in map(operation, found[0].nodes))
    return graph, outside, torch.randperm(rows)[: task["batch"]]


def operation(node):
    """The name of a node's operation without its overload, "" if it is none."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "") if node.op == "call_function" else ""


def beginning(graph, count):
    """The first operations of a graph as a function; results that nothing reads are returned."""
    made, copies = fx.Graph(), {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = made.placeholder(node.name)
    kept = [node for node in graph.nodes if node.op == "call_function"][:count]
    for node in kept:
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[n] for n in kept if "kind" in n.meta and not set(n.users) & set(kept)))
    return to_interpreter(made)


def alone(graph, outside, index):
    """The matrix products and the tanh of a graph as a function, on inputs of the same shapes and strides."""
    seen, calls = [], []

    class Keep(fx.Interpreter):
        def run_node(self, node):
            if operation(node) in KERNELS:
                args = [
                    torch.empty_strided(a.shape, a.stride()).normal_()
                    for a in self.map_nodes_to_values(node.args, node)
                ]
                calls.append((node.target, tuple(range(len(seen), len(seen) + len(args)))))
                seen.extend(args)
            return super().run_node(node)

    with torch.no_grad():
        Keep(fx.GraphModule(torch.nn.Module(), graph)).run(*outside, index)
    made = fx.Graph()
    inputs = [made.placeholder(f"x{number}") for number in range(len(seen))]
    made.output(tuple(made.call_function(target, tuple(inputs[i] for i in places)) for target, places in calls))
    function = to_interpreter(made)
    return lambda: function(*seen), len(calls)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--calls", type=int, default=40, help="in each repeat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    graph, outside, index = record_minibatch()
    names = [operation(node) for node in graph.nodes if node.op == "call_function"]
    places = {part: [i for i, name in enumerate(names) if name == last] for part, (last, _) in PARTS.items()}
    ends = {part: places[part][which] + (which == -1) for part, (_, which) in PARTS.items()}
    ends["noise bounds and meters"] = len(names)
    functions = {part: partial(beginning(graph, end), *outside, index) for part, end in ends.items()}
    functions["matrix products and tanh alone"], count = alone(graph, outside, index)
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(args.repeats):
        for name, function in functions.items():
            begin = time.process_time()
            for _ in range(args.calls):
                function()
            best[name] = min(best[name], (time.process_time() - begin) / args.calls * 1e6)
    whole, before, operations = best["noise bounds and meters"], 0.0, 0
    for part, end in ends.items():
        report({"what": part, "operations": end - operations, "us": best[part] - before}, args.out)
        before, operations = best[part], end
    report({"what": "all", "operations": len(names), "us": whole}, args.out)
    report({"what": "matrix products and tanh alone", "operations": count, "us": best[list(best)[-1]]}, args.out)


if __name__ == "__main__":
    main()
