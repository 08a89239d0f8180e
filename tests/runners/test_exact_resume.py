"""2N iterations are, bit for bit, N iterations, a checkpoint, a new process and N iterations, metrics included."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from canter.utils.checkpoint import save_checkpoint
from canter.utils.runtime import seed_everything

HALF = 2
HALFWAY = f"model_{HALF}.pt"
CASES = ["mlp", "mlp_adaptive", "mlp_sgd", "mlp_rmsprop", "lstm", "gru"]
# Said about the run, and never read back: torch's optimizer takes its rate from its own group.
INFORMATION = ("format_version", "learning_rate", "infos", "config", "environment")
# What a checkpoint holds besides; every entry is needed by itself.
ITEMS = [
    "iter",
    "total_timesteps",
    "model_state_dict.actor",
    "model_state_dict.critic",
    "model_state_dict.memory_a",
    "model_state_dict.memory_c",
    "model_state_dict.std",
    "model_state_dict.obs_normalizer._mean",
    "model_state_dict.obs_normalizer._var",
    "model_state_dict.obs_normalizer._std",
    "model_state_dict.obs_normalizer.count",
    "model_state_dict.critic_obs_normalizer",
    "optimizer_state_dict.state",
    "optimizer_state_dict.param_groups",
    "optimizer_state_dict.class_name",
    "return_scaler_state_dict.returns",
    "return_scaler_state_dict.mean",
    "return_scaler_state_dict.var",
    "return_scaler_state_dict.count",
    "rnd_state_dict.steps",
    "rnd_state_dict.predictor",
    "rnd_state_dict.target",
    "rnd_state_dict.state_normalizer",
    "rnd_state_dict.reward_scaler.returns",
    "rnd_state_dict.reward_scaler.mean",
    "rnd_state_dict.reward_scaler.var",
    "rnd_state_dict.reward_scaler.count",
    "rnd_optimizer_state_dict.state",
    "rnd_optimizer_state_dict.param_groups",
    "rnd_optimizer_state_dict.class_name",
    "resume.num_envs",
    "resume.rng.python",
    "resume.rng.numpy",
    "resume.rng.torch",
    "resume.env.state",
    "resume.env.episode_length",
    "resume.env.generator",
    "resume.algorithm.generators.action",
    "resume.algorithm.generators.shuffle",
    "resume.algorithm.hidden.memory_a",
    "resume.algorithm.hidden.memory_c",
    "resume.runner.obs",
    "resume.runner.critic_obs",
    "resume.runner.components",
    "resume.runner.tracker.cur_reward_sum",
    "resume.runner.tracker.cur_episode_length",
    "resume.runner.tracker.rewbuffer",
    "resume.runner.tracker.lenbuffer",
    "resume.runner.tracker.rframebuffer",
    "resume.runner.tracker.num_episodes",
    "resume.runner.eval_seed",
    "resume.runner.num_evals",
    "resume.runner.executed",
]
# Without it the number of steps is taken to be iterations times steps, which is right unless the number of
# environments changed.
DERIVABLE = {"total_timesteps"}
# The same with a seed, and before the first evaluation; files of earlier versions lack them.
DERIVABLE |= {"resume.runner.eval_seed", "resume.runner.num_evals"}
DERIVABLE |= {"optimizer_state_dict.class_name", "rnd_optimizer_state_dict.class_name"}  # the one of the settings
DERIVABLE |= {"resume.runner.executed"}  # decides when a GPU's functions are compiled


@pytest.fixture(scope="module")
def continued(resume_cases, tmp_path_factory):
    """A directory in which every case was interrupted half-way and continued by one new process."""
    root = tmp_path_factory.mktemp("resume")
    for case in CASES:
        seed_everything(11)
        half = resume_cases.make_runner(case, root / case)
        half.learn(HALF)
        half.close()
        assert half.env.episode_length_buf.min() > 0, "the checkpoint must lie inside an episode"
        seed_everything(11)
        straight = resume_cases.make_runner(case)
        straight.save(root / case / "straight.pt", infos=resume_cases.train(straight, 2 * HALF))
    script = Path(__file__).parent / "resume_cases.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1234"}
    subprocess.run([sys.executable, str(script), str(root)], check=True, env=env, timeout=600)
    return root


@pytest.mark.parametrize("case", CASES)
def test_a_new_process_continues_bit_for_bit(continued, differing, case):
    assert differing(continued / case / "straight.pt", continued / case / "resumed.pt") == []


def test_the_comparison_can_fail(continued, differing):
    assert differing(continued / "mlp" / "straight.pt", continued / "gru" / "straight.pt")
    different = differing(continued / "mlp" / "straight.pt", continued / "mlp" / HALFWAY)
    assert {"iter", "resume.rng.torch", "resume.env.generator"} <= set(different)


def apply(state, path, change):
    """Change the item at a dotted path; states of modules keep flat names, of which the path may be a beginning."""
    top, _, rest = path.partition(".")
    if rest and not any(name.startswith(rest) for name in state[top]):
        return apply(state[top], rest, change)
    container, beginning = (state[top], rest) if rest else (state, top)
    for name in [name for name in container if name == beginning or name.startswith(beginning + ".")]:
        change(container, name)
    return None


def other(value):
    """The same kind of thing, but another one."""
    if torch.is_tensor(value):
        if value.dtype == torch.uint8:  # a generator
            return torch.Generator().manual_seed(99).get_state()
        return value + (1 if value.dtype == torch.int64 else 0.25)
    if isinstance(value, dict):
        return {name: other(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(other(part) for part in value)
    return value if value is None or isinstance(value, bool | str) else value + 1


def changed(container, key):
    if key == "python":
        version, words, gauss = container[key]
        container[key] = [version, [*words[1:-1], words[0], words[-1]], gauss]
    elif key == "class_name":
        container[key] = "SGD"
    elif key == "param_groups":
        container[key] = [{**group, "lr": group["lr"] * 1.5} for group in container[key]]
    else:
        container[key] = other(container[key])


def missing(container, key):
    del container[key]


def test_the_list_of_items_is_the_whole_checkpoint(continued, leaves):
    names = leaves(torch.load(continued / "lstm" / HALFWAY, weights_only=True))
    known = (*ITEMS, *INFORMATION)
    assert [name for name in names if not any(name == item or name.startswith(item + ".") for item in known)] == []
    assert [item for item in known if not any(name == item or name.startswith(item + ".") for name in names)] == []


@pytest.fixture(scope="module")
def continues(continued, resume_cases, differing, tmp_path_factory):
    """Whether a changed checkpoint still gives the uninterrupted run; the reason if it was refused."""
    path = tmp_path_factory.mktemp("changed") / HALFWAY

    def check(item=None, change=None):
        state = torch.load(continued / "lstm" / HALFWAY, weights_only=True)
        if item is not None:
            apply(state, item, change)
        elif change is not None:
            change(state)
        save_checkpoint(path, state)
        seed_everything(77)
        runner = resume_cases.make_runner("lstm")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                runner.load(path)
            except (KeyError, ValueError, RuntimeError) as error:
                return f"refused: {error}"
            runner.save(path, infos=resume_cases.train(runner, HALF))
        return differing(continued / "lstm" / "straight.pt", path) == []

    return check


def test_an_unchanged_checkpoint_continues(continues):
    assert continues() is True


@pytest.mark.parametrize("item", ITEMS)
def test_another_value_of_any_one_item_is_another_run(continues, item):
    assert continues(item, changed) is not True


@pytest.mark.parametrize("item", [item for item in ITEMS if item not in DERIVABLE])
def test_without_any_one_item_the_run_is_refused_or_another(continues, item):
    assert continues(item, missing) is not True


def tensors(state, path=()):
    """The keys that lead to every tensor."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if torch.is_tensor(value):
            yield (*path, key)
        elif isinstance(value, dict | list | tuple):
            yield from tensors(value, (*path, key))


@pytest.mark.slow
def test_every_single_tensor_is_needed(continued, continues):
    needless = []
    for path in tensors(torch.load(continued / "lstm" / HALFWAY, weights_only=True)):

        def change(state, path=path):
            for key in path[:-1]:
                state = state[key]
            state[path[-1]] = other(state[path[-1]])

        if continues(change=change) is True:
            needless.append(path)
    assert [path for path in needless if not is_copy(path)] == []


def is_copy(path):
    """Whether a tensor follows from others, by a layout that is not the runner's to choose."""
    if path[0].endswith("optimizer_state_dict") and path[-1] == "step":
        return path[-2] != 0  # torch repeats the one step count for every parameter
    if path[:3] == ("resume", "env", "state"):
        return path[3] in ("position", "measured", "tracking_error", "CoT")  # shown or measured, then drawn anew
    return path == (
        "rnd_state_dict",
        "state_normalizer._std",
    )  # of `_var`; RND learns from a state before it looks at it
