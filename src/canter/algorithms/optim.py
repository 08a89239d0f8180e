"""Optimizers whose learning rate is a device scalar, so that captured code can change it."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from canter.execution.torch_private import address, copy_all, no_function_modes
from canter.utils.config import unknown_name
from canter.utils.distributed import RANKS

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
FUSED = (torch.optim.Adam, torch.optim.AdamW)
TENSOR_RATE = (*FUSED, torch.optim.SGD)
TINY_MOMENT = 1e-30  # 1e-38 is the smallest normal number; times 0.9 per step, it is 170 steps away
SUMMED = {"row_var": -1, "col_var": -2}  # moments of Adafactor that are sums over a dimension
OWN_FLAGS = ("lr", "fused", "foreach", "capturable")
UNFIT = {
    "muon": "it updates only matrices, and a policy has biases and noise parameters too",
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "it takes only sparse gradients",
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim with this name; upper and lower case are the same."""
    if name.lower() not in OPTIMIZERS:
        raise ValueError(unknown_name("optimizer", name, OPTIMIZERS, "torch.optim"))
    if name.lower() in UNFIT:
        raise ValueError(f"optimizer {name!r} cannot train a policy: {UNFIT[name.lower()]}; use Adam or AdamW")
    return OPTIMIZERS[name.lower()]


