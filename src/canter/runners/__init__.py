"""Runners: the outer loop around an algorithm and its environments."""

from canter.runners.off_policy_runner import OffPolicyRunner
from canter.runners.on_policy_runner import OnPolicyRunner
from canter.runners.runner import LearnResult, Runner
from canter.runners.trials import StopTraining, TrialPruned
from canter.utils.config import build

RUNNERS: dict[str, type] = {"OffPolicyRunner": OffPolicyRunner, "OnPolicyRunner": OnPolicyRunner}


def build_runner(name: str, *args: object, **kwargs: object) -> Runner:
    """A runner by the name of its class."""
    return build(RUNNERS, name, kwargs, *args)


__all__ = [
    "RUNNERS",
    "LearnResult",
    "OffPolicyRunner",
    "OnPolicyRunner",
    "Runner",
    "StopTraining",
    "TrialPruned",
    "build_runner",
]
