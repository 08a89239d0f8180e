"""The guarded optimizer: one learning-rate tensor, groups of their own, skipped steps, states of other files."""

import copy
import math

import pytest
import torch
from torch import nn

from canter.algorithms.optim import OPTIMIZERS, UNFIT, GuardedOptimizer, backward, optimizer_class


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.actor = nn.Linear(3, width)
        self.critic = nn.Linear(3, 2)
        self.std = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.actor(x).sum() + self.critic(x).square().sum() + self.std.sum()


def made(class_name="Adam", learning_rate=0.01, groups=None, width=4):
    torch.manual_seed(0)
    net = Net(width)
    return net, GuardedOptimizer(net, class_name, learning_rate, groups)


def take_step(net, optimizer, scale=1.0, max_grad_norm=math.inf):
    backward(scale * net(torch.ones(5, 3)), optimizer)
    return optimizer.step(max_grad_norm)


def numbers(optimizer):
    """The optimizer's state without the name of its class."""
    return {name: part for name, part in optimizer.state_dict().items() if name != "class_name"}


def plain_twin(class_name, **options):
    torch.manual_seed(0)
    net = Net()
    return net, getattr(torch.optim, class_name)(net.parameters(), **options)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "NAdam"])
def test_steps_are_those_of_the_plain_optimizer(name):
    net, optimizer = made(name)
    twin, plain = plain_twin(name, lr=0.01)
    assert type(optimizer.optimizer) is getattr(torch.optim, name)
    for _ in range(5):
        take_step(net, optimizer)
        plain.zero_grad()
        twin(torch.ones(5, 3)).backward()
        plain.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, torch.zeros_like(ours))


@pytest.mark.parametrize("class_name", ["Adam", "NAdam"])  # with parameters in one vector, and each for itself
@pytest.mark.parametrize("groups", [None, {"actor": {"lr": 0.1}}])
def test_what_is_separately_clipped_uses_up_nobody_elses_norm(class_name, groups):
    torch.manual_seed(0)
    net = Net()
    optimizer = GuardedOptimizer(net, class_name, 0.01, groups, ["critic"])
    assert [p.shape for p in optimizer.separate] == [(2, 3), (2,)]

    def clipped(scale, largest):
        loss = net.actor(torch.ones(5, 3)).sum() + net.std.sum() + scale * net.critic(torch.ones(5, 3)).sum()
        backward(loss, optimizer)
        norm, skipped = optimizer.step(largest)
        sizes = [
            sum(p.grad.square().sum() for p in part).sqrt()
            for part in ([*net.actor.parameters(), net.std], list(net.critic.parameters()))
        ]
        return float(norm), [float(size) for size in sizes], float(skipped)

    plain, (others, own), _ = clipped(1.0, math.inf)
    assert others == pytest.approx(plain)
    for scale in (1.0, 1e4):
        norm, sizes, skipped = clipped(scale, 0.5)
        assert norm == pytest.approx(plain)
        assert sizes == pytest.approx([0.5, 0.5], rel=1e-4)
        assert not skipped
    norm, sizes, _ = clipped(1.0, 2 * max(others, own))
    assert sizes == pytest.approx([others, own])
    assert clipped(math.nan, 0.5)[2] == 1.0


def test_names_are_found_in_any_case_and_misspelt_ones_get_a_suggestion():
    assert optimizer_class("adamw") is optimizer_class("AdamW") is torch.optim.AdamW
    with pytest.raises(ValueError, match=r"'adam'"):
        optimizer_class("Adm")
    with pytest.raises(ValueError, match="'xyz'.* adam"):
        optimizer_class("xyz")


@pytest.mark.parametrize(
    ("name", "why"), [("muon", "only matrices"), ("LBFGS", "several times"), ("SparseAdam", "sparse")]
)
def test_optimizers_that_cannot_train_a_policy_say_why(name, why):
    with pytest.raises(ValueError, match=f"optimizer '{name}' cannot train a policy: .*{why}.*; use Adam or AdamW"):
        made(name)


