"""What makes a run fast, agreed on by all ranks: precision, autocast, the loss scale of fp16, fused optimizers."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.errors import CommunicationError, ConfigError, StepError, WrapError
from samestep.parallel.wrapped_model import WrappedModel, gradients_finite
from samestep.torch_private import is_dtensor, multiply_all

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": None,
}
_HAVE_FUSED_KERNELS = (Adam, AdamW, SGD)  # on CUDA in every supported torch
_FIRST_WITH_TF32 = 8  # compute capability of Ampere


@dataclass(frozen=True)
class PrecisionSupport:
    """What the device of one rank supports, and what its script requested."""

    device: str  # "cpu", "cuda" or "mps"
    bf16: bool  # whether the device has native bf16; emulation does not count
    tf32: bool
    requested: Precision
    compile: bool
    variable: str = ""  # the environment variable that requested it; empty: the script


@dataclass(frozen=True)
class ComputePrecision:
    """The precision of a run, the same on every rank, with the reason."""

    name: str
    """The precision of forward and backward passes; weights keep their dtype, except that "fp64" converts them."""
    tf32: bool  # whether fp32 products may use TF32
    strict: bool  # whether TF32 is forbidden, since the script requested fp32 by name
    compile: bool
    reason: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None: no autocast."""
        return _DTYPES[self.name]

    @property
    def convert_to(self) -> torch.dtype | None:
        """The dtype to which weights, buffers and floating-point batches are converted; None: they keep theirs."""
        return torch.float64 if self.name == "fp64" else None

    def __str__(self) -> str:
        tf32 = ", TF32 for fp32 products" if self.tf32 else ", no TF32" if self.strict else ""
        compiled = "on (recompiles for new shapes, a few times at most)" if self.compile else "off"
        attention = "" if self.dtype is None else "; flash attention if SDPA selects it"
        return f"precision: {self.name} ({self.reason}){tf32}; torch.compile {compiled}{attention}"


def check_precision(requested: str, variable: str = "") -> Precision:
    """The precision, if it is a known one; `variable` names the environment variable that it comes from."""
    if requested not in _PRECISIONS:
        known = ", ".join(map(repr, _PRECISIONS))
        raise ConfigError(f"{variable or 'precision'}={requested!r} is not valid: use one of {known}")
    return requested


def detect_support(device: torch.device, requested: Precision, compile: bool, variable: str = "") -> PrecisionSupport:
    """Ask torch what `device` supports."""
    cuda = device.type == "cuda"
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    tf32 = cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= _FIRST_WITH_TF32
    return PrecisionSupport(device.type, bf16, tf32, requested, compile, variable)


def choose_precision(ranks: Sequence[PrecisionSupport]) -> ComputePrecision:
    """One precision for all ranks, so that a rank whose GPU lacks bf16 does not use another one than its peers."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if (other.requested, other.compile) != (first.requested, first.compile):
            raise CommunicationError(
                f"rank 0 has Run(precision={first.requested!r}, compile={first.compile}) and rank {rank} has "
                f"Run(precision={other.requested!r}, compile={other.compile}): pass the same values on all ranks"
            )
    name, reason = _choose_name(ranks)
    tf32 = first.requested not in ("fp32", "fp64") and all(rank.tf32 for rank in ranks)
    return ComputePrecision(name, tf32, first.requested == "fp32", first.compile, reason)


def _choose_name(ranks: Sequence[PrecisionSupport]) -> tuple[str, str]:
    requested = ranks[0].requested
    without_bf16 = ", ".join(str(rank) for rank, each in enumerate(ranks) if each.device == "cuda" and not each.bf16)
    if requested in ("bf16", "fp16", "fp64") and any(rank.device == "mps" for rank in ranks):
        raise ConfigError(f"precision={requested!r} is not supported on Apple GPUs: use precision='fp32', or omit it")
    if requested == "bf16" and without_bf16:
        raise ConfigError(
            "precision='bf16' needs compute capability 8.0 or higher, which the GPUs of rank(s) "
            f"{without_bf16} do not have: use precision='fp16' or 'fp32', or omit it"
        )
    if requested != "auto":
        variable = ranks[0].variable
        return requested, f"by {variable}" if variable else "as requested"
    if any(rank.device != "cuda" for rank in ranks):
        return "fp32", f"auto, on {'the CPU' if ranks[0].device == 'cpu' else 'an Apple GPU'}"
    if without_bf16:
        return "fp32", f"auto: the GPUs of rank(s) {without_bf16} do not support bf16"
    return "bf16", "auto: the GPU supports it" if len(ranks) == 1 else "auto: every GPU supports it"


def set_fp32_products(precision: ComputePrecision) -> Callable[[], None]:
    """Allow or forbid TF32, and return a function that restores torch's settings."""
    if not precision.tf32 and not precision.strict:
        return lambda: None
    cudnn = torch.backends.cudnn
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError as error:
        raise ConfigError(
            "the script sets torch.backends.*.fp32_precision, which torch does not combine with the setting that Run "
            "makes: remove it, and use Run(precision='fp32') for full fp32 or 'auto' for TF32"
        ) from error
    torch.set_float32_matmul_precision("highest" if precision.strict else "high")
    cudnn.allow_tf32 = not precision.strict

    def restore() -> None:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]

    return restore


