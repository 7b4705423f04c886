"""The loss scale of fp16: small gradients kept from vanishing, steps that overflow dropped by all ranks together."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

import torch
from torch import nn

from samestep.distributed.communicator import Communicator
from samestep.errors import CommunicationError, StepError, WrapError
from samestep.parallel.wrapped_model import WrappedModel
from samestep.torch_private import multiply_all

Precision = Literal["auto", "fp32", "bf16", "fp16"]
_WISHES: tuple[Precision, ...] = get_args(Precision)
_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_DEVICES = ("cpu", "cuda", "mps")
_FIRST_WITH_TF32 = 8  # compute capability of Ampere


@dataclass(frozen=True)
class Arithmetic:
    """What one rank's device can compute in, and what that rank was asked for."""

    device: str
    """The kind of device: "cpu", "cuda" or "mps"."""
    bf16: bool
    """Whether it has bf16 of its own; emulation does not count."""
    tf32: bool
    """Whether it has TF32."""
    wish: Precision
    """What this rank's script asked for."""
    compile: bool
    """Whether it asked for torch.compile."""


@dataclass(frozen=True)
class ComputePrecision:
    """The precision of a run, the same on every rank, with its reason."""

    name: str
    """What forward and backward passes compute in: "fp32", "bf16" or "fp16"; weights stay as they are."""
    tf32: bool
    """Let products that stay in fp32 use TF32."""
    strict: bool
    """Forbid TF32, since fp32 was asked for by name."""
    compile: bool
    """Compile the model."""
    reason: str
    """Why, in words for a person."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None: nothing is cast."""
        return _DTYPES[self.name]

    def tell(self) -> str:
        """One line that says what was chosen and why."""
        rest = ", TF32 for what stays fp32" if self.tf32 else ", no TF32" if self.strict else ""
        compiled = "on (unlike shapes compile anew, a few times at most)" if self.compile else "off"
        attention = "" if self.name == "fp32" else "; flash attention where SDPA finds it fit"
        return f"precision: {self.name} ({self.reason}){rest}; torch.compile {compiled}{attention}"


def check_precision(wish: str) -> Precision:
    """The wish, if it is one of those known."""
    if wish not in _WISHES:
        raise CommunicationError(f"precision={wish!r} is not known: use one of {', '.join(map(repr, _WISHES))}")
    return wish


def see_arithmetic(device: torch.device, wish: Precision, compile: bool) -> Arithmetic:
    """Ask torch what `device` can do."""
    if device.type != "cuda":
        return Arithmetic(device.type, False, False, wish, compile)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    tf32 = torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= _FIRST_WITH_TF32
    return Arithmetic("cuda", bf16, tf32, wish, compile)


def agree_on_numbers(link: Communicator, mine: Arithmetic) -> ComputePrecision:
    """One choice for all ranks: a rank whose GPU lacks bf16 must not compute in something else than its peers."""
    code = [_DEVICES.index(mine.device), mine.bf16, mine.tf32, _WISHES.index(mine.wish), mine.compile]
    everyone: list[Arithmetic] = []
    for part in link.exchange("Run.start, agreeing on precision", [float(value) for value in code]):
        device, bf16, tf32, wish, compiled = (int(value) for value in part.tolist())
        everyone.append(Arithmetic(_DEVICES[device], bool(bf16), bool(tf32), _WISHES[wish], bool(compiled)))
    return choose_precision(everyone)