def test_gradients_are_scaled_down_to_the_norm_but_never_up():
    for limit, expected in ((0.5, 0.5), (1e6, None)):
        net, optimizer = made()
        backward(net(torch.ones(5, 3)), optimizer)
        norm, _ = optimizer.step(limit)
        clipped = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        assert norm > 5
        assert clipped == pytest.approx(expected or float(norm), rel=1e-4)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_the_learning_rate_is_the_tensor(name):
    net, optimizer = made(name)
    take_step(net, optimizer)
    optimizer.lr.fill_(0.0)
    before = copy.deepcopy(net.state_dict())
    take_step(net, optimizer)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    optimizer.lr.fill_(0.5)
    take_step(net, optimizer)
    assert not torch.equal(net.std, before["std"])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_no_bit(name, bad):
    net, optimizer = made(name)
    take_step(net, optimizer)
    before, moments = copy.deepcopy(net.state_dict()), copy.deepcopy(numbers(optimizer))
    _, skipped = take_step(net, optimizer, scale=bad)
    assert skipped == 1.0
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    torch.testing.assert_close(numbers(optimizer), moments, rtol=0, atol=0)
    _, skipped = take_step(net, optimizer)  # and the next one is taken as usual
    assert skipped == 0.0
    assert not torch.equal(net.std, before["std"])


def test_a_module_that_let_go_of_its_gradients_still_learns():
    net, optimizer = made()
    net.zero_grad()  # sets them to None
    before = net.actor.weight.detach().clone()
    norm, _ = take_step(net, optimizer)
    assert norm > 0
    assert not torch.equal(net.actor.weight, before)


def test_what_the_loss_does_not_depend_on_gets_no_gradient_of_an_earlier_step():
    for name in ("Adam", "SGD"):
        net, optimizer = made(name, learning_rate=0.0)
        take_step(net, optimizer)
        backward(net.std.sum(), optimizer)
        assert float(optimizer.step(math.inf)[0]) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_parameter_frozen_in_mid_run_stays(name):
    net, optimizer = made(name, learning_rate=0.1)
    take_step(net, optimizer)
    net.actor.weight.requires_grad_(False)
    before, std = net.actor.weight.clone(), net.std.detach().clone()
    take_step(net, optimizer)
    assert torch.equal(net.actor.weight, before)
    assert not torch.equal(net.std, std)


def test_one_pass_back_serves_several_optimizers():
    (net, first), (other, second) = made(), made("SGD")
    backward(net(torch.ones(5, 3)) + 3 * other(torch.ones(5, 3)), first, second)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(3 * ours.grad, theirs.grad)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_parameters_that_share_a_gradient_are_clipped_once(name):
    net, optimizer = made(name)
    backward(((net.std + net.critic.bias) * torch.tensor([3.0, 4.0])).sum(), optimizer)
    assert float(optimizer.step(1.0)[0]) == pytest.approx(math.sqrt(50))
    for parameter in (net.std, net.critic.bias):
        assert parameter.grad.norm().item() == pytest.approx(math.sqrt(0.5), rel=1e-4)


GROUPS = {"critic": {"lr": 0.5, "weight_decay": 0.1}, "std": {"weight_decay": 0.2}}


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_a_group_with_its_own_rate_keeps_it(name):
    net, optimizer = made(name, groups=GROUPS)
    critic, std, rest = optimizer.optimizer.param_groups
    optimizer.lr.fill_(0.25)
    take_step(net, optimizer)
    assert [float(group["lr"]) for group in (critic, std, rest)] == [0.5, 0.25, 0.25]
    assert [group["weight_decay"] for group in (critic, std, rest)] == [0.1, 0.2, 0.0]
    assert optimizer.sizes == [[(2, 3), (2,)], [(2,)], [(4, 3), (4,)]]


