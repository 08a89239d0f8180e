import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import types
import warnings
from concurrent.futures import wait
from unittest import mock

import numpy as np
import pytest
import torch

from canter.envs.torch_envs import PointRobot
from canter.runners import OnPolicyRunner
from canter.utils.logging import (
    Backend,
    Logger,
    read_rows,
    redact,
    register_logger,
    sanitize_tag,
)
from canter.utils.logging.backends import BACKENDS


class Recorder(Backend):
    """Records every call."""

    def __init__(self, log_dir, **kwargs):
        super().__init__(log_dir)
        self.kwargs, self.rows, self.config, self.files, self.models, self.closed = kwargs, [], None, [], [], 0
        self.media = []

    def log_scalars(self, scalars, step):
        self.rows.append((step, dict(scalars)))

    def log_config(self, config):
        self.config = config

    def log_histogram(self, tag, values, step):
        self.media.append((tag, values.tolist(), step))

    def log_image(self, tag, image, step):
        self.media.append((tag, image.shape, step))

    def log_video(self, tag, frames, step, fps):
        self.media.append((tag, frames.shape, step, fps))

    def save_file(self, path):
        self.files.append(path)

    def save_model(self, path, it):
        self.models.append((path, it))

    def close(self):
        self.closed += 1


class Other(Recorder):
    pass


@pytest.fixture(autouse=True)
def registered():
    with mock.patch.dict(BACKENDS):
        register_logger("recorder", Recorder)
        register_logger("other", Other)
        yield


def rows_of(directory):
    return [{k: v for k, v in row.items() if k != "time"} for row in read_rows(directory / "metrics.jsonl")]


# Selection


def fake_module(name, **attributes):
    module = types.ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


class FakeRun:
    def __init__(self, **kwargs):
        self.kwargs, self.logged, self.saved, self.finished = kwargs, [], [], False
        self.config = {}

    def log(self, data, step):
        self.logged.append((step, data))

    def save(self, path, base_path, policy):
        self.saved.append(path)

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_backend_is_chosen_by_name_and_gets_its_settings(tmp_path, monkeypatch, name):
    runs = []

    def init(**kwargs):
        runs.append(FakeRun(**kwargs))
        return runs[-1]

    monkeypatch.setitem(sys.modules, name, fake_module(name, init=init))
    with Logger(name, tmp_path, {"project": "dogs", "tags": ["a"]}) as logger:
        logger.log_scalars({"train/x": 1.0}, 10)
        logger.log_scalars({"train/x": 2.0}, 5)  # an older step would be dropped by the service
        logger.add_scalar("train/x", 3.0, 20)
        logger.save_file(tmp_path / "git.diff")
    run = runs[0]
    assert run.kwargs["project"] == "dogs"
    assert run.kwargs["tags"] == ["a"]
    assert run.logged == [(10, {"train/x": 1.0}), (10, {"train/x": 2.0}), (20, {"train/x": 3.0})]
    assert run.saved == [str(tmp_path / "git.diff")]
    assert run.finished


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'pip install "canter\[{name}\]"'):
        Logger(name, tmp_path)


def test_missing_package_in_a_list_is_skipped_with_a_warning_unless_none_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.warns(UserWarning, match=r"canter\[wandb\]"):
        logger = Logger(["wandb", "recorder"], tmp_path)
    assert list(logger.backends) == ["jsonl", "recorder"]
    with pytest.warns(UserWarning, match="skipping"), pytest.raises(ImportError, match="is left: .*wandb.*swanlab"):
        Logger(["wandb", "swanlab"], tmp_path)


def test_unknown_name_lists_the_registered_ones_and_how_to_add_one(tmp_path):
    names = "jsonl, mlflow, other, recorder, swanlab, tensorboard, trackio, wandb"
    with pytest.raises(ValueError, match="'tensorbord'.*'tensorboard'"):
        Logger("tensorbord", tmp_path)
    with pytest.raises(ValueError, match=f"'zzz'.* {names}; .*register_logger"):
        Logger("zzz", tmp_path)