class GuardedOptimizer(torch.optim.Optimizer):
    """Clips gradients and steps in tensor code; a gradient that is not finite changes nothing and is counted.

    PPO gives it gradients by `backward`. A loop of one's own may use it as an optimizer of torch:
    `zero_grad()`, `loss.backward()`, `step()`, and schedulers of `torch.optim.lr_scheduler`.

    Args:
        module: Its parameters are optimised, unless they are frozen; there may be none.
        class_name: Name of the optimizer in torch.optim.
        learning_rate: First value of the shared rate.
        groups: Options by parameter name prefix; a group with its own `lr` keeps it.
        separate: Prefixes of parameters that only a loss of their own moves: their gradients are clipped by a norm of
            their own and do not use up the norm of the others.
        excluded: Prefixes of parameters that are not optimised.
    """

    def __init__(
        self,
        module: nn.Module,
        class_name: str,
        learning_rate: float,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        separate: Sequence[str] = (),
        excluded: Sequence[str] = (),
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad and not has_prefix(name, excluded)}
        if lazy := [name for name, p in named.items() if isinstance(p, nn.parameter.UninitializedParameter)]:
            way_out = "call the lazy layer once with an example when the policy is made"
            raise ValueError(f"the parameter {lazy[0]!r} has no shape yet; {way_out}")
        self.parameters = list(named.values())
        device = next((t.device for t in (*self.parameters, *module.buffers())), torch.device("cpu"))
        cls: Any = optimizer_class(class_name)
        self.class_name: str = cls.__name__
        self.has_tensor_rate, self.is_fused = issubclass(cls, TENSOR_RATE), issubclass(cls, FUSED)
        self.lr = torch.tensor(float(learning_rate), device=device)
        options: dict[str, Any] = {"fused": True} if self.is_fused else {}
        if self.is_fused and device.type == "cuda":
            options["capturable"] = True
        rate = self.lr if self.has_tensor_rate else float(learning_rate)
        check_options(cls, groups or {})
        members = split_groups(named, groups, device, self.has_tensor_rate)
        self.sizes = [[p.shape for p in group["params"]] for group in members]
        # On a CPU the cost of an optimizer is the number of tensors; on a GPU one kernel takes them all.
        has_one_dtype = all(len({p.dtype for p in group["params"]}) == 1 for group in members)
        is_flat = self.is_fused and device.type == "cpu" and bool(named) and has_one_dtype
        self.flats = [FlatParameters(g["params"]) for g in members] if is_flat else []
        self.separate = [p for name, p in named.items() if has_prefix(name, separate)]
        known = {id(p) for p in self.separate}
        self.others = [p for p in self.parameters if id(p) not in known]
        self.masks = [flat.mask(self.separate) for flat in self.flats]
        for group, flat in zip(members, self.flats, strict=False):
            group["params"] = [flat.vector]
        self.optimizer = cls(members, lr=rate, **options)
        self.shared = [group for group in self.optimizer.param_groups if not group.get("own_rate")]
        self.flags = [{k: g[k] for k in OWN_FLAGS if k in g} for g in self.optimizer.param_groups]
        self.defaults = self.optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The optimizer's groups; a learning rate assigned to one takes effect with the next iteration."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The moments, by parameter or by the vector of all."""
        return self.optimizer.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:  # torch's optimizers copy only their groups and state
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of all parameters."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def take_assigned_rates(self) -> None:
        """Copy learning rates that were assigned to `param_groups` into the tensors that captured code reads."""
        for group, flags in zip(self.optimizer.param_groups, self.flags, strict=True):
            rate, own = group["lr"], flags["lr"]
            if torch.is_tensor(own) and rate is not own:
                own.fill_(float(rate))
                group["lr"] = own
            elif not torch.is_tensor(own) and rate != own:
                flags["lr"] = rate
                if not group.get("own_rate"):
                    self.lr.fill_(rate)

    def take_grads(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of `parameters`, None where the loss does not depend on one."""
        if self.flats:
            given = dict(zip(self.parameters, grads, strict=True))
            for flat in self.flats:
                flat.put_grads([given[parameter] for parameter in flat.parameters])
            return
        taken: set[int] = set()  # two parameters that are added have one gradient, which clipping would scale twice
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is not None:
                grad = grad.clone() if address(grad) in taken else grad.contiguous()
                taken.add(address(grad))
            parameter.grad = grad

    def grads(self) -> list[Tensor]:
        """The gradients that `step` uses."""
        owners = [flat.vector for flat in self.flats] or self.parameters
        return [owner.grad for owner in owners if owner.grad is not None]

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, max_grad_norm: Tensor | float | None = None, paused: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale the gradients down to a norm and step along them, unless one is not finite or `paused` is 1.

        Without a norm the gradients are those that `loss.backward()` left at the parameters, as they are.
        Returns the norm before, without the separately clipped parameters, and 1 if a gradient is not finite, else 0.
        """
        if max_grad_norm is None:
            max_grad_norm = math.inf
            self.take_assigned_rates()
            self.take_grads([parameter.grad for parameter in self.parameters])
        norms = self._clip(max_grad_norm)
        whole = norms[0] if len(norms) == 1 else norms[0] + norms[1]
        whole = whole.float()  # fused optimizers read no double
        not_finite = (whole - whole).ne_(0.0)  # in fewer operations than isfinite takes
        skipped = not_finite if paused is None else torch.maximum(not_finite, paused)
        if not self.has_tensor_rate:
            self._set_number_rates()
        if self.is_fused:
            # A fused optimizer looks at found_inf on the device, as torch.amp.GradScaler does.
            self.optimizer.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
        elif bool(skipped):
            return norms[0], not_finite
        frozen = [(p, p.detach().clone()) for flat in self.flats for p in flat.parameters if not p.requires_grad]
        # The user may still have the memory in the vector, to assign it again: it keeps its values.
        moved = [(p, place, place.clone()) for flat in self.flats for p, place in flat.moved()]
        for parameter, place, _ in moved:
            place.copy_(parameter.data)
        self.optimizer.step()
        for parameter, place, value in moved:
            parameter.data.copy_(place)
            place.copy_(value)
        for parameter, value in frozen:  # which their moments would move on
            parameter.data.copy_(value)
        return norms[0], not_finite

    def _clip(self, max_grad_norm: Tensor | float) -> list[Tensor]:
        """Scale the gradients down to a norm; returns the norms before, of the separately clipped ones the second."""
        grads: list[Any] = [flat.vector.grad for flat in self.flats]
        if not self.flats:
            return [clip_gradients(part, max_grad_norm) for part in (self.others, self.separate) if part]
        if self.separate:
            return clip_apart(grads, self.masks, max_grad_norm)
        norm = torch.linalg.vector_norm(grads[0]) if len(grads) == 1 else total_norm(grads)
        for grad in grads:
            grad.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return [norm]

    @torch.no_grad()
    def drop_tiny_moments(self) -> None:
        """Set moments that are nearly zero to zero, where all parameters lie in a vector on a CPU.

        The moments of a unit that died decay to denormal numbers and stay there. A CPU computes many times slower with
        them, and they can be a third of all. No parameter is so small that a moment of this size would move it.
        """
        for flat in self.flats:
            for moment in self.optimizer.state[flat.vector].values():
                if torch.is_tensor(moment) and moment.dim():
                    moment.masked_fill_(moment.abs() < TINY_MOMENT, 0.0)

    def _set_number_rates(self) -> None:
        """Set the rates of an optimizer that takes them as numbers."""
        for group, flags in zip(self.optimizer.param_groups, self.flags, strict=True):
            if not group.get("own_rate"):
                group["lr"] = flags["lr"] = float(self.lr)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, by parameter, and its class."""
        self.take_assigned_rates()
        if not self.has_tensor_rate:
            self._set_number_rates()
        state = self.optimizer.state_dict()
        return {**(split_state(state, self.flats) if self.flats else state), "class_name": self.class_name}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error if `state` belongs to another optimizer or to other parameters; nothing is changed."""
        kind = state.get("class_name", self.class_name)  # files of other libraries do not say it
        if kind != self.class_name:
            way_out = f"set optimizer_class_name={kind!r}, or load without the optimizer (load_optimizer=False)"
            raise ValueError(f"the optimizer state is of {kind}, this one is {self.class_name}: {way_out}")
        want = [len(shapes) for shapes in self.sizes]
        got = [len(group["params"]) for group in state["param_groups"]]
        if want != got:
            raise RuntimeError(f"the optimizer state is of parameter groups of sizes {got}, this one has {want}")
        order = [shape for shapes in self.sizes for shape in shapes]
        for index, moments in state["state"].items():
            for name, value in moments.items():
                want = list(order[index])
                if name in SUMMED:
                    want[SUMMED[name]] = 1
                if torch.is_tensor(value) and value.dim() and list(value.shape) != want:
                    shapes = f"{tuple(value.shape)}, this one needs {tuple(want)}"
                    raise RuntimeError(f"the optimizer state {name!r} of parameter {index} has shape {shapes}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load moments and rates; the rate tensors and device flags stay this optimizer's own."""
        rates = [torch.as_tensor(group["lr"]) for group in state["param_groups"]]
        self.optimizer.load_state_dict(join_state(state, self.flats) if self.flats else dict(state))
        for group, flags, rate in zip(self.optimizer.param_groups, self.flags, rates, strict=True):
            group.update(flags)
            if torch.is_tensor(group["lr"]):
                group["lr"].copy_(rate)
            else:
                group["lr"] = float(rate)
        if self.is_fused:  # whose step counts lie beside the parameters; files of other optimizers have them elsewhere
            for parameter, moments in self.optimizer.state.items():
                moments["step"] = torch.as_tensor(moments["step"], dtype=torch.float32, device=parameter.device)
        self.shared = [group for group in self.optimizer.param_groups if not group.get("own_rate")]
        if self.shared:
            self.lr.copy_(torch.as_tensor(self.shared[0]["lr"]))


def has_prefix(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a parameter belongs to one of the named parts."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The norm of several gradients together."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))


def clip_apart(grads: Sequence[Tensor], masks: Sequence[Tensor], max_grad_norm: Tensor | float) -> list[Tensor]:
    """Scale the entries outside of the masks down to a norm, and those inside too; returns both norms before."""
    # Masks, not slices: compilers write in place only to memory that goes by one name.
    pairs = list(zip(masks, grads, strict=True))
    norms = [
        total_norm([torch.where(mask, 0.0, grad) for mask, grad in pairs]),
        total_norm([torch.where(mask, grad, 0.0) for mask, grad in pairs]),
    ]
    others, own = ((max_grad_norm / (norm + 1e-6)).clamp(max=1.0) for norm in norms)
    for mask, grad in pairs:
        grad.mul_(torch.where(mask, own, others))
    return norms


def clip_gradients(parameters: Sequence[nn.Parameter], max_grad_norm: Tensor | float) -> Tensor:
    """Scale gradients down to a norm, which may be a device scalar; returns the norm before."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    nn.utils.clip_grads_with_norm_(parameters, 1.0, norm / max_grad_norm)  # it takes the maximum as a number only
    return norm


def backward(loss: Tensor, *optimizers: GuardedOptimizer, scalars: Sequence[Tensor] = ()) -> None:
    """Give every optimizer the gradients of its parameters, averaged over all ranks; `scalars` are averaged with them.

    `loss.backward()` would add to the old gradients, which then have to be zeroed: twice the operations.
    """
    parameters = [p for optimizer in optimizers for p in optimizer.parameters]
    wanted = [p for p in parameters if p.requires_grad]  # the others were frozen after the optimizer was made
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    grads = iter([next(found) if p.requires_grad else None for p in parameters])
    for optimizer in optimizers:
        optimizer.take_grads([next(grads) for _ in optimizer.parameters])
    if RANKS.size > 1:
        RANKS.average([*(grad for optimizer in optimizers for grad in optimizer.grads()), *scalars])


def check_options(cls: type, groups: Mapping[str, Any]) -> None:
    """Refuse options of a parameter group that the optimizer does not have; torch ignores them."""
    known = [name for name in inspect.signature(cls).parameters if name != "params"]
    for prefix, options in groups.items():
        place = f"parameter_groups[{prefix!r}]"
        if not isinstance(options, Mapping):
            raise TypeError(f"{place} must be a dict such as {{'lr': 1e-4}}, got {options!r}")
        for name in (name for name in options if name not in known):
            raise ValueError(unknown_name("option", name, known, place))
        try:  # torch checks values where an optimizer is made, and not in its groups
            cls([torch.zeros(1, requires_grad=True)], **{"lr": 1e-3, **options})
        except (ValueError, TypeError) as error:
            raise type(error)(f"{place}: {error}") from error


def split_groups(
    named: Mapping[str, nn.Parameter],
    groups: Mapping[str, Mapping[str, Any]] | None,
    device: torch.device,
    has_tensor_rate: bool,
) -> list[dict[str, Any]]:
    """One parameter group per prefix and one for the rest, which is left out if it is empty and not the only one."""
    rest = dict(named)
    result: list[dict[str, Any]] = []
    for prefix, options in (groups or {}).items():
        members = [rest.pop(name) for name in list(rest) if has_prefix(name, [prefix])]
        if not members:
            tops = sorted({name.split(".")[0] for name in named})
            raise ValueError(f"no parameter name starts with {prefix!r}; the policy has {', '.join(tops)}")
        group: dict[str, Any] = {"params": members, **options, "own_rate": "lr" in options}
        if group["own_rate"] and has_tensor_rate:
            group["lr"] = torch.tensor(float(options["lr"]), device=device)
        result.append(group)
    if rest or not result:
        result.append({"params": list(rest.values()), "own_rate": False})
    return result


class FlatParameters:
    """Stores parameters and gradients as views of one vector each."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.shapes = [p.shape for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        self.vector.grad = torch.zeros_like(self.vector)
        self.parameters, self.grads = list(parameters), self.views(self.vector.grad)
        self.places = self.views(self.vector.data)
        for p, place in zip(parameters, self.places, strict=True):
            p.data = place

    def put_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Write the parameters' gradients; None counts as zero."""
        assert self.vector.grad is not None
        present = [(mine, grad) for mine, grad in zip(self.grads, grads, strict=True) if grad is not None]
        if len(present) < len(self.grads):
            self.vector.grad.zero_()
        if present:
            copy_all([mine for mine, _ in present], [grad for _, grad in present])
        for p, grad in zip(self.parameters, self.grads, strict=True):
            p.grad = grad

    def moved(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters that lie elsewhere since their data was assigned (`p.data = x`), and their place in the vector."""
        pairs = zip(self.parameters, self.places, strict=True)
        with no_function_modes():  # these reads decide nothing that a recording would have to repeat
            return [(p, place) for p, place in pairs if p.data_ptr() != place.data_ptr()]

    def mask(self, chosen: Sequence[nn.Parameter]) -> Tensor:
        """Mask of the vector that is true for the chosen parameters."""
        known = {id(p) for p in chosen}
        parts = zip(self.parameters, self.sizes, strict=True)
        return torch.cat([torch.full((size,), id(p) in known, device=self.vector.device) for p, size in parts])

    def views(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector in the shapes of the parameters."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]


def split_state(state: Mapping[str, Any], flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """Convert the state dict of an optimizer over vectors into that of one over the parameters."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for group, flat in zip(state["param_groups"], flats, strict=True):
        indices = list(range(index, index + len(flat.sizes)))
        index += len(indices)
        for name, value in state["state"].get(group["params"][0], {}).items():
            parts = flat.views(value) if torch.is_tensor(value) and value.dim() else [value] * len(indices)
            for i, part in zip(indices, parts, strict=True):
                result["state"].setdefault(i, {})[name] = part
        result["param_groups"].append({**group, "params": indices})
    return result


def join_state(state: Mapping[str, Any], flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """Convert the state dict of an optimizer over parameters into that of one over the vectors."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for number, (group, flat) in enumerate(zip(state["param_groups"], flats, strict=True)):
        shares = [state["state"][index] for index in group["params"] if index in state["state"]]
        if len(shares) == len(flat.sizes):
            joined = result["state"][number] = dict(shares[0])
            for name, first in shares[0].items():
                if torch.is_tensor(first) and first.dim():  # or else a step count, the same for every parameter
                    joined[name] = torch.cat([share[name].reshape(-1) for share in shares])
        result["param_groups"].append({**group, "params": [number]})
    return result
