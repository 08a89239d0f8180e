"""Networks and policies, registered by name in `canter.modules.build`."""

# isort: off
from canter.modules.actor_critic import Actor, ActorCritic, Critic
from canter.modules.actor_critic_field_mutex import ActorCriticClimbMutex, ActorCriticFieldMutex
from canter.modules.actor_critic_mutex import ActorCriticMutex
from canter.modules.actor_critic_recurrent import ActorCriticHiddenState, ActorCriticRecurrent, LstmHiddenState, Memory
from canter.modules.actors import (
    CNNActor,
    CNNCritic,
    CNNDeterministicActor,
    CNNSquashedGaussianActor,
    ConfiguredNetwork,
    ContinuousActor,
    DiscreteActor,
    MLPActor,
    MLPCritic,
    MLPDeterministicActor,
    MLPDiscreteActor,
    MLPSquashedGaussianActor,
)
from canter.modules.all_mixer import EncoderStateAc, EncoderStateAcRecurrent
from canter.modules.amp_discriminator import AMPDiscriminator, AmpActorCritic, AmpActorCriticRecurrent, AmpMixin
from canter.modules.build import NETWORKS, POLICIES, build_actor_critic, register_policy
from canter.modules.conv2d import Conv2dHeadModel, Conv2dModel, HistoryEncoder
from canter.modules.deterministic_policy import DeterministicPolicyMixin
from canter.modules.distributions import (
    ActionDistribution,
    Beta,
    Categorical,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
)
from canter.modules.encoder_actor_critic import (
    EncoderActorCritic,
    EncoderActorCriticMixin,
    EncoderActorCriticRecurrent,
    EncoderAmpActorCritic,
    EncoderAmpActorCriticRecurrent,
    register_encoder,
)
from canter.modules.mlp import MlpModel
from canter.modules.normalizer import EmpiricalNormalization, Normalize, Normalizer, RunningMeanStd
from canter.modules.policy import Policy, PolicyOutput
from canter.modules.q_networks import (
    CNNContinuousQNetwork,
    CNNQNetwork,
    ContinuousQNetwork,
    DiscreteQNetwork,
    MLPContinuousQNetwork,
    MLPQNetwork,
)
from canter.compat.models import RslRlModels
from canter.modules.state_adaptor import (
    AdaptorActorHiddenState,
    PrivilegeEstimatorMixin,
    PrivilegeStateAc,
    PrivilegeStateAcRecurrent,
)
from canter.modules.state_estimator import (
    Estimate,
    EstimatorActorHiddenState,
    EstimatorMixin,
    StateAc,
    StateAcRecurrent,
)
from canter.modules.utils import conv2d_output_shape, get_activation_Cls
from canter.modules.visual_actor_critic import (
    VisualActorCritic,
    VisualActorCriticMixin,
    VisualActorCriticRecurrent,
    VisualDeterministicAC,
    VisualDeterministicRecurrent,
)
# isort: on

__all__ = [
    "NETWORKS",
    "POLICIES",
    "AMPDiscriminator",
    "ActionDistribution",
    "Actor",
    "ActorCritic",
    "ActorCriticClimbMutex",
    "ActorCriticFieldMutex",
    "ActorCriticHiddenState",
    "ActorCriticMutex",
    "ActorCriticRecurrent",
    "AdaptorActorHiddenState",
    "AmpActorCritic",
    "AmpActorCriticRecurrent",
    "AmpMixin",
    "Beta",
    "CNNActor",
    "CNNContinuousQNetwork",
    "CNNCritic",
    "CNNDeterministicActor",
    "CNNQNetwork",
    "CNNSquashedGaussianActor",
    "Categorical",
    "ContinuousActor",
    "ContinuousQNetwork",
    "Conv2dHeadModel",
    "Conv2dModel",
    "Critic",
    "DeterministicPolicyMixin",
    "DiscreteActor",
    "DiscreteQNetwork",
    "EmpiricalNormalization",
    "EncoderActorCritic",
    "EncoderActorCriticMixin",
    "EncoderActorCriticRecurrent",
    "EncoderAmpActorCritic",
    "EncoderAmpActorCriticRecurrent",
    "EncoderStateAc",
    "EncoderStateAcRecurrent",
    "Estimate",
    "EstimatorActorHiddenState",
    "EstimatorMixin",
    "Gaussian",
    "HistoryEncoder",
    "LstmHiddenState",
    "MLPActor",
    "MLPContinuousQNetwork",
    "MLPCritic",
    "MLPDeterministicActor",
    "MLPDiscreteActor",
    "MLPQNetwork",
    "MLPSquashedGaussianActor",
    "Memory",
    "MlpModel",
    "MultiCategorical",
    "Normalize",
    "Normalizer",
    "Policy",
    "PolicyOutput",
    "PrivilegeEstimatorMixin",
    "PrivilegeStateAc",
    "PrivilegeStateAcRecurrent",
    "RslRlModels",
    "RunningMeanStd",
    "SquashedGaussian",
    "StateAc",
    "StateAcRecurrent",
    "VisualActorCritic",
    "VisualActorCriticMixin",
    "VisualActorCriticRecurrent",
    "VisualDeterministicAC",
    "VisualDeterministicRecurrent",
    "build_actor_critic",
    "conv2d_output_shape",
    "get_activation_Cls",
    "register_encoder",
    "register_policy",
]

# Configurations name every policy but the mixins, and every network with default settings.
for _name in __all__:
    _class = globals()[_name]
    if not isinstance(_class, type):
        continue
    if issubclass(_class, Policy) and _class is not Policy and not _name.endswith("Mixin"):
        register_policy(_class)
    elif issubclass(_class, ConfiguredNetwork) and _class.defaults is not None:
        NETWORKS[_name] = _class
