"""Whether two versions of canter compute the same numbers: trains small runs under both and compares every tensor.

Each run is three iterations of PPO on a noisy environment: every kind of policy, and every extension. Parameters,
optimizers, statistics, random streams and the rollout are compared bit for bit.

    python benchmarks/same_numbers.py OLD/src NEW/src
    python benchmarks/same_numbers.py OLD/src NEW/src --execution auto --only lstm
"""

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

EXECUTIONS = ("eager", "auto")


def noise_env(space, action_space, extras=None, has_invalid_steps=False):
    """Random observations, rewards and episode ends that ignore the actions."""
    import torch
    from gymnasium import spaces

    from canter.envs.vec_env import StepRecord, VecEnv

    class NoiseEnv(VecEnv):
        num_envs, device = 6, torch.device("cpu")

        def __init__(self):
            self.obs_space = space
            self.critic_obs_space = spaces.Box(-9, 9, (5,)) if isinstance(space, spaces.Box) else space
            if isinstance(space, spaces.Box) and len(space.shape) > 1:
                self.critic_obs_space = space
            self.action_space, self.has_invalid_steps = action_space, has_invalid_steps
            self.obs_segments = {"pos": (2,), "vel": (1,)} if space.shape == (3,) else None
            self.critic_obs_segments = {"pos": (2,), "vel": (1,), "push": (2,)} if space.shape == (3,) else None
            self.generator = torch.Generator().manual_seed(1)
            self.was_done = torch.zeros(6, dtype=torch.bool)
            self.current = self.draw()

        def sample(self, space):
            if isinstance(space, spaces.Dict):
                return {name: self.sample(part) for name, part in space.spaces.items()}
            if space.dtype.kind == "u":
                return torch.randint(0, 255, (6, *space.shape), generator=self.generator, dtype=torch.uint8)
            return 2.0 * torch.randn(6, *space.shape, generator=self.generator) + 0.5

        def draw(self):
            obs = self.sample(self.obs_space)
            return obs, obs if self.critic_obs_space is self.obs_space else self.sample(self.critic_obs_space)

        def reset(self):
            return self.current

        def get_observations(self):
            return self.current

        def step(self, actions):
            reward = torch.randn(6, generator=self.generator)
            draws = torch.rand(2, 6, generator=self.generator)
            done, is_timeout, valid = draws[0] < 0.25, draws[1] < 0.5, torch.ones(6, dtype=torch.bool)
            self.current, final = self.draw(), self.draw()
            if self.has_invalid_steps:
                valid = ~self.was_done
                done, reward = done & valid, reward * valid
                self.was_done, final = done, self.current
            if not done.any():
                final = (None, None)
            more = extras(self.generator) if extras else {}
            return StepRecord(*self.current, reward, done & ~is_timeout, done & is_timeout, *final, valid, more)

    return NoiseEnv()