def test_weight_decay_shrinks_only_its_group():
    net, optimizer = made(
        "AdamW", learning_rate=0.1, groups={"std": {"weight_decay": 0.5}, "critic": {"weight_decay": 0.0}}
    )
    twin, plain = plain_twin("AdamW", lr=0.1, weight_decay=0.0)
    take_step(net, optimizer)
    twin(torch.ones(5, 3)).backward()
    plain.step()
    torch.testing.assert_close(net.critic.weight, twin.critic.weight)
    torch.testing.assert_close(net.std, twin.std - 0.1 * 0.5 * 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"learning_rate": 1e-3},
            "'lr'",
        ),
        ({"weight_decai": 0.1}, "'weight_decay'"),
        ({"momentum": 0.9}, "'momentum'.* lr"),
    ],
)
def test_an_option_of_a_group_that_the_optimizer_lacks_is_an_error_with_those_it_has(options, message):
    with pytest.raises(ValueError, match=message):
        GuardedOptimizer(nn.Sequential(nn.Linear(2, 2)), "Adam", 1e-3, {"0": options})


def test_a_group_that_is_no_dict_is_an_error_with_an_example():
    with pytest.raises(TypeError, match=r"parameter_groups\['0'\] must be a dict such as {'lr': 1e-4}, got 0.1"):
        GuardedOptimizer(nn.Sequential(nn.Linear(2, 2)), "Adam", 1e-3, {"0": 0.1})  # type: ignore[dict-item]


def test_a_prefix_that_names_nothing_is_an_error():
    with pytest.raises(ValueError, match="no parameter name starts with 'crtic'; the policy has actor, critic, std"):
        made(groups={"crtic": {"lr": 1.0}})
    with pytest.raises(ValueError, match="starts with 'act'"):  # a prefix is a whole name, not the start of one
        made(groups={"act": {"lr": 1.0}})


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - UNFIT.keys()))
def test_a_restored_optimizer_continues_bit_for_bit(name):
    groups = {part: options for part, options in GROUPS.items() if name != "rprop" or "weight_decay" not in options}
    net, optimizer = made(name, groups=groups)
    for _ in range(3):
        take_step(net, optimizer)
    optimizer.lr.fill_(3.3e-4)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    other, restored = made(name, groups=groups)
    rate = restored.lr
    other.load_state_dict(saved[0])
    restored.check_state(saved[1])
    restored.load_state_dict(saved[1])
    assert restored.lr is rate  # the tensor that a captured graph knows
    assert float(rate) == pytest.approx(3.3e-4)
    if restored.has_tensor_rate:
        assert restored.optimizer.param_groups[1]["lr"] is restored.optimizer.param_groups[2]["lr"] is rate
    for _ in range(2):
        take_step(net, optimizer)
        take_step(other, restored)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(numbers(optimizer), numbers(restored), rtol=0, atol=0)


@pytest.mark.parametrize(("saved", "name"), [("SGD", "Adam"), ("Adam", "RMSprop"), ("AdamW", "Adam")])
def test_the_state_of_another_optimizer_is_refused_with_its_name(saved, name):
    message = f"is of {saved}, this one is {name}: set optimizer_class_name='{saved}', or .*load_optimizer=False"
    with pytest.raises(ValueError, match=message):
        made(name)[1].check_state(made(saved)[1].state_dict())


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_an_assigned_rate_is_saved_before_it_is_used(name):
    _, optimizer = made(name)
    optimizer.param_groups[0]["lr"] = 0.5
    _, restored = made(name)
    restored.load_state_dict(optimizer.state_dict())
    assert float(restored.lr) == 0.5