def compute_in(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Run every call of `module` under autocast and return its floating-point outputs in fp32.

    In a training step autocast is already on until the loss is computed, and outputs keep their dtype. It covers calls
    of the module itself: a method such as `module.encode(x)` that is called outside of a step runs without autocast.
    """
    contexts: list[torch.autocast | None] = []

    def enter(*_: object) -> None:
        autocast = None if torch.is_autocast_enabled(device.type) else torch.autocast(device.type, dtype=dtype)
        contexts.append(autocast)
        if autocast is not None:
            autocast.__enter__()

    def leave(_module: nn.Module, _inputs: object, output: object) -> object:
        autocast = contexts.pop()
        if autocast is None:
            return output
        autocast.__exit__(None, None, None)
        return in_fp32(output)

    # the first hook, so that it has run if a later one raises; `leave` always runs
    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def leave_casts_to_fsdp(module: nn.Module, device: torch.device) -> None:
    """Run every call of the sharded `module` without autocast, and return its floating-point outputs in fp32.

    Its policy casts weights and inputs. In a training step on a GPU autocast is on until the loss is computed, and
    outputs keep their dtype: an fp32 copy of large logits would need more memory than the sharded model.
    """
    contexts: list[torch.autocast | None] = []

    def enter(*_: object) -> None:
        enabled = torch.is_autocast_enabled(device.type)
        contexts.append(torch.autocast(device.type, enabled=False) if enabled else None)
        if contexts[-1] is not None:
            contexts[-1].__enter__()

    def leave(_module: nn.Module, _inputs: object, output: object) -> object:
        if not contexts:  # the pre-forward hook of FSDP, which runs first, raised
            return output
        context = contexts.pop()
        if context is None:
            return in_fp32(output)
        context.__exit__(None, None, None)
        return output

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def in_fp32(output: object) -> object:
    """`output` with its fp16 and bf16 tensors in fp32; looks into mappings, sequences and dataclasses."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, MutableMapping):
        copied = copy.copy(cast("MutableMapping[object, object]", output))  # keeps the class of the mapping
        for key, value in copied.items():
            copied[key] = in_fp32(value)
        return copied
    if isinstance(output, tuple | list):
        values = [in_fp32(value) for value in cast("Sequence[object]", output)]
        make = cast("Callable[..., object]", type(output))
        return make(*values) if hasattr(output, "_fields") else make(values)  # a namedtuple takes positional arguments
    if not dataclasses.is_dataclass(output) or isinstance(output, type):  # the class itself is not an instance
        return output
    fields = {f.name: in_fp32(getattr(output, f.name)) for f in dataclasses.fields(output) if f.init}
    return dataclasses.replace(output, **fields)


def use_channels_last(model: nn.Module, called: nn.Module) -> None:
    """Store 4-D weights in channels-last format, and convert 4-D inputs of `called` to it."""
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # the stubs lack this overload

    def convert(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point():
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def enter(
        _: nn.Module, inputs: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return tuple(convert(value) for value in inputs), {name: convert(value) for name, value in kwargs.items()}

    called.register_forward_pre_hook(enter, with_kwargs=True)


def convert_weights(model: nn.Module, precision: ComputePrecision) -> None:
    """Convert parameters and buffers to float64 if the run computes in fp64; they stay the same objects."""
    if precision.convert_to is not None:
        model.double()  # not .to(dtype), which would convert complex numbers too


def check_weights(model: nn.Module, precision: ComputePrecision) -> None:
    """Raise if weights are fp16: their gradients would overflow with a loss scale."""
    if precision.name != "fp16":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise WrapError(
                f"precision='fp16' computes in fp16 and keeps weights in fp32, but parameter {name!r} is fp16: pass "
                "the model without .half(), or model.float()"
            )


_INITIAL_SCALE: Final = 65536.0
_GROWTH_STEPS: Final = 2000  # as torch.amp.GradScaler
_MIN_SCALE: Final = 2.0**-14  # after thirty halvings the range of fp16 is not the cause


class LossScale:
    """A factor on every loss, the same on all ranks, taken out of the gradients before the optimizer steps.

    torch.amp.GradScaler steps the optimizer for the user. Here the user steps it: samestep sets the gradients of a step
    that overflowed to None, and an optimizer skips parameters without a gradient.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.factor = _INITIAL_SCALE
        self.dropped = False
        self._steps_since_change = 0

    @property
    def rank_factor(self) -> float:
        """The factor on the loss of one rank, which `step.mean` has multiplied by the world size.

        So the gradient of a sample has the same magnitude on any number of ranks, and overflows the same.
        """
        return self.factor / self._comm.world.size

    def start_step(self, models: Sequence[WrappedModel]) -> None:
        """Scale gradients that an earlier step left, so that the new ones can be added to them."""
        self.dropped = False
        for model in models:
            multiply_all(list(model.gradients()), self.rank_factor)

    def unscale(self, models: Sequence[WrappedModel], step: int) -> str | None:
        """Take the factor out of the gradients, or drop all of them if one overflowed; returns a message then."""
        if not gradients_finite(self._comm, "the fp16 loss scale", models):
            return self._drop(models, step)
        for model in models:
            multiply_all(list(model.gradients()), 1.0 / self.rank_factor)
        self._steps_since_change += 1
        if self._steps_since_change == _GROWTH_STEPS:
            self.factor, self._steps_since_change = 2.0 * self.factor, 0
        return None

    def state_dict(self) -> dict[str, float]:
        """The factor and the steps since it changed, for a checkpoint."""
        return {"factor": self.factor, "good_steps": float(self._steps_since_change)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved state."""
        self.factor, self._steps_since_change = state["factor"], int(state["good_steps"])

    def _drop(self, models: Sequence[WrappedModel], step: int) -> str:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None
        before, self.factor = self.factor, self.factor / 2.0
        self.dropped, self._steps_since_change = True, 0
        if self.factor < _MIN_SCALE:
            raise StepError(
                f"the gradients of step {step} are not finite even at a loss scale of {before:g}, so the range of fp16 "
                "is not the cause: check the loss and the model with precision='fp32' and step.finite()"
            )
        return (
            f"step {step}: a gradient overflowed in fp16 at loss scale {before:g}; all ranks drop this step and "
            f"continue with loss scale {self.factor:g}"
        )


class Acceleration:
    """The precision of a run and what follows from it, from its start to its end."""

    def __init__(self, comm: Communicator, support: PrecisionSupport, report: Callable[[str], None]) -> None:
        self.precision = choose_precision(comm.exchange_objects("Run.start, agreeing on precision", support))
        self.loss_scale = LossScale(comm) if self.precision.name == "fp16" else None
        """The loss scale; None unless the run computes in fp16."""
        self._report = report
        self._fused: list[str] = []
        self._reported = False
        self._device = support.device
        self._autocast: torch.autocast | None = None
        self._restore = set_fp32_products(self.precision)
        self._default_dtype = torch.get_default_dtype()
        if self.precision.convert_to is not None:  # also for tensors and models that the script creates
            torch.set_default_dtype(self.precision.convert_to)
        if self.precision.tf32 or self.precision.strict:  # these apply from now on, also to what is never wrapped
            self.report()

    @property
    def loss_factor(self) -> float:
        """The factor on losses in the backward pass; 1 unless the run computes in fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale.rank_factor

    def report(self) -> None:
        """Print what was chosen and why, once."""
        if not self._reported:
            self._reported = True
            self._report(str(self.precision))

    def open_forward(self) -> None:
        """Start autocast on a GPU, until the loss is computed.

        It covers more than the call of the model: torch then converts large outputs inside the kernels of the loss,
        which saves a copy (a twelfth of the step of a small language model). On the CPU losses would stay in half
        precision, so there autocast covers only the calls of the model.
        """
        if self._device == "cuda" and self.precision.dtype is not None and self._autocast is None:
            self._autocast = torch.autocast(self._device, dtype=self.precision.dtype)
            self._autocast.__enter__()

    def close_forward(self) -> None:
        """End autocast: the loss is computed, and the backward pass does not run under autocast."""
        autocast, self._autocast = self._autocast, None
        if autocast is not None:
            autocast.__exit__(None, None, None)

    def unscale(self, models: Sequence[WrappedModel], step: int) -> None:
        """Take the loss scale out of the gradients when the micro-batches of a step are done."""
        if self.loss_scale is not None and (message := self.loss_scale.unscale(models, step)):
            self._report(message)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Called before the first step of an optimizer: turn on its fused kernel."""
        if turn_on_fused(optimizer):
            name = type(optimizer).__name__
            self._fused.append(name)
            self._report(f"optimizer: fused {name}, one kernel for all parameters (fused=False turns it off)")

    def choices(self) -> dict[str, object]:
        """What was chosen, for the summary."""
        precision = self.precision
        choices: dict[str, object] = {
            "precision": precision.name,
            "reason": precision.reason,
            "tf32": precision.tf32,
            "compile": precision.compile,
            "fused": list(self._fused),
        }
        return choices if self.loss_scale is None else {**choices, "loss_scale": self.loss_scale.factor}

    def close(self) -> None:
        """Restore torch's settings."""
        self.close_forward()
        self._restore()
        if self.precision.convert_to is not None:
            torch.set_default_dtype(self._default_dtype)


def turn_on_fused(optimizer: Optimizer, device: str = "cuda") -> bool:
    """Let an optimizer of torch whose parameters are on `device` use its fused kernel; returns whether it does now.

    A choice of the user (`fused=`, `foreach=`, `differentiable=`) is kept, and so is a subclass of torch's optimizers,
    whose `step` may not support the option. The results differ from the default's in the last bits.
    """
    if type(optimizer) not in _HAVE_FUSED_KERNELS:
        return False
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if type(optimizer) is SGD and any(map(is_dtensor, parameters)):
        return False  # torch has no sharded form of its kernel
    if not all(_allows_fused(group, device) for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            # a fused kernel counts steps on the device; a restored state may still count on the CPU
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device, torch.float32)
    return True


def _allows_fused(group: dict[str, object], device: str) -> bool:
    parameters: list[torch.Tensor] = group["params"]  # pyright: ignore[reportAssignmentType]  # torch's layout of a group
    undecided = "fused" in group and group["fused"] is None and group.get("foreach") is None
    return (
        undecided
        and not group.get("differentiable")
        and all(p.device.type == device and torch.is_floating_point(p) for p in parameters)
        and not any(p.grad is not None and p.grad.is_sparse for p in parameters)
    )
