"""Runners: the training loop around an algorithm and its environments."""

from canter.compat.mjlab_runner import MjlabRunner
from canter.runners.amp_policy_runner import AmpPolicyRunner
from canter.runners.check_policy import PolicyReport, check_policy
from canter.runners.dagger_saver import DaggerSaver
from canter.runners.demonstration import DemonstrationSaver
from canter.runners.off_policy_runner import OffPolicyRunner
from canter.runners.on_policy_runner import OnPolicyRunner
from canter.runners.run_log import LearnResult, StopTraining, TrialPruned, log_histograms
from canter.runners.runner import Runner
from canter.runners.two_stage_runner import TwoStageRunner
from canter.utils.config import build

DistillationRunner = OnPolicyRunner
"""Another name of the runner, for training dicts whose algorithm is Distillation."""
CLASSES = (AmpPolicyRunner, MjlabRunner, OffPolicyRunner, OnPolicyRunner, TwoStageRunner)
RUNNERS: dict[str, type] = {cls.__name__: cls for cls in CLASSES} | {"DistillationRunner": DistillationRunner}


def build_runner(name: str, *args: object, **kwargs: object) -> Runner:
    """Build a runner by the name of its class."""
    return build(RUNNERS, name, kwargs, *args)


__all__ = [
    "RUNNERS",
    "AmpPolicyRunner",
    "DaggerSaver",
    "DemonstrationSaver",
    "DistillationRunner",
    "LearnResult",
    "MjlabRunner",
    "OffPolicyRunner",
    "OnPolicyRunner",
    "PolicyReport",
    "Runner",
    "StopTraining",
    "TrialPruned",
    "TwoStageRunner",
    "build_runner",
    "check_policy",
    "log_histograms",
]
