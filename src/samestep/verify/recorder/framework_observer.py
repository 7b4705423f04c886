"""What scripts do through Lightning, Fabric, Accelerate and torchmetrics, each observed once the script imports it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

from samestep.verify.recorder.file_observer import FileObserver
from samestep.verify.recorder.recorder import Recorder, wrap

_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")


class FrameworkObserver:
    """Observes frameworks: values that Lightning logs, what Accelerate gathers, and how many processes they expect."""

    def __init__(self, recorder: Recorder, files: FileObserver) -> None:
        self._recorder, self._files = recorder, files

    def install(self) -> None:
        """Observe the frameworks that the script imports from now on."""
        actions: dict[str, Callable[[ModuleType], None]] = {
            "accelerate.accelerator": self._observe_accelerate,
            "torchmetrics.metric": self._observe_torchmetrics,
            "accelerate.scheduler": self._observe_accelerate_scheduler,
            "h5py._hl.files": self._files.observe_hdf5,
            "tensorboard.summary.writer.event_file_writer": self._files.observe_tensorboard,
            "tensorboardX.event_file_writer": self._files.observe_tensorboard,
            "lightning.fabric.fabric": self._observe_fabric,
            "lightning_fabric.fabric": self._observe_fabric,
        }
        for package in _PACKAGES:
            actions[f"{package}.trainer.trainer"] = self._observe_trainer
            actions[f"{package}.core.module"] = self._observe_module
        imported = [name for name in actions if name in sys.modules]
        for name in imported:  # the interpreter that has forked this process has imported it
            actions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, _AfterImport(actions))
        if (rank_zero := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
            rank_zero.rank_zero_only.rank = self._recorder.rank or 0  # which it reads when it is imported

    def _observe_trainer(self, module: ModuleType) -> None:
        callback_class = sys.modules[f"{module.__name__.split('.trainer')[0]}.callbacks"].Callback
        recorder = self._recorder

        def write_metrics(trainer: Any, stage: str) -> None:
            if not getattr(trainer, "sanity_checking", False):
                values = {name: _number(value) for name, value in trainer.callback_metrics.items()}
                recorder.write("logged", stage=stage, values=values)

        class Observer(callback_class):  # pyright: ignore
            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                write_metrics(trainer, "validation")

            def on_test_end(self, trainer: Any, pl_module: Any) -> None:
                write_metrics(trainer, "test")

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                write_metrics(trainer, "train")

        def create(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            callbacks = kwargs.get("callbacks") or []
            callbacks = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
            recorder.write("trainer", site=recorder.site(), strategy=str(kwargs.get("strategy")))
            kwargs = {**kwargs, "callbacks": [*callbacks, Observer()], **self._devices(kwargs)}
            return original(trainer, *args, **kwargs)

        wrap(module.Trainer, "__init__", create)

    def _devices(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As many devices as there are ranks, on the CPU, whatever the script asks for."""
        settings = self._recorder.settings
        if settings.device != "cpu":
            return {}
        precision = str(kwargs.get("precision", ""))
        changed: dict[str, Any] = {"accelerator": "cpu", "devices": settings.size, "num_nodes": 1}
        return {**changed, "precision": "32-true"} if "16" in precision else changed

    def _observe_fabric(self, module: ModuleType) -> None:
        def create(original: Any, fabric: Any, *args: Any, **kwargs: Any) -> Any:
            self._recorder.write("fabric", site=self._recorder.site(), strategy=str(kwargs.get("strategy")))
            names = ("accelerator", "strategy", "devices", "num_nodes", "precision")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            return original(fabric, **{**kwargs, **self._devices(kwargs)})

        wrap(module.Fabric, "__init__", create)

    def _observe_module(self, module: ModuleType) -> None:
        recorder = self._recorder

        def log(original: Any, own: Any, name: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_quiet:
                trainer = getattr(own, "_trainer", None)
                stage = str(getattr(getattr(trainer, "state", None), "stage", "") or "")
                recorder.write(
                    "log", name=str(name), site=recorder.site(), sync=bool(kwargs.get("sync_dist", False)),
                    stage=stage.rpartition(".")[2].lower(), metric=type(value).__module__.startswith("torchmetrics"),
                    on_epoch=kwargs.get("on_epoch"), on_step=kwargs.get("on_step"),
                    rank_zero_only=bool(kwargs.get("rank_zero_only", False)),
                )  # fmt: skip
            return original(own, name, value, *args, **kwargs)

        wrap(module.LightningModule, "log", log)

    def _observe_accelerate(self, module: ModuleType) -> None:
        recorder = self._recorder

        def observe(name: str) -> None:
            def call(original: Any, *args: Any, **kwargs: Any) -> Any:
                if not recorder.is_quiet:
                    optimizers = sum(isinstance(each, Optimizer) for each in args)
                    recorder.write("accelerate", name=name, site=recorder.site(), optimizers=optimizers)
                return original(*args, **kwargs)

            wrap(module.Accelerator, name, call)

        for name in ("gather", "gather_for_metrics", "reduce", "prepare", "backward", "clip_grad_norm_"):
            observe(name)
        if recorder.settings.is_reference:
            wrap(module, "prepare_data_loader", self._prepare_loader)

    def _prepare_loader(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Let one process shuffle with a separate generator, as Accelerate does for several: in the same order."""
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None and not kwargs.get("use_seedable_sampler"):
            sampler.generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return original(loader, *args, **kwargs)

    def _observe_accelerate_scheduler(self, module: ModuleType) -> None:
        recorder = self._recorder

        def step(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_quiet:
                recorder.write("scheduler_call", site=recorder.site())
            return original(*args, **kwargs)

        wrap(module.AcceleratedScheduler, "step", step)

    def _observe_torchmetrics(self, module: ModuleType) -> None:
        recorder = self._recorder

        def sync(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_quiet and kwargs.get("should_sync", True):
                recorder.write("torchmetrics", site=recorder.site())
            return original(*args, **kwargs)

        wrap(module.Metric, "sync", sync)


class _AfterImport(MetaPathFinder):
    """Runs an action after a module was imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the module as Python would, and let its loader run the action."""
        action = self._actions.pop(name, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _ActingLoader(spec.loader, action)
                return spec
        return None


class _ActingLoader(Loader):
    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader itself."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the action."""
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
