"""Graph rewrites for the compiler compute the same."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from canter.algorithms.optim import GuardedOptimizer
from canter.envs import make_env
from canter.execution import compile as compiler
from canter.execution import record as record_module
from canter.execution.compile import (
    LONG_LOOP,
    Compilation,
    compile_graph,
    decompose,
    hoist_scalars,
    split_addmm,
    tanh_as_sigmoid,
)
from canter.execution.record import Recorder, record, to_function
from canter.execution.recorded_graph import simplify
from canter.presets import load_preset
from canter.runners import OffPolicyRunner, OnPolicyRunner

aten = torch.ops.aten


def compiled(fn, *args):
    """A recording that runs compiled."""
    _, recording = record(fn, args, args, compiles=True)
    compilation = Compilation(recording.to_compile, (*recording.outside, *args))
    compilation.thread.join()
    recording.run = compilation.run
    return recording


def rewritten(fn, *inputs):
    """The rewritten recording of a function as Python code, and the names of its operations."""
    recorder = Recorder(inputs)
    with recorder:
        fn(*recorder.inputs)
    recorder.recorded.graph.output(())
    outside = simplify(recorder.recorded)
    decompose(recorder.recorded)
    names = [str(node.target) for node in recorder.recorded.graph.nodes if node.op == "call_function"]
    run = to_function(recorder.recorded.graph)
    return (lambda *inputs: run(*outside, *inputs)), names


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_decomposed_adam_takes_the_steps_of_the_fused_one(kind, decay, maximize):
    torch.manual_seed(0)
    start = torch.randn(7)
    results = []
    for decomposes in (False, True):
        param, found_inf = nn.Parameter(start.clone()), torch.zeros(())
        rate = torch.tensor(0.01)
        optimizer = kind([param], lr=rate, weight_decay=decay, maximize=maximize, fused=True)
        optimizer.found_inf = found_inf

        def step(grad, param=param, optimizer=optimizer):
            param.grad.copy_(grad)
            optimizer.step()

        param.grad = torch.zeros(7)
        generator = torch.Generator().manual_seed(1)
        step(torch.randn(7, generator=generator))
        run = step
        if decomposes:
            run, names = rewritten(step, torch.randn(7, generator=generator))
            assert not any("fused" in name or "foreach" in name for name in names)
        else:
            step(torch.randn(7, generator=generator))
        seen = []
        for k in range(300):
            found_inf.fill_(float(k % 10 == 3))
            rate.fill_(0.01 / (1 + k))
            run(torch.randn(7, generator=generator))
            state = optimizer.state[param]
            seen.append([param.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()])
        assert optimizer.state[param]["step"].item() == 272  # two and 300, less those that were not finite
        results.append(seen)
    for fused, full in zip(*results, strict=True):
        for a, b in zip(fused, full, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    unchanged = results[1][3][0]
    assert torch.equal(unchanged, results[1][2][0])


def test_adam_with_amsgrad_stays_fused():
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.Adam([param], lr=torch.tensor(0.1), amsgrad=True, fused=True)
    optimizer.step()
    _, names = rewritten(lambda x: optimizer.step(), torch.ones(1))
    assert any("_fused_adam_" in name for name in names)


def test_a_second_step_that_needs_the_first_stays_fused():
    """It cannot be compiled, and uncompiled the fused call is faster than its parts."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.Adam([param], lr=torch.tensor(0.1), fused=True) for param in params]
    vectors = [param.detach().view(-1) for param in params]  # views of the same memory, as of layers in a flat vector

    def step(x):
        for k in (0, 1):
            params[k].grad.copy_(x * params[0].detach() * vectors[k])
            optimizers[k].step()

    for param in params:
        param.grad = torch.zeros(3)
    step(torch.ones(3))
    twins = [param.detach().clone() for param in params]
    run, names = rewritten(step, torch.ones(3))
    assert sum("_fused_adam_" in name for name in names) == 1
    run(torch.full((3,), 2.0))
    assert all((param < twin).all() for param, twin in zip(params, twins, strict=True))


def test_foreach_operations_are_decomposed():
    a, b = torch.ones(2), torch.full((3,), 2.0)

    def step(x):
        torch._foreach_add_([a, b], 1)
        torch._foreach_sub_([a], [x])
        torch._foreach_mul_([b], 3.0)
        torch._foreach_add_([a], [x], alpha=2.0)

    run, names = rewritten(step, torch.ones(2))
    assert [name for name in names if "foreach" in name] == ["aten._foreach_add_.List"]  # the scaled one
    run(torch.full((2,), 5.0))
    assert a.tolist() == [9.0, 9.0]
    assert b.tolist() == [30.0, 30.0, 30.0]


def traced(fn, *inputs):
    module = make_fx(fn, tracing_mode="fake")(*inputs)
    return module, [node for node in module.graph.nodes if node.op == "call_function"]