def test_class_that_is_no_backend_is_refused():
    with pytest.raises(TypeError, match="'mine' must be a subclass"):
        register_logger("mine", dict)  # pyright: ignore[reportArgumentType]


class Csv(Backend):
    """A user's backend: one row per scalar in a CSV file."""

    def __init__(self, log_dir, filename="metrics.csv"):
        super().__init__(log_dir)
        self.path = log_dir / filename

    def log_scalars(self, scalars, step):
        with open(self.path, "a") as file:
            file.writelines(f"{step},{tag},{value}\n" for tag, value in scalars.items())


def test_runner_trains_with_a_registered_backend_and_its_settings(tmp_path):
    register_logger("csv", Csv)
    cfg = {
        "num_steps_per_env": 4,
        "logger_backend": "csv",
        "logger_kwargs": {"filename": "run.csv"},
        "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]},
    }
    runner = OnPolicyRunner(PointRobot(2), cfg, log_dir=tmp_path, device="cpu", show_progress=False)
    runner.add_callback("post_update", lambda runner, stats: stats.update({"mine/answer": 42.0}))
    runner.learn(2)
    rows = [line.split(",") for line in (tmp_path / "run.csv").read_text().splitlines()]
    assert [(step, value) for step, tag, value in rows if tag == "mine/answer"] == [("8", "42.0"), ("16", "42.0")]
    assert {"train/policy_loss", "time/fps"} <= {tag for _, tag, _ in rows}
    assert not list(tmp_path.glob("events.*"))
    with pytest.raises(TypeError, match="filname"):
        Logger("csv", tmp_path, {"filname": "run.csv"})


def test_jsonl_is_a_backend_by_name_and_is_opened_once(tmp_path):
    with Logger("jsonl", tmp_path) as logger:
        assert list(logger.backends) == ["jsonl"]
        logger.log_scalars({"a": 1.0}, 1)
    assert rows_of(tmp_path) == [{"a": 1.0, "step": 1}]
    with pytest.raises(TypeError, match="has no setting 'indent'"):
        Logger("jsonl", tmp_path, {"indent": 2})
    with pytest.raises(ValueError, match="jsonl backend needs a log_dir"):
        Logger("jsonl")


def test_backends_of_a_list_get_the_same_scalars(tmp_path):
    logger = Logger(["recorder", "other"], tmp_path)
    logger.log_scalars({"a": 1, "b": torch.tensor(2.5), "c": np.float32(3.0)}, 7)
    want = [(7, {"a": 1.0, "b": 2.5, "c": 3.0})]
    assert logger.backends["recorder"].rows == want
    assert logger.backends["other"].rows == want
    assert rows_of(tmp_path) == [{"a": 1.0, "b": 2.5, "c": 3.0, "step": 7}]


def test_flat_settings_go_to_a_single_backend_and_are_ambiguous_for_two():
    assert Logger("recorder", logger_kwargs={"project": "p"}).backends["recorder"].kwargs == {"project": "p"}
    assert Logger(["recorder"], logger_kwargs={"other": {}}).backends["recorder"].kwargs == {}
    with pytest.raises(ValueError, match="must be nested by name, for example {'other': {'project': 'p'}}"):
        Logger(["recorder", "other"], logger_kwargs={"project": "p"})
    with pytest.raises(ValueError, match="mixes 'project'"):
        Logger(["recorder", "other"], logger_kwargs={"project": "p", "other": {}})