def test_the_state_of_a_plain_optimizer_is_taken_over():
    """As other libraries write it: per parameter, a float rate, not fused, an integer step count."""
    twin, plain = plain_twin("Adam", lr=0.02)
    twin(torch.ones(5, 3)).backward()
    plain.step()
    state = plain.state_dict()
    for moments in state["state"].values():
        moments["step"] = 1
    net, optimizer = made("Adam")
    net.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(state)
    assert float(optimizer.lr) == pytest.approx(0.02)
    take_step(net, optimizer)
    plain.zero_grad()
    twin(torch.ones(5, 3)).backward()
    for moments in plain.state.values():
        moments["step"] = torch.tensor(1.0)
    plain.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_state_of_other_parameters_is_refused_before_anything_changes():
    (wide, other), (net, optimizer) = made(width=5), made()
    take_step(wide, other)
    take_step(net, optimizer)
    before = copy.deepcopy(numbers(optimizer))
    with pytest.raises(RuntimeError, match=r"'exp_avg' of parameter 1 has shape \(5, 3\), this one needs \(4, 3\)"):
        optimizer.check_state(other.state_dict())
    with pytest.raises(RuntimeError, match=r"groups of sizes \[2, 1, 2\], this one has \[5\]"):
        optimizer.check_state(made(groups=GROUPS)[1].state_dict())
    torch.testing.assert_close(numbers(optimizer), before, rtol=0, atol=0)


def test_without_trainable_parameters_an_optimizer_has_a_rate_and_a_state():
    layer = nn.Linear(2, 1).requires_grad_(False)
    optimizer = GuardedOptimizer(layer, "Adam", 0.1)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.take_assigned_rates()
    assert float(optimizer.lr) == pytest.approx(0.2)
    GuardedOptimizer(layer, "Adam", 0.1).load_state_dict(optimizer.state_dict())
    assert optimizer.parameters == []


@pytest.mark.parametrize("class_name", ["Adam", "SGD"])
def test_a_parameter_whose_data_was_assigned_is_trained_there_and_the_old_data_stays(class_name):
    (net, optimizer), (same, same_optimizer) = made(class_name=class_name), made(class_name=class_name)
    take_step(net, optimizer)
    take_step(same, same_optimizer)
    pairs = list(zip(net.parameters(), same.parameters(), strict=True))
    kept = [(mine.data, mine.data.clone()) for mine, _ in pairs]
    for mine, theirs in pairs:
        mine.data = 0.5 * mine.data
        with torch.no_grad():
            theirs.mul_(0.5)
    for _ in range(2):
        take_step(net, optimizer)
        take_step(same, same_optimizer)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert all(torch.equal(data, before) for data, before in kept)


def test_moments_that_decayed_to_nearly_zero_are_dropped_and_no_parameter_moves():
    net, optimizer = made()
    take_step(net, optimizer)
    moments = optimizer.optimizer.state[optimizer.flats[0].vector]
    denormal, tiny, small = 1e-40, 1e-31, 1e-29
    moments["exp_avg"][:4] = torch.tensor([denormal, -tiny, -small, math.nan])
    before = [parameter.clone() for parameter in net.parameters()]
    count = moments["step"].clone()
    optimizer.drop_tiny_moments()
    assert moments["exp_avg"][:2].tolist() == [0.0, 0.0]
    assert moments["exp_avg"][2] == torch.tensor(-small)
    assert moments["exp_avg"][3].isnan()
    assert (moments["exp_avg"][4:] != 0).any()
    assert torch.equal(moments["step"], count)
    assert all(map(torch.equal, before, net.parameters()))


def test_parameters_of_two_dtypes_keep_theirs():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = GuardedOptimizer(module, "Adam", 0.1)
    loss = module[1](module[0](torch.ones(1, 2)).double()).sum()
    backward(loss, optimizer)
    optimizer.step(1.0)
    assert [p.dtype for p in module.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
    assert all((p - old).abs().max() > 0.09 for p, old in zip(module.parameters(), before, strict=True))


def test_a_lazy_layer_without_a_shape_is_named():
    with pytest.raises(ValueError, match="parameter '1.weight' has no shape yet; call the lazy layer once"):
        GuardedOptimizer(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "Adam", 0.1)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"lr": math.nan}, {"weight_decay": -1}, {"betas": [0.9, 1.5]}])
def test_values_of_a_parameter_group_that_torch_refuses_are_refused_by_name(options):
    with pytest.raises(ValueError, match=r"parameter_groups\['0'\]: Invalid"):
        GuardedOptimizer(nn.Sequential(nn.Linear(1, 1)), "Adam", 1e-3, {"0": options})
