"""What ranks do in tests; every function is called as `case(directory, rank)` in each of them."""

import functools
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import torch
from gymnasium import spaces

from canter.algorithms.sac import SACConfig
from canter.algorithms.td3 import TD3
from canter.envs.torch_envs import PointRobot
from canter.envs.vec_env import StepRecord, VecEnv
from canter.execution.executor import Executor
from canter.runners import AmpPolicyRunner, OffPolicyRunner, OnPolicyRunner, StopTraining
from canter.runners.run_log import EVENTS
from canter.storage.replay import ReplayBatch
from canter.utils.checkpoint import newest_valid_checkpoint
from canter.utils.distributed import RANKS, RankError, checksum
from canter.utils.files import RunLock

sys.path.append(str(Path(__file__).parents[1] / "runners"))
import resume_cases  # noqa: E402

CPU = torch.device("cpu")


def collectives(directory, rank):
    RANKS.start(CPU)
    a, b = torch.full((3,), float(rank)), torch.tensor(10.0 * rank)
    RANKS.average([a, b])
    rows = torch.arange(12.0).view(6, 2)[: 2 + 2 * rank] + 100.0 * rank  # 2 rows, then 4
    merged = RANKS.merge(torch.tensor(len(rows)), rows.mean(0), rows.var(0, correction=0))
    shared = {"x": torch.full((2, 2), float(rank)).t()}
    RANKS.broadcast(shared)
    return {
        "mean": (a, b),
        "merged": merged,
        "agreed": RANKS.agree(rank * 7),
        "gathered": RANKS.gather({"rank": rank}),
        "first": RANKS.on_first(lambda: f"rank {rank}"),
        "metrics": RANKS.mean_metrics({"a": float(rank)} | ({"b": 3.0} if rank else {})),
        "broadcast": shared["x"],
        "seed": RANKS.seed(5),
    }


def recorded(directory, rank):
    RANKS.start(CPU)
    executor, x = Executor(CPU), torch.zeros(4)

    def step(row):
        x.add_(row)
        RANKS.average([x, x * 0.0])
        return x * 2.0

    results = [executor.run("step", step, torch.full((4,), float(rank + n))).clone() for n in range(8)]
    return {"results": results, "eager_only": executor.eager_only, "graphs": len(executor.graphs)}


NUM_ENVS, NUM_STEPS, NUM_ITERATIONS = 8, 6, 3  # of all ranks together


class Table(VecEnv):
    """Shows the rows of a table, whatever the actions are; a rank has its columns of it."""

    gives_final_obs = False

    def __init__(self):
        self.num_envs = NUM_ENVS // RANKS.size
        self.columns = slice(RANKS.rank * self.num_envs, (RANKS.rank + 1) * self.num_envs)
        self.device, self.t, self.max_episode_length = CPU, 0, None
        self.obs_space, self.critic_obs_space = spaces.Box(-9, 9, (3,)), spaces.Box(-9, 9, (5,))
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        draw = torch.Generator().manual_seed(1)
        rows = NUM_STEPS * NUM_ITERATIONS + 1
        self.table = {
            name: torch.randn(rows, NUM_ENVS, width, generator=draw)
            for name, width in (("obs", 3), ("critic", 5), ("reward", 1), ("end", 2), ("noise", 2), ("policy", 4))
        }
        self.table["obs"][..., 0] += 50.0  # a mean that float32 sums of squares would lose

    def seed(self, seed):
        pass

    def row(self, name):
        return self.table[name][self.t, self.columns]

    def get_observations(self):
        return self.row("obs"), self.row("critic")

    reset = get_observations

    def step(self, actions):
        self.t += 1
        ends = self.row("end") > 1.0
        # With features at an episode's end no row is masked, so that every rank has as many.
        extras = dict.fromkeys(("observations", "final_observation"), {"ref_obs": self.row("policy")})
        extras["ref_motion"] = self.row("policy") * 0.5 + 1.0
        yes = torch.ones(self.num_envs, dtype=torch.bool)
        obs, critic_obs = self.get_observations()
        ended = (ends[:, 0], ends[:, 1] & ~ends[:, 0])
        return StepRecord(obs, critic_obs, self.row("reward")[:, 0], *ended, None, None, yes, extras)