def test_import_of_the_logger_imports_no_backend_package():
    code = (
        "import sys, canter.utils.logging, canter.utils.console, canter.utils.plots\n"
        "print([m for m in ('wandb', 'swanlab', 'trackio', 'mlflow', 'tensorboard', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# What is logged


def test_nonfinite_scalars_are_dropped_and_counted():
    logger = Logger("recorder")
    logger.log_scalars({"a": 1.0, "b": math.nan, "c": math.inf}, 1)
    logger.log_scalars({"a": 2.0, "c": -math.inf}, 2)
    assert logger.backends["recorder"].rows == [
        (1, {"a": 1.0, "logging/nonfinite_dropped": 2.0}),
        (2, {"a": 2.0, "logging/nonfinite_dropped": 3.0}),
    ]


def test_non_numeric_value_is_an_error_with_its_tag():
    logger = Logger("recorder")
    with pytest.raises(TypeError, match="'a'.*'high'"):
        logger.log_scalars({"a": "high"}, 1)
    with pytest.raises(TypeError, match=r"'a' is a tensor of shape \(3,\)"):
        logger.log_scalars({"a": torch.zeros(3)}, 1)


@pytest.mark.parametrize(
    ("tag", "want"),
    [
        ("train/policy_loss", "train/policy_loss"),
        ("Perf/collection time", "Perf/collection_time"),
        ("/robot//height", "robot/height"),
        ("a\nb\x00c", "a_b_c"),
        ("x" * 200, "x" * 128),
        ("", "unnamed"),
        ("step", "step_"),
        ("скорость", "_"),
    ],
)
def test_tags_are_made_safe(tag, want):
    assert sanitize_tag(tag) == want


def test_number_of_different_tags_is_bounded(monkeypatch):
    monkeypatch.setattr("canter.utils.logging.logger._MAX_TAGS", 3)
    logger = Logger("recorder")
    with pytest.warns(UserWarning, match="3 different metric names"):
        logger.log_scalars({f"t{i}": float(i) for i in range(5)}, 1)
    logger.log_scalars({"t1": 9.0, "t7": 9.0}, 2)
    assert logger.backends["recorder"].rows[0][1] == {"t0": 0.0, "t1": 1.0, "t2": 2.0}
    assert logger.backends["recorder"].rows[1][1] == {"t1": 9.0}


def test_secrets_are_redacted_before_any_backend_sees_them(tmp_path):
    config = {
        "lr": 1e-3,
        "wandb": {"api_key": "k1", "project": "p"},
        "list": [{"Password": "k2"}],
        "HF_TOKEN": "k3",
        "client_secret": "k4",
        "token": None,
        "path": tmp_path,
        "activation": torch.nn.ELU,
    }
    logger = Logger("recorder", tmp_path, config=config)
    plain = {
        "lr": 1e-3,
        "wandb": {"api_key": "<redacted>", "project": "p"},
        "list": [{"Password": "<redacted>"}],
        "HF_TOKEN": "<redacted>",
        "client_secret": "<redacted>",
        "token": None,
        "path": str(tmp_path),
        "activation": "torch.nn.modules.activation.ELU",
    }
    assert logger.backends["recorder"].config == plain
    assert json.loads((tmp_path / "config.json").read_text()) == plain
    assert config["HF_TOKEN"] == "k3"


def test_dataclass_config_becomes_a_dict():
    import dataclasses

    @dataclasses.dataclass
    class Settings:
        lr: float = 0.1
        auth_token: str = "x"

    assert redact(Settings()) == {"lr": 0.1, "auth_token": "<redacted>"}


def test_media_files_and_models_reach_the_backends(tmp_path):
    logger = Logger("recorder", tmp_path)
    logger.log_histogram("h", torch.tensor([[1.0, math.nan], [2.0, math.inf]], dtype=torch.bfloat16), 5)
    logger.log_image("i", np.zeros((4, 5, 3), np.uint8), 5)
    logger.log_video("v", torch.zeros(2, 4, 5, 3, dtype=torch.uint8), 6, fps=12)
    logger.save_file(tmp_path / "x")
    logger.save_model(tmp_path / "model_2.pt", 2)
    recorder = logger.backends["recorder"]
    assert recorder.media == [("h", [1.0, 2.0], 5), ("i", (4, 5, 3), 5), ("v", (2, 4, 5, 3), 6, 12)]
    assert recorder.files == [tmp_path / "x"]
    assert recorder.models == [(tmp_path / "model_2.pt", 2)]
    with pytest.raises(ValueError, match=r"\(H, W, 3\) uint8, got \(3, 4, 5\) float64"):
        logger.log_image("i", np.zeros((3, 4, 5)), 5)


# Failures


class Broken(Recorder):
    failing = True

    def log_scalars(self, scalars, step):
        if self.failing:
            raise OSError("No space left on device")
        super().log_scalars(scalars, step)


def test_failing_backend_is_reported_once_counted_and_left_alone_for_a_while(tmp_path):
    register_logger("broken", Broken)
    logger = Logger(["broken", "recorder"], tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for step in range(8):
            logger.log_scalars({"a": 1.0}, step)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "'broken' failed; training goes on: OSError: No space left" in texts[0]
    assert "5 times in a row; it is tried again every 30 s" in texts[1]
    assert logger.failures["broken"] == 5
    assert len(logger.backends["recorder"].rows) == len(rows_of(tmp_path)) == 8


def test_failed_backend_works_again_when_the_cause_is_gone(monkeypatch):
    register_logger("broken", Broken)
    logger = Logger("broken")
    broken = logger.backends["broken"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            logger.log_scalars({"a": 1.0}, step)
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic(): now + 31.0)
    broken.failing = False
    with pytest.warns(UserWarning, match="the logging backend 'broken' works again"):
        logger.log_scalars({"a": 1.0}, 8)
    logger.log_scalars({"a": 1.0}, 9)
    assert [step for step, _ in broken.rows] == [8, 9]


def test_a_call_that_does_not_return_stops_nothing_and_the_backend_comes_back_when_it_does(tmp_path):
    blocked, entered = threading.Event(), []

    class Hangs(Recorder):
        def log_scalars(self, scalars, step):
            entered.append(step)
            if step == 2:
                blocked.wait()
            super().log_scalars(scalars, step)

    register_logger("hangs", Hangs)
    logger = Logger(["hangs", "recorder"], tmp_path)
    hangs = logger.backends["hangs"]
    logger.log_scalars({"a": 1.0}, 1)
    hangs.timeout = 0.05
    with pytest.warns(UserWarning, match=r"'hangs' failed; training goes on without it .*: Hangs has not returned for"):
        logger.log_scalars({"a": 1.0}, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(3, 200):  # without waiting again
            logger.log_scalars({"a": 1.0}, step)
    assert entered == [1, 2]
    assert logger.failures["hangs"] == 1
    blocked.set()
    hangs.timeout = 30.0
    wait([logger._threads["hangs"].result])
    with pytest.warns(UserWarning, match="'hangs' works again"):
        logger.log_scalars({"a": 1.0}, 200)
    assert [step for step, _ in hangs.rows] == [1, 2, 200]
    assert len(logger.backends["recorder"].rows) == len(rows_of(tmp_path)) == 200
    thread = logger._threads["hangs"]
    logger.close()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_backend_that_never_returns_keeps_neither_close_nor_the_process(tmp_path):
    script = (
        "import threading, warnings\n"
        "from canter.utils.logging import Backend, Logger, register_logger\n"
        "class Hangs(Backend):\n"
        "    timeout = 0.05\n"
        "    def log_scalars(self, scalars, step):\n"
        "        threading.Event().wait()\n"
        "register_logger('hangs', Hangs)\n"
        "logger = Logger('hangs', 'run')\n"
        "logger.log_scalars({'a': 1.0}, 1)\n"
        "logger.close()\n"
        "print('closed')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "closed\n"
    assert "'hangs' failed" in done.stderr


def test_failure_to_close_one_backend_still_closes_the_others():
    class Stuck(Recorder):
        def close(self):
            raise RuntimeError("network")

    register_logger("stuck", Stuck)
    logger = Logger(["stuck", "recorder"])
    recorder = logger.backends["recorder"]
    with pytest.warns(UserWarning, match="network"):
        logger.stop()
    logger.close()
    assert recorder.closed == 1


# metrics.jsonl


def test_steps_in_the_file_never_decrease_and_lines_carry_the_time(tmp_path):
    logger = Logger(None, tmp_path)
    for step in (10, 30, 20):
        logger.add_scalar("a", step, step)
    assert [(row["step"], row["a"]) for row in rows_of(tmp_path)] == [(10, 10.0), (30, 30.0), (30, 20.0)]
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["time"] > 1.7e9


def test_resume_drops_the_incomplete_line_and_later_steps_then_appends(tmp_path):
    with Logger(None, tmp_path) as logger:
        for step in (10, 20, 30):
            logger.add_scalar("a", step, step)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"a": 40.0, "st')
    with Logger(None, tmp_path) as logger:
        assert [row["step"] for row in rows_of(tmp_path)] == [10, 20, 30]
        logger.backends["jsonl"].truncate_after(20)
        logger.add_scalar("a", 25, 25)
    assert [row["a"] for row in rows_of(tmp_path)] == [10.0, 20.0, 25.0]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_incomplete_last_line_is_removed_before_the_next_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": 1.0, "step": 1}\n{"a": 2.0, "st')
    Logger(None, tmp_path).add_scalar("a", 3, 3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["a"] for line in lines] == [1.0, 3.0]


def test_truncate_lets_the_same_logger_continue_at_an_earlier_step(tmp_path):
    logger = Logger("recorder", tmp_path)
    logger.add_scalar("a", 1, 50)
    logger.truncate_after(20)
    logger.add_scalar("a", 2, 30)
    assert [row["step"] for row in rows_of(tmp_path)] == [30]
    assert [step for step, _ in logger.backends["recorder"].rows] == [
        50,
        50,
    ]  # cannot delete records, so its step must not decrease


def test_line_cut_by_a_full_disk_is_removed(tmp_path):
    logger = Logger(None, tmp_path)
    logger.add_scalar("a", 1, 1)
    metrics = logger.backends["jsonl"]._file
    whole = metrics._file

    class Cut:
        def __getattr__(self, name):
            return getattr(whole, name)

        def write(self, line):
            return whole.write(line[:10])

    metrics._file = Cut()
    with pytest.warns(UserWarning, match="only a part"):
        logger.add_scalar("a", 2, 2)
    metrics._file = whole
    logger.add_scalar("a", 3, 3)
    assert [json.loads(line)["a"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1.0, 2.0, 3.0]


def test_deleted_run_directory_is_made_again(tmp_path):
    run = tmp_path / "run"
    logger = Logger(None, run)
    logger.add_scalar("a", 1, 1)
    os.remove(run / "metrics.jsonl")
    run.rmdir()
    logger.add_scalar("a", 2, 2)
    assert rows_of(run) == [{"a": 2.0, "step": 2}]


# Real services


def events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_tensorboard_files_read_back(tmp_path):
    with Logger("tensorboard", tmp_path, {"filename_suffix": ".x"}, config={"lr": 0.5, "api_key": "k"}) as logger:
        logger.log_scalars({"train/a": 1.5, "train/b": 2.5}, 24)
        logger.add_scalar("train/a", 3.5, 48)
        logger.log_histogram("weights", torch.arange(10.0), 48)
        logger.log_image("picture", np.full((6, 7, 3), 9, np.uint8), 48)
        logger.log_video("film", np.zeros((3, 6, 7, 3), np.uint8), 48)
    assert next(tmp_path.glob("events.*")).name.endswith(".x")
    read = events(tmp_path)
    assert [(event.step, event.value) for event in read.Scalars("train/a")] == [(24, 1.5), (48, 3.5)]
    assert [event.value for event in read.Scalars("train/b")] == [2.5]
    assert read.Histograms("weights")[0].histogram_value.num == 10
    assert (read.Images("picture")[0].height, read.Images("picture")[0].width) == (6, 7)
    assert read.Images("film")[0].encoded_image_string.startswith(b"GIF89a")
    text = read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"lr": 0.5' in text
    assert '"api_key": "<redacted>"' in text


def test_tensorboard_hides_events_beyond_the_resumed_step(tmp_path):
    with Logger("tensorboard", tmp_path) as logger:
        for step in (10, 20, 30):
            logger.add_scalar("a", step, step)
        logger.truncate_after(20)
        logger.add_scalar("a", 26, 26)
    assert [event.value for event in events(tmp_path).Scalars("a")] == [10.0, 20.0, 26.0]


def test_event_files_of_a_resumed_run_sort_last(tmp_path):
    names = []
    with Logger("tensorboard", tmp_path) as logger:
        for _ in range(12):  # names end in a count, and "10" would sort before "9"
            logger.truncate_after(1)
            names += sorted(path.name for path in tmp_path.glob("events*") if path.name not in names)
    assert names == sorted(names)
    assert len(names) == 13


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE])
def test_tensorboard_fails_in_the_thread_that_logs_and_loses_no_event(tmp_path, limit, recwarn):
    """TensorBoard's own writer prints the traceback of a thread of its own, and is dead afterwards."""
    raised, before = [], resource.getrlimit(limit)
    with pytest.MonkeyPatch.context() as patch, Logger("tensorboard", tmp_path) as logger:
        patch.setattr(threading, "excepthook", raised.append)
        logger.add_scalar("a", 1, 1)
        resource.setrlimit(limit, (64 if limit == resource.RLIMIT_FSIZE else 3, before[1]))
        try:
            logger.add_scalar("a", 2, 2)
            logger.flush()
        finally:
            resource.setrlimit(limit, before)
        logger.add_scalar("a", 3, 3)
    assert raised == []
    assert [event.value for event in events(tmp_path).Scalars("a")] == [1.0, 2.0, 3.0]
    assert [row["a"] for row in rows_of(tmp_path)] == [1.0, 2.0, 3.0]


def test_tensorboard_needs_a_directory():
    with pytest.raises(ValueError, match="needs a log_dir"):
        Logger("tensorboard")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_wandb_offline_writes_a_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "canter.diff").write_text("diff")
    for command in (
        ["init", "-q"],
        ["add", "canter.diff"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm1"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "canter.diff").write_text("diff and a secret")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with Logger("wandb", tmp_path, {"project": "dogs", "save_code": True}, config={"lr": 0.5}) as logger:
            run = logger.backends["wandb"]._run
            logger.log_scalars({"train/a": 1.5}, 24)
            logger.log_histogram("h", torch.arange(10.0), 24)
            logger.log_image("i", np.zeros((8, 8, 3), np.uint8), 24)
            logger.log_video("v", np.zeros((3, 8, 8, 3), np.uint8), 24)
            logger.log_scalars({"train/a": 2.5}, 12)
            logger.save_file(tmp_path / "canter.diff")
            assert run.config["lr"] == 0.5
            assert run.step == 24
    assert not [w for w in caught if "logging backend" in str(w.message)]
    files = next((tmp_path / "wandb").glob("offline-run-*"))
    assert (files / "files" / "canter.diff").read_text() == "diff and a secret"
    assert list(files.glob("files/media/images/*.png"))
    assert list(files.glob("files/media/videos/*.gif"))
    assert not list(files.glob("**/*.patch"))
    record = next(files.glob("run-*.wandb"))
    deadline = time.monotonic() + 30
    while b"train/a" not in record.read_bytes():  # W&B writes from a separate process
        assert time.monotonic() < deadline, "the scalars are not in W&B's record"
        time.sleep(0.2)


def test_swanlab_offline_writes_a_run(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with Logger("swanlab", tmp_path, {"project": "dogs", "mode": "offline"}, config={"lr": 0.5}) as logger:
            logger.log_scalars({"train/a": 1.5}, 24)
            logger.log_image("i", np.zeros((8, 8, 3), np.uint8), 24)
            logger.log_video("v", np.zeros((3, 8, 8, 3), np.uint8), 24)
    assert not [w for w in caught if "logging backend" in str(w.message)]
    run = next((tmp_path / "swanlab").glob("run-*"))
    assert b"train/a" in next(run.glob("*.swanlab")).read_bytes()
    assert list(run.glob("media/image/*.png"))


def log_everything(logger, tmp_path):
    (tmp_path / "bundle.md").write_text("page")
    (tmp_path / "model_3.pt").write_text("weights")
    logger.log_scalars({"train/a": 1.5, "train/b": 0.25}, 24)
    logger.log_scalars({"train/a": 2.5}, 48)
    logger.log_histogram("h", torch.arange(10.0), 48)
    logger.log_image("i", np.zeros((8, 8, 3), np.uint8), 48)
    logger.log_video("film", np.zeros((3, 8, 8, 3), np.uint8), 48)
    logger.save_file(tmp_path / "bundle.md")
    logger.save_model(tmp_path / "model_3.pt", 3)


def test_trackio_writes_a_local_run(tmp_path):
    """In a process of its own: Trackio reads its place when it is imported."""
    pytest.importorskip("trackio")
    script = (
        "import json, sys, warnings\n"
        "from pathlib import Path\n"
        "import trackio\n"
        "from tests.utils.test_logging import Logger, log_everything\n"
        "warnings.simplefilter('error', UserWarning)\n"
        "folder = Path(sys.argv[1])\n"
        "config = {'lr': 0.5, 'api_key': 'k', 'sizes': [64, 64]}\n"
        "with Logger('trackio', folder / 'run', {'project': 'dogs'}, config=config) as logger:\n"
        "    log_everything(logger, folder)\n"
        "run, = trackio.Api().runs('dogs')\n"
        "print(json.dumps(run.config))\n"
        "from trackio.cli import main\n"
        "sys.argv[1:] = 'get metric --project dogs --run run --metric train/a --json'.split()\n"
        "main()\n"
    )
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout[done.stdout.index("{") :]
    config, end = json.JSONDecoder().raw_decode(printed)
    assert (config["lr"], config["api_key"], config["sizes"]) == (0.5, "<redacted>", [64, 64])
    rows = json.loads(printed[end:])["values"]
    assert [(row["step"], row["value"]) for row in rows] == [(24, 1.5), (48, 2.5)]
    kept = {path.suffix for path in (tmp_path / "trackio").rglob("*") if path.is_file()}
    assert {".png", ".gif"} <= kept


def test_mlflow_writes_to_a_local_database(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)  # where the files of runs are stored
    place = {"experiment": "dogs", "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    with Logger("mlflow", tmp_path / "run", place, config={"lr": 0.5, "net": {"sizes": [64, 64]}}) as logger:
        log_everything(logger, tmp_path)
    assert logger.failures["mlflow"] == 0
    client = mlflow.MlflowClient(place["tracking_uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("dogs").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"lr": "0.5", "net.sizes": "[64, 64]"}
    assert [(row.step, row.value) for row in client.get_metric_history(run.info.run_id, "train/a")] == [
        (24, 1.5),
        (48, 2.5),
    ]
    files = [path.name for path in (tmp_path / "mlruns").rglob("*")]
    assert {"film-48.gif", "model_3.pt", "bundle.md", "config.json"} <= set(files)
    with Logger("mlflow", tmp_path / "run", {**place, "run_id": run.info.run_id}, config={"lr": 0.1}) as logger:
        logger.log_scalars({"train/a": 3.5}, 72)  # a run that goes on, with another setting
    assert logger.failures["mlflow"] == 0
    assert client.get_run(run.info.run_id).data.metrics["train/a"] == 3.5