def cases():
    """Name -> a function that gives the environment and the training dict."""
    import numpy as np
    import torch
    from gymnasium import spaces

    vector, reach = spaces.Box(-9, 9, (3,)), spaces.Box(-2.0, 2.0, (2,))
    nested = spaces.Dict({"joints": spaces.Box(-9, 9, (2,)), "base": spaces.Dict({"vel": vector})})
    image = spaces.Dict({"camera": spaces.Box(0, 255, (3, 24, 24), np.uint8), "joints": spaces.Box(-9, 9, (2,))})
    small = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
    mlp = {"class_name": "ActorCritic", **small}
    lstm = {"class_name": "ActorCriticRecurrent", **small, "rnn_hidden_size": 6}
    ppo = {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 3, "schedule": "adaptive"}
    ppo |= {"learning_rate": 1e-3, "desired_kl": 0.01, "entropy_coef": 0.01}
    norm = {"empirical_normalization": True, "normalize_rewards": True}
    mirror = {"pos": [1, -1], "vel": [-1]}
    symmetry = {"obs": mirror, "critic_obs": {**mirror, "push": [1, -1]}, "actions": [1, -1], "mirror_loss_coef": 0.1}
    rnd = {"weight": 0.3, "state_normalization": True, "reward_normalization": True, "predictor_hidden_dims": [8]}
    rnd |= {"target_hidden_dims": [8], "weight_schedule": {"mode": "linear", "initial_step": 0, "final_step": 9}}
    rnd["weight_schedule"]["final_value"] = 0.1
    teacher = {"class_name": "ActorCritic", "num_actor_obs": 5, "num_critic_obs": 5, "num_actions": 2, **small}
    tppo = {"class_name": "TPPO", "teacher_policy": teacher, "teacher_act_prob": 0.5}
    recurrent_teacher = {**teacher, "class_name": "ActorCriticRecurrent", "rnn_hidden_size": 5}
    disc = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [8], "task_reward_lerp": 0.5}
    amp = {**mlp, "class_name": "AmpActorCritic", "amp_discriminator": disc}
    appo = {"class_name": "APPO", "discriminator_learning_rate": 1e-3}
    state = {**mlp, "class_name": "StateAc", "estimator_target_components": ["vel"]}
    state["estimator_obs_components"], state["estimator_kwargs"] = ["pos"], {"hidden_sizes": [8]}

    def motion(generator):
        ref_obs, final, clip = torch.randn(3, 6, 4, generator=generator)
        return {"observations": {"ref_obs": ref_obs}, "final_observation": {"ref_obs": final}, "ref_motion": clip}

    def run(policy, space=vector, actions=reach, extras=None, invalid=False, **algorithm):
        algorithm = {**ppo, **algorithm}
        return lambda: (noise_env(space, actions, extras, invalid), {"policy": policy, "algorithm": algorithm})

    return {
        "mlp": run(mlp),
        "mlp_norm": run(mlp, **norm, value_normalization="popart"),
        "mlp_invalid": run(mlp, invalid=True, **norm),
        "mlp_none": run(mlp, timeout_bootstrap="none", normalize_advantage_per_mini_batch=True),
        "mlp_current": run(mlp, timeout_bootstrap="current_value", use_clipped_value_loss=False),
        "mlp_sgd_groups": run(mlp, optimizer_class_name="SGD", parameter_groups={"critic": {"lr": 1e-2}}),
        "mlp_separate": run(mlp, clip_grads_separately=True, target_kl=0.001, clip_min_std=0.99, clip_max_std=1.0),
        "lstm": run(lstm, **norm),
        "lstm_invalid": run(lstm, invalid=True),
        "gru": run({**lstm, "rnn_type": "gru"}),
        "discrete": run(mlp, actions=spaces.Discrete(4)),
        "multi_discrete": run(mlp, actions=spaces.MultiDiscrete([3, 2])),
        "squashed": run({**mlp, "squash_actions": True}),
        "beta": run({**mlp, "action_distribution": "beta"}),
        "dict": run({}, nested, **norm),
        "image": run({}, image),
        "rnd": run(mlp, rnd_cfg=rnd),
        "rnd_lstm": run(lstm, rnd_cfg=rnd, **norm),
        "symmetry": run(mlp, symmetry_cfg=symmetry, empirical_normalization=True),
        "symmetry_lstm": run(lstm, symmetry_cfg=symmetry),
        "teacher": run(mlp, **tppo, critic_warmup_iterations=1),
        "teacher_lstm": run(lstm, **{**tppo, "teacher_policy": recurrent_teacher}, hidden_state_resample_prob=0.3),
        "teacher_ring": run(mlp, **tppo, buffer_dilation_ratio=2.5, using_ppo=False, distill_target="mse"),
        "teacher_sampled": run(
            mlp,
            **tppo,
            action_labels_from_sample=True,
            lr_scheduler_class_name="StepLR",
            lr_scheduler={"step_size": 1},
            schedule="fixed",
        ),
        "amp": run(amp, extras=motion, **appo, amp_replay_buffer_size=64, mimic_reward_coef=0.1),
        "amp_invalid": run(amp, extras=motion, invalid=True, **appo, **norm),
        "amp_shared": run(amp, extras=motion, **appo, discriminator_optimizer="shared", separate_amp_normalizers=True),
        "atppo": run(amp, extras=motion, **{**appo, **tppo, "class_name": "ATPPO"}, dagger_loss_coef=0.2),
        "estimation": run(state, class_name="EstimatorPPO"),
    }