def choose_precision(ranks: Sequence[Arithmetic]) -> ComputePrecision:
    """Decide from what every rank has and wants."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if (other.wish, other.compile) != (first.wish, first.compile):
            raise CommunicationError(
                f"rank 0 has Run(precision={first.wish!r}, compile={first.compile}) and rank {rank} has "
                f"Run(precision={other.wish!r}, compile={other.compile}): these must be alike, as all train one model"
            )
    name, reason = _name(ranks)
    tf32 = first.wish != "fp32" and all(rank.tf32 for rank in ranks)
    return ComputePrecision(name, tf32, first.wish == "fp32", first.compile, reason)


def _name(ranks: Sequence[Arithmetic]) -> tuple[str, str]:
    wish = ranks[0].wish
    without = ", ".join(str(at) for at, rank in enumerate(ranks) if rank.device == "cuda" and not rank.bf16)
    if wish != "auto":
        _refuse_impossible(ranks, without)
        return wish, "as asked"
    if any(rank.device != "cuda" for rank in ranks):
        return "fp32", f"auto, on the {'CPU' if ranks[0].device == 'cpu' else 'GPU of Apple'}"
    if without:
        return "fp32", f"auto: the GPUs of rank(s) {without} have no bf16"
    return "bf16", "auto: the GPU has it" if len(ranks) == 1 else "auto: every GPU has it"


def _refuse_impossible(ranks: Sequence[Arithmetic], without: str) -> None:
    """Raise where the wish is one that some device cannot fulfil; `without` names the ranks whose GPU has no bf16."""
    wish = ranks[0].wish
    if wish in ("bf16", "fp16") and any(rank.device == "mps" for rank in ranks):
        raise CommunicationError(
            f"precision={wish!r} is for CUDA and the CPU: on Apple's GPU use 'fp32', or leave it out"
        )
    if wish == "bf16" and without:
        raise CommunicationError(
            "precision='bf16' needs GPUs that have it (compute capability 8.0 and up), and those of rank(s) "
            f"{without} have not: use precision='fp16' or 'fp32', or leave it out"
        )


def set_fp32_products(numbers: ComputePrecision) -> Callable[[], None]:
    """Allow or forbid TF32 as chosen, and return what brings torch's settings back."""
    if not numbers.tf32 and not numbers.strict:
        return lambda: None
    cudnn = torch.backends.cudnn
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError as error:
        raise CommunicationError(
            "the script set torch.backends.*.fp32_precision, which torch does not mix with the setting that Run makes: "
            "leave it out, and use Run(precision='fp32') for full fp32 or 'auto' for TF32 where fp32 stays"
        ) from error
    torch.set_float32_matmul_precision("highest" if numbers.strict else "high")
    cudnn.allow_tf32 = not numbers.strict

    def restore() -> None:
        """Put back what stood before."""
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]

    return restore