RND = {"weight": 0.5, "num_outputs": 4, "predictor_hidden_dims": [8], "target_hidden_dims": [8]}
RND |= {"state_normalization": True, "reward_normalization": True}
NORMS = {"empirical_normalization": True, "normalize_rewards": True, "value_normalization": "popart"}
POLICY = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
DISCRIMINATOR = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [8]}
KINDS = {
    "mlp": ("ActorCritic", {"class_name": "PPO", **NORMS, "rnd_cfg": RND}, {}),
    "per_minibatch": ("ActorCritic", {"class_name": "PPO", "normalize_advantage_per_mini_batch": True}, {}),
    "lstm": ("ActorCriticRecurrent", {"class_name": "PPO", **NORMS}, {"rnn_type": "lstm", "rnn_hidden_size": 6}),
    "sgd": ("ActorCritic", {"class_name": "PPO", "optimizer_class_name": "SGD"}, {}),
    "amp": ("AmpActorCritic", {"class_name": "APPO"}, {"amp_discriminator": DISCRIMINATOR}),
}


def table_runner(kind, execution="eager", **options):
    """A runner whose data is the same whether one process or several collect it: one minibatch, noise of the table."""
    class_name, algorithm, policy = KINDS[kind]
    algorithm = {"num_learning_epochs": 3, "num_mini_batches": 1, "desired_kl": 1e-3, **algorithm}
    algorithm |= {"schedule": "adaptive"}
    cfg = {"seed": 5, "num_steps_per_env": NUM_STEPS, "algorithm": {**algorithm, "execution": execution}, **options}
    cfg["policy"] = {"class_name": class_name, **POLICY, **policy}
    RANKS.start(CPU)
    env = Table()
    runner = (AmpPolicyRunner if kind == "amp" else OnPolicyRunner)(env, cfg, device="cpu", show_progress=False)
    runner.policy.sample_action = lambda params, generator: params["mu"] + params["sigma"] * env.row("noise")
    return runner


def learned(runner):
    """What a runner learned, without the sums of its own environments."""
    return {**runner.checkpoints.shared_tensors(), "rate": runner.alg.lr}


def table_runs(directory, rank):
    found = {}
    for kind in KINDS:
        runner = table_runner(kind)
        runner.learn(NUM_ITERATIONS)
        found[kind] = learned(runner)
    return found