def train(out, execution, only):
    """Train every case and save its tensors."""
    import torch

    from canter.runners import OnPolicyRunner

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, make in cases().items():
        if only and only not in name:
            continue
        torch.manual_seed(0)
        env, settings = make()
        settings = {**settings, "seed": 3, "num_steps_per_env": 7, "device": "cpu"}
        settings["algorithm"] = {**settings["algorithm"], "execution": execution}
        runner = OnPolicyRunner(env, settings, show_progress=False)
        found = {}

        def keep(runner, _, found=found):
            storage = runner.alg.storage
            getattr(storage, "untie_buffer_loop", bool)()  # rows in the order of time
            rows = {f"rollout {runner.iteration} {name}": value.clone() for name, value in storage.data.items()}
            found.update(rows)

        runner.add_callback("post_rollout", keep)
        history = runner.learn(3 if execution == "eager" else 6).history
        state = {"state": runner.alg.state_dict(), "resume": runner.alg.resume_state()}
        found |= {path: value for path, value in leaves(state) if isinstance(value, torch.Tensor)}
        found |= {
            f"metrics {number} {key}": torch.tensor(float(value))
            for number, metrics in enumerate(history)
            for key, value in metrics.items()
            if not key.startswith(("time/", "perf/"))
        }
        torch.save(found, Path(out) / f"{name}.pt")


def leaves(tree, path=""):
    """Path and value of every leaf of nested dicts and lists."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, part in items:
            yield from leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def compare(old, new, is_verbose):
    """Print for every case what differs, by how much, and what only one version has; the number of cases that do."""
    import torch

    different = 0
    for file in sorted(Path(old).glob("*.pt")):
        other = Path(new) / file.name
        if not other.exists():
            continue
        a, b = torch.load(file), torch.load(other)
        lines = []
        for name in sorted(a.keys() & b.keys()):
            x, y = a[name].double(), b[name].double()
            if x.shape != y.shape:
                lines.append(f"{name}: shape {tuple(x.shape)} and {tuple(y.shape)}")
            elif not torch.equal(x.nan_to_num(1e30), y.nan_to_num(1e30)):
                gap = (x - y).abs().nan_to_num(9e9).max()
                lines.append(f"{name}: differ by {float(gap):.2g} of {float(y.abs().max()):.2g}")
        missing = sorted(a.keys() - b.keys())
        different += bool(lines)
        verdict = f"{len(lines)} of {len(a)} differ" if lines else f"{len(a) - len(missing)} tensors equal"
        print(f"{file.stem:18s} {verdict}{f'; lost: {missing[:6]}' if missing else ''}")
        for line in lines if is_verbose else lines[:4]:
            print(f"    {line}")
    return different


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, help="source folders of the old and the new version")
    parser.add_argument("--execution", choices=EXECUTIONS, default="eager")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--cache", type=Path, help="folder that keeps the old version's numbers for the next comparison"
    )
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.execution, options.only)
        return
    old, new = options.sources
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(options.cache or folder) / f"old_{options.execution}", Path(folder) / "new"]
        for source, out in zip((old, new), folders, strict=True):
            if out.exists() and any(out.iterdir()):
                continue
            out.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, __file__, "--train", str(out), "--execution", options.execution]
            only = ["--only", options.only] if out is folders[1] or not options.cache else []
            environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, *only], env=environment, check=True)
        if options.only:
            for file in folders[0].glob("*.pt"):
                if options.only not in file.stem:
                    (folders[1] / file.name).unlink(missing_ok=True)
        sys.exit(bool(compare(*folders, options.verbose)))


if __name__ == "__main__":
    main()