def test_addmm_is_split_into_product_and_sum():
    x, w, b = torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)
    module, _ = traced(lambda b, x, w: torch.addmm(b, x, w) + torch.addmm(b, x, w, beta=0.5), b, x, w)
    split_addmm(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(aten.mm.default) == 1
    assert targets.count(aten.addmm.default) == 1  # the scaled one
    torch.testing.assert_close(module(b, x, w), torch.addmm(b, x, w) + torch.addmm(b, x, w, beta=0.5))
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")


def test_only_a_tanh_that_feeds_a_product_becomes_a_sigmoid():
    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-1e30, 1e30, 0.0])]).view(-1, 4)
    module, _ = traced(lambda x: (torch.tanh(x) @ torch.eye(4), torch.tanh(x * 2)), x)
    tanh_as_sigmoid(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(aten.tanh.default) == targets.count(aten.sigmoid.default) == 1
    ours, left = module(x)
    assert (ours - torch.tanh(x)).abs().max() < 2e-7
    assert torch.equal(left, torch.tanh(x * 2))


def test_scalars_of_long_loops_are_computed_before_them():
    def scale(x, y, n):
        factor = 1.0 / (n + 1.0)
        return x * factor, y * factor

    inputs = torch.ones(LONG_LOOP), torch.ones(3), torch.tensor(3.0)
    module, _ = traced(scale, *inputs)
    hoist_scalars(module.graph)
    module.recompile()
    kept = [node for node in module.graph.nodes if node.target is aten.as_strided.default]
    assert len(kept) == 1
    assert [user.meta["val"].numel() for user in kept[0].users] == [LONG_LOOP]
    assert [part[0].item() for part in module(*inputs)] == [0.25, 0.25]


@pytest.mark.slow
def test_compiled_training_steps_follow_the_eager_ones():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)) for _ in "ab"]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [GuardedOptimizer(net, "Adam", 1e-3) for net in nets]

    def step(x, k):
        loss = (nets[k](x) - x[:, :2].sin()).square().mean()
        optimizers[k].take_grads(torch.autograd.grad(loss, optimizers[k].parameters))
        optimizers[k].step(1.0)
        return loss.detach()

    x = torch.randn(16, 6)
    for k in (0, 1):
        step(x, k)
    recording = compiled(lambda x: step(x, 0), x)
    step(x, 1)
    for _ in range(40):
        x = torch.randn(16, 6)
        torch.testing.assert_close(recording.replay([x]), step(x, 1), rtol=1e-4, atol=1e-6)
    assert recording.run is not recording.uncompiled
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def finish_compiling(runner, metrics):
    """Wait for the threads that compile."""
    for graph in runner.alg.executor.graphs.values():
        if graph.compilation is not None:
            graph.compilation.thread.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:a recording cannot be compiled")
def test_every_part_of_ppo_is_compiled(monkeypatch):
    cfg = {**load_preset("CartPole-v1", "ppo"), "execution": "compile"}
    runner = OnPolicyRunner(make_env("CartPole-v1", "cpu", 8, 1), cfg, device="cpu", show_progress=False)
    monkeypatch.setattr(record_module, "PAYING_SECONDS", 0.0)
    runner.add_callback("post_update", finish_compiling)
    runner.learn(8)
    graphs = runner.alg.executor.graphs.items()
    assert {signature[0]: graph.run is not graph.uncompiled for signature, graph in graphs} >= {
        "act": True,
        "learn": True,
    }
    runner.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:a recording cannot be compiled")
def test_the_steps_of_critics_and_actor_are_compiled(monkeypatch):
    sizes = []

    def note(graph, *args):
        sizes.append(len(graph.nodes))
        return compile_graph(graph, *args)

    monkeypatch.setattr(compiler, "compile_graph", note)
    monkeypatch.setattr(record_module, "PAYING_SECONDS", 0.0)
    losses = {}
    for execution in ("eager", "compile"):
        cfg = {**load_preset("Pendulum-v1", "sac"), "execution": execution, "seed": 1}
        cfg["algorithm"] |= {"learning_starts": 50, "batch_size": 32}
        runner = OffPolicyRunner(make_env("Pendulum-v1", "cpu", 1, 1), cfg, device="cpu", show_progress=False)
        runner.add_callback("post_update", finish_compiling)
        runner.learn(100)
        losses[execution] = [value for value in runner.policy.state_dict().values() if value.is_floating_point()]
        runner.close()
    assert len([size for size in sizes if size > 100]) == 2
    for ours, theirs in zip(*losses.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_arithmetic_after_writes_and_draws_is_compiled_too(monkeypatch):
    """Weights have two names, so that their write cannot be compiled; what follows it reads the new values."""
    seen = []

    def interpret(graph, examples, is_alias_free):
        seen.append([str(node.target) for node in graph.nodes if node.op == "call_function"])
        run = to_function(graph)
        return lambda values: run(*values)

    def make():
        flat = torch.arange(6.0)
        generator = torch.Generator().manual_seed(0)
        first, second = flat[:3], flat[3:]

        def fn(x):
            total = x
            for _ in range(8):
                total = (total * first).tanh() + second
            flat.copy_(torch.cat([total, total * 2]))
            noise = torch.rand(3, generator=generator)
            for _ in range(8):
                total = (total * first).tanh() + second * noise
            flat.mul_(0.5)
            return total + torch.rand(3, generator=generator) + first

        return fn, flat

    monkeypatch.setattr(compiler, "compile_graph", interpret)
    (fn, flat), (want_fn, want_flat) = make(), make()
    x = torch.tensor([0.1, 0.2, 0.3])
    recording = compiled(fn, x)
    want_fn(x)
    for k in range(5):
        assert torch.equal(recording.replay([x + k]), want_fn(x + k))
        assert torch.equal(flat, want_flat)
    assert len(seen) == 2
    assert all(sum("tanh" in name for name in names) == 8 for names in seen)


@pytest.mark.filterwarnings("error:a recording cannot be compiled")
def test_a_function_in_inference_mode_is_compiled_after_its_weights_were_written_to():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.inference_mode():
        recording = compiled(layer, x)
    with torch.no_grad():
        layer.weight.add_(1.0)
    for _ in range(2):
        torch.testing.assert_close(recording.replay([x]), layer(x))
    assert recording.run is not recording.uncompiled