def twin_critics(directory, rank):
    """Gradient steps of TD3 on halves of one batch; without noise nothing is random."""
    RANKS.start(CPU)
    env = PointRobot(NUM_ENVS // RANKS.size, seed=1)
    alg = TD3(env, seed=5, batch_size=16, target_noise=0.0, actor_hidden_dims=(8,), critic_hidden_dims=(8,))
    runner = OffPolicyRunner(env, agent=alg, show_progress=False)
    runner.checkpoints.compare()
    draw = torch.Generator().manual_seed(1)
    rows = slice(rank * 16 // RANKS.size, (rank + 1) * 16 // RANKS.size)
    for phase in range(4):
        obs, critic_obs, next_obs, next_critic_obs = (torch.randn(16, n, generator=draw)[rows] for n in (6, 9, 6, 9))
        actions, rewards, dones = (torch.rand(*shape, generator=draw)[rows] for shape in ((16, 2), (16,), (16,)))
        fields = {"obs": obs, "critic_obs": critic_obs, "next_obs": next_obs, "next_critic_obs": next_critic_obs}
        fields |= {"actions": actions, "rewards": rewards, "dones": dones.round(), "discounts": 0.99 + 0.0 * rewards}
        batch = ReplayBatch(**{**dict.fromkeys(ReplayBatch._fields), **fields})
        alg.batches = lambda count, batch=batch: iter([batch])
        alg.learn_steps(1, phase)
    return runner.checkpoints.shared_tensors()


def sac_runner(log_dir=None):
    cfg = SACConfig(
        seed=5,
        batch_size=8,
        learning_starts=18,
        save_replay_buffer=True,
        empirical_normalization=True,
        buffer_size=60,
        normalize_rewards=True,
        actor_hidden_dims=(8,),
        critic_hidden_dims=(8,),
        log_interval=12,
        save_interval=0,
    )
    return OffPolicyRunner(PointRobot(3, max_episode_length=7), cfg, log_dir=log_dir, show_progress=False)


def resumable(name, log_dir=None):
    """A runner, and the length of half its run."""
    return (sac_runner(log_dir), 12) if name == "sac" else (resume_cases.make_runner(name, log_dir), 2)


RESUMED = ("mlp", "lstm", "sac")


def train(runner, length):
    """The metrics of a few iterations, but for how long they took, and everything that a checkpoint holds."""
    history = runner.learn(num_learning_iterations=length).history
    metrics = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in history]
    everything = {**runner.alg.state_dict(), "resume": runner.alg.resume_state(), "runner": runner.extra_state()}
    return {"metrics": metrics[-2:], "state": checksum(everything)}


def first_half(directory, rank):
    found = {}
    for name in RESUMED:
        runner, half = resumable(name, directory / name)
        runner.learn(num_learning_iterations=half)
        found[name] = train(runner, half)
        found[name]["steps"] = runner.tot_timesteps
    return found


def second_half(directory, rank, names=RESUMED):
    found = {}
    for name in names:
        runner, half = resumable(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            runner.load(directory / name / f"model_{half}.pt")
        found[name] = train(runner, half)
        found[name] |= {"steps": runner.tot_timesteps, "warnings": [str(warning.message) for warning in caught]}
        found[name]["noise"] = torch.rand(3, generator=runner.alg.generators["action"])
    return found


def second_half_of_sac(directory, rank):
    return second_half(directory, rank, ["sac"])


class Faulty(PointRobot):
    """Calls `fault` in its step number 10."""

    def __init__(self, fault):
        super().__init__(2, max_episode_length=7)
        self.fault, self.num_steps = fault, 0

    def step(self, actions):
        self.num_steps += 1
        if self.num_steps == 10:
            self.fault()
        return super().step(actions)


def fail():
    raise RuntimeError("joint limit of the left knee")


def ask_to_stop():
    raise StopTraining


FAULTS = {
    "stops": ask_to_stop,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(600.0),
    "raises": fail,
    "signalled": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def faulty_run(directory, rank, fault=None, save_dir="run", **cfg):
    """Four iterations of four steps, each saved; rank 1 has a fault in the third."""
    cfg = {"num_steps_per_env": 4, "save_interval": 1, "logger_backend": [], "rank_timeout": 30.0, "seed": 3, **cfg}
    cfg["policy"] = {"class_name": "ActorCritic", **POLICY}
    env = Faulty(FAULTS[fault] if rank == 1 and fault else int)
    runner = OnPolicyRunner(env, cfg, directory / save_dir, "cpu", show_progress=False)
    begin = time.monotonic()
    try:
        runner.learn(4)
    except Exception as error:
        told = getattr(error, "is_reporter", None)
        return {"error": f"{type(error).__name__}: {error}", "is_reporter": told, "seconds": time.monotonic() - begin}
    return {"iteration": runner.iteration}


killed = functools.partial(faulty_run, fault="killed")
hangs = functools.partial(faulty_run, fault="hangs", rank_timeout=2.0)
raises = functools.partial(faulty_run, fault="raises")
stops = functools.partial(faulty_run, fault="stops")
signalled = functools.partial(faulty_run, fault="signalled")
fine = faulty_run


def differs(directory, rank):
    try:
        faulty_run(directory, rank, gamma=0.9 + 0.01 * rank)
    except RankError as error:
        return str(error)


def clocked(directory, rank):
    runner = table_runner("per_minibatch")
    rows = runner.learn(NUM_ITERATIONS).history
    seconds = [row["time/collection"] + row["time/learning"] for row in rows]
    return [row["time/fps"] * second for row, second in zip(rows, seconds, strict=True)]


def small_run(directory, **cfg):
    """A runner that saves every iteration and gives ranks little time."""
    cfg = {"num_steps_per_env": 4, "save_interval": 1, "logger_backend": [], "rank_timeout": 5.0, "seed": 3, **cfg}
    cfg["policy"] = {"class_name": "ActorCritic", **POLICY, **cfg.get("policy", {})}
    return OnPolicyRunner(PointRobot(2, max_episode_length=7), cfg, directory / "run", "cpu", show_progress=False)


def one_stops(directory, rank):
    """One rank alone asks for the end, in every event once."""
    runner, ends = small_run(directory), []
    for event in EVENTS:

        def stop(runner, *stats, event=event):
            if rank == 1 and len(ends) == EVENTS.index(event) and runner.iteration % 5 == 2:
                raise StopTraining

        runner.add_callback(event, stop)
    for _ in EVENTS:
        runner.iteration = 0
        runner.learn(5)
        ends.append(runner.iteration)
    return ends


def other_networks(directory, rank):
    try:
        small_run(directory, policy={"actor_hidden_dims": [8 + rank]})
    except RankError as error:
        return str(error)


def saves_alone(directory, rank):
    """Only the first rank calls `save`."""
    runner = small_run(directory, rank_timeout=2.0)
    runner.add_callback("post_iteration", lambda runner, stats: rank or runner.save(directory / "mine.pt"))
    try:
        runner.learn(2)
    except RankError as error:
        return str(error)


def cannot_list(directory, rank):
    """The list of checkpoints, which the first rank alone writes, cannot be written in iteration 2."""
    runner = small_run(directory, keep_checkpoints=2)

    def block(runner, stats):
        place = directory / "run" / "periodic_checkpoints.json"
        if rank == 0 and runner.iteration == 2:
            place.unlink()
            place.mkdir()
        if rank == 0 and runner.iteration == 3:
            place.rmdir()

    runner.add_callback("post_iteration", block)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        runner.learn(4)
    texts = [str(warning.message) for warning in caught]
    return runner.iteration, [text for text in texts if "no checkpoint could be written" in text]


def drifts(directory, rank):
    runner = table_runner("per_minibatch", save_interval=0)
    runner.learn(1)
    if rank == 1:
        runner.policy.actor[0].weight.data.view(-1)[3] += 1e-7
    try:
        runner.save(directory / "model.pt")
    except RankError as error:
        return str(error)


def locked(directory, rank):
    lock = RunLock(directory / "run") if rank == 0 else None
    found = faulty_run(directory, rank)
    del lock
    return found


def alone(directory, rank):
    """The other rank never starts."""
    if rank == 1:
        return None
    begin = time.monotonic()
    try:
        RANKS.start(CPU, patience=1.0)
    except RankError as error:
        return str(error), time.monotonic() - begin


def port_in_use(directory, rank):
    if rank == 1:
        return None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        try:
            RANKS.start(CPU, patience=1.0)
        except RankError as error:
            return str(error)


def continued(directory, rank):
    """Continue whatever is there until the end, saving often; rank files and all."""
    RANKS.start(CPU, limit=20.0, patience=10.0)
    cfg = {"num_steps_per_env": 4, "save_interval": 1, "logger_backend": [], "rank_timeout": 20.0, "seed": 3}
    cfg |= {"policy": {"class_name": "ActorCritic", **POLICY}, "keep_checkpoints": 3}
    cfg["algorithm"] = {"class_name": "PPO", "num_mini_batches": 2, "schedule": "adaptive", **NORMS}
    runner = OnPolicyRunner(PointRobot(2, max_episode_length=7), cfg, directory / "run", "cpu", show_progress=False)
    has_files = any((directory / "run").glob("model_*.pt"))
    newest = RANKS.on_first(lambda: newest_valid_checkpoint(directory / "run") if has_files else None)
    if newest is not None:
        runner.load(newest)
    begin = runner.iteration
    runner.learn(max(0, 200 - begin))
    return {"begin": begin, "state": checksum({**runner.alg.state_dict(), "resume": runner.alg.resume_state()})}


def killed_while_waited_for(directory, rank):
    """Rank 1 dies while the other waits for work that it does alone."""
    RANKS.start(CPU, limit=2.0)
    has_started = Path(directory) / "started"
    if rank == 1:
        while not has_started.exists():  # a rank that dies earlier is an error of `start`
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    has_started.touch()
    try:
        RANKS.wait()
    except RankError as error:
        return str(error)