def compute_in(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let every call of `module` run under autocast and give its floating results in fp32, for losses in fp32.

    In a training step autocast is on already, up to the loss, and results are left as they are. Only calls of the
    module itself are meant: a method such as `module.encode(x)` called from outside a step runs as it is.
    """
    open_blocks: list[torch.autocast | None] = []

    def enter(*_: object) -> None:
        """Open a block, unless one is open around."""
        block = None if torch.is_autocast_enabled(device.type) else torch.autocast(device.type, dtype=dtype)
        open_blocks.append(block)
        if block is not None:
            block.__enter__()

    def leave(_module: nn.Module, _inputs: object, output: object) -> object:
        """Close it, also after an exception."""
        block = open_blocks.pop()
        if block is None:
            return output
        block.__exit__(None, None, None)
        return in_fp32(output)

    # first of all hooks, so that whatever raises later finds the block open, and always closed
    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def in_fp32(output: object) -> object:
    """Bring the fp16 and bf16 tensors of `output` to fp32; what is no mapping, sequence or dataclass rides along."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, MutableMapping):
        copied = copy.copy(cast("MutableMapping[object, object]", output))  # keeps a class of the user's
        for key, value in copied.items():
            copied[key] = in_fp32(value)
        return copied
    if isinstance(output, tuple | list):
        values = [in_fp32(value) for value in cast("Sequence[object]", output)]
        make = cast("Callable[..., object]", type(output))
        return make(*values) if hasattr(output, "_fields") else make(values)  # a named tuple takes them one by one
    return _fields_in_fp32(output) if dataclasses.is_dataclass(output) else output


def _fields_in_fp32(output: object) -> object:
    if not dataclasses.is_dataclass(output) or isinstance(output, type):  # a dataclass itself is not one of its kind
        return output
    fields = {f.name: in_fp32(getattr(output, f.name)) for f in dataclasses.fields(output) if f.init}
    return dataclasses.replace(output, **fields)


def use_channels_last(model: nn.Module, entrance: nn.Module) -> None:
    """Store 4-D weights channel by channel last, and bring 4-D inputs of `entrance` into the same order."""
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # an overload that the stubs lack

    def turn(value: object) -> object:
        """One input in the order of the weights."""
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point():
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def enter(
        _: nn.Module, inputs: tuple[object, ...], named: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """All inputs, by position and by name."""
        return tuple(turn(value) for value in inputs), {name: turn(value) for name, value in named.items()}

    entrance.register_forward_pre_hook(enter, with_kwargs=True)


def check_weights(model: nn.Module, numbers: ComputePrecision) -> None:
    """Raise where a loss scale could not help: gradients of fp16 weights have no room for it."""
    if numbers.name != "fp16":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise WrapError(
                f"precision='fp16' computes in fp16 and keeps weights in fp32, but parameter {name!r} is fp16 itself: "
                "pass the model as it was before .half(), or model.float()"
            )


_FIRST: Final = 65536.0
_GROWTH_STEPS: Final = 2000  # as torch.amp.GradScaler
_LEAST: Final = 2.0**-14  # thirty halvings: no range of numbers is the cause any more


class LossScale:
    """A factor on every loss, the same on all ranks, taken out of the gradients before anybody sees them.

    torch.amp.GradScaler does this by stepping the optimizer in the user's place. Here the optimizer stays the user's: a
    step that overflowed loses its gradients, and an optimizer that finds none changes nothing.
    """

    def __init__(self, link: Communicator) -> None:
        self._link = link
        self.factor = _FIRST
        self.dropped = False
        self._good_steps = 0

    @property
    def on_rank(self) -> float:
        """The factor on one rank's loss, which already carries the world size as a factor.

        So a sample's gradients are equally large on any number of ranks, and overflow alike.
        """
        return self.factor / self._link.world.size

    def begin(self, models: Sequence[WrappedModel]) -> None:
        """Called when a step begins: gradients that an earlier step left to be added to must have the same factor."""
        self.dropped = False
        for model in models:
            multiply_all(list(model.gradients()), self.on_rank)

    def settle(self, models: Sequence[WrappedModel], number: int) -> str | None:
        """Take the factor out of the gradients, or drop them all where one overflowed; then say so.

        Averaged gradients hold the same bits on every rank, so each sees for itself what all see; sharded ones do not.
        """
        healthy = all(bool(model.all_finite()) for model in models)
        if any(model.sharded for model in models):
            healthy = all(bool(part[0]) for part in self._link.exchange("the fp16 loss scale", [float(healthy)]))
        if not healthy:
            return self._drop(models, number)
        for model in models:
            multiply_all(list(model.gradients()), 1.0 / self.on_rank)
        self._good_steps += 1
        if self._good_steps == _GROWTH_STEPS:
            self.factor, self._good_steps = 2.0 * self.factor, 0
        return None

    def state_dict(self) -> dict[str, float]:
        """The factor and how long it has held, for a checkpoint."""
        return {"factor": self.factor, "good_steps": float(self._good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.factor, self._good_steps = state["factor"], int(state["good_steps"])

    def _drop(self, models: Sequence[WrappedModel], number: int) -> str:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None
        before, self.factor = self.factor, self.factor / 2.0
        self.dropped, self._good_steps = True, 0
        if self.factor < _LEAST:
            raise StepError(
                f"the gradients of step {number} are not finite even at a loss scale of {before:g}: not the range "
                "of fp16 fails, but the loss or the model; look at it with precision='fp32' and step.finite()"
            )
        return (
            f"step {number}: a gradient overflowed in fp16 at loss scale {before:g}; all ranks drop this step "
            f"and go on with {self.factor:g}"
        )
