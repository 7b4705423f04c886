"""Reads, writes, folders, paths, environment variables and devices."""

from dataclasses import replace
from typing import Final

from samestep.lint.library.call import Call, known_function, known_functions, known_method
from samestep.lint.rank_names import environment_value
from samestep.lint.values import ContainerValue, InstanceValue, Value

_TARGET_POSITIONS: Final = {  # of the path that is written, if it is not the first argument
    "torch.save": 1, "joblib.dump": 1, "safetensors.torch.save_file": 1, "shutil.copy": 1, "shutil.copyfile": 1,
    "os.rename": 1, "os.replace": 1, "shutil.move": 1, "shutil.copytree": 1, "shutil.unpack_archive": 1,
    "urllib.request.urlretrieve": 1, "torch.jit.save": 1, "torchvision.utils.save_image": 1, "shutil.copy2": 1,
    "torch.hub.download_url_to_file": 1, "safetensors.torch.save_model": 1, "scipy.io.savemat": 0,
}  # fmt: skip
_TARGET_NAMES: Final = ("f", "path", "filename", "dst", "file", "fp", "extract_dir")
_OPENERS: Final = (
    "open",
    "io.open",
    "gzip.open",
    "bz2.open",
    "lzma.open",
    "h5py.File",
    "zipfile.ZipFile",
    "codecs.open",
)

# -- writes


@known_function(
    "torch.save", "torch.jit.save", "torchvision.utils.save_image", "safetensors.torch.save_file", "numpy.save",
    "numpy.savez", "numpy.savez_compressed", "numpy.savetxt", "joblib.dump", "shutil.copy", "shutil.copyfile",
    "shutil.copytree", "shutil.move", "shutil.unpack_archive", "os.rename", "os.replace", "matplotlib.pyplot.savefig",
    "urllib.request.urlretrieve", "scipy.io.wavfile.write", "imageio.imwrite", "cv2.imwrite", "shutil.copy2",
    "torch.hub.download_url_to_file", "safetensors.torch.save_model", "scipy.io.savemat", "torchaudio.save",
    "soundfile.write", "logging.FileHandler",
)  # fmt: skip
def _write(call: Call) -> Value:
    found = (call.get(name) for name in _TARGET_NAMES)
    position = _TARGET_POSITIONS.get(call.name, 0)
    path = next((each for each in found if each is not None), None) or call.get("", position) or Value()
    call.emit("write", path=path, how=call.name)
    return Value(call.location)


@known_function("logging.basicConfig")
def _log_file(call: Call) -> Value:
    path = call.get("filename")
    if path is not None and path.constant is not None:
        call.emit("write", path=path, how=call.name)
    return Value(call.location)


@known_function(*_OPENERS)
def _open(call: Call) -> Value:
    mode = _mode(call, 1)
    path = call.get("file", 0) or call.get("filename", 0) or Value()
    call.emit("write" if _writes(mode) else "read", path=path, how=f"open(..., {mode!r})")
    return Value(call.location, path.taints, name="open")


def _mode(call: Call, position: int) -> str:
    mode = call.get("mode", position)
    return str(mode.constant) if mode is not None and mode.is_known else "r"


def _writes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


@known_method("value", "open")
@known_method("instance", "open")
def _path_open(call: Call, owner: Value) -> Value:
    mode = _mode(call, 0)
    call.emit("write" if _writes(mode) else "read", path=owner, how=f".open({mode!r})")
    return Value(call.location, owner.taints, name="open")


@known_method("any", "write_text", "write_bytes")
def _path_write(call: Call, owner: Value) -> Value:
    call.emit("write", path=owner, how=f".{call.last}()")
    return Value(call.location)


@known_method("any", "savefig", "to_csv", "to_parquet", "to_json", "save_pretrained", "to_pickle", "save_vocabulary")
def _method_write(call: Call, owner: Value) -> Value:
    path = call.get("save_directory", 0) or Value()
    is_main = call.get("is_main_process")
    if call.arguments and (is_main is None or not is_main.differs):
        call.emit("write", path=path, how=f".{call.last}()")
    return Value(call.location)


@known_method("value", "extractall")
def _extract(call: Call, owner: Value) -> Value:
    call.emit("write", path=call.get("path", 0) or Value(call.location, constant="."), how=".extractall()")
    return Value(call.location)


@known_functions(lambda package, name: package.startswith("torchvision.datasets") and name[:1].isupper())
def _torchvision_dataset(call: Call) -> Value:
    download = call.get("download")
    if download is not None and download.constant is True:
        call.emit("write", path=call.get("root", 0) or Value(), how=f"{call.last}(download=True)")
    return Value(call.location, call.taints, name=call.name)


@known_function("torch.utils.tensorboard.SummaryWriter", "tensorboardX.SummaryWriter", "wandb.init", "mlflow.start_run")
def _logger(call: Call) -> Value:
    path = call.get("log_dir", 0) or Value()
    call.emit("logger", path=path, how=call.name)
    return Value(call.location, name=call.name)


# -- folders


@known_function("os.makedirs", "os.mkdir")
def _make_folder(call: Call) -> Value:
    call.emit("folder", path=call.get("name", 0) or Value(), may_exist=_is_on(call, "exist_ok", 2))
    return Value(call.location)


@known_method("value", "mkdir")
@known_method("instance", "mkdir")
def _path_folder(call: Call, owner: Value) -> Value:
    call.emit("folder", path=owner, may_exist=_is_on(call, "exist_ok", 2))
    return Value(call.location)


@known_function("os.remove", "os.unlink", "shutil.rmtree", "os.rmdir")
def _remove(call: Call) -> Value:
    path = call.get("path", 0) or Value()
    call.emit("remove", path=path, ignores_missing=_is_on(call, "ignore_errors", 1) or "onerror" in call.keywords)
    return Value(call.location)


@known_method("value", "unlink", "rmdir")
def _path_remove(call: Call, owner: Value) -> Value:
    call.emit("remove", path=owner, ignores_missing=_is_on(call, "missing_ok", 0))
    return Value(call.location)


def _is_on(call: Call, name: str, position: int) -> bool:
    """Whether an option is given, and not False."""
    value = call.get(name, position)
    return value is not None and value.constant is not False


# -- reads


@known_function("os.path.exists", "os.path.isfile")
def _exists(call: Call) -> Value:
    """Each process looks at another time."""
    return replace(call.unknown_result(), clock=call.location)


@known_method("any", "exists", "is_file")
def _path_exists(call: Call, owner: Value) -> Value:
    return replace(call.unknown_result(owner), clock=call.location)


@known_method("any", "read_text", "read_bytes")
def _method_read(call: Call, owner: Value) -> Value:
    call.emit("read", path=owner, how=f".{call.last}()")
    return Value(call.location)


@known_function(
    "numpy.load", "numpy.loadtxt", "pandas.read_csv", "pandas.read_parquet", "pandas.read_json", "joblib.load",
    "safetensors.torch.load_file", "numpy.genfromtxt", "pandas.read_pickle",
)  # fmt: skip
def _read(call: Call) -> Value:
    call.emit("read", path=call.arguments[0] if call.arguments else Value(), how=call.name)
    return call.unknown_result()


@known_function("numpy.memmap", "numpy.lib.format.open_memmap")
def _map_file(call: Call) -> Value:
    """Mode "w+" creates the file, or empties it."""
    mode = call.get("mode", 2 if call.last == "memmap" else 1)
    is_new = mode is not None and isinstance(mode.constant, str) and mode.constant.startswith("w")
    path = call.get("filename", 0) or Value()
    call.emit("write" if is_new else "read", path=path, how=call.name)
    return call.unknown_result()


@known_function("torch.load")
def _load(call: Call) -> Value:
    path = call.get("f", 0) or Value()
    call.emit("read", path=path, how="torch.load")
    call.emit("torch_load", path=path, map_location=call.get("map_location", 1))
    return Value(call.location, path.taints, name="torch.load")


@known_function("torch.distributed.checkpoint.state_dict.StateDictOptions")
def _state_options(call: Call) -> Value:
    return InstanceValue(call.location, qualname=call.name, arguments=call.named_arguments)


@known_method("any", "iterdir", "glob", "rglob")
def _list_folder(call: Call, owner: Value) -> Value:
    call.emit("read", path=owner, how=f".{call.last}()")
    return ContainerValue(
        call.location, owner.taints, is_unordered=True, name=call.last, order_from=call.location
    )  # fmt: skip


# -- environment and devices


@known_function("os.getenv", "os.environ.get", "os.environ.setdefault")
def _environment(call: Call) -> Value:
    key = call.arguments[0] if call.arguments else Value()
    return environment_value(str(key.constant) if key.is_known else "", call.location)


@known_function(
    "torch.cuda.set_device", "torch.cuda.device", "torch.accelerator.set_device_index", "torch.xpu.set_device"
)
def _set_device(call: Call) -> Value:
    call.emit("set_device", value=call.get("device", 0) or Value())
    return Value(call.location)


@known_function("torch.device")
def _device(call: Call) -> Value:
    call.emit("device", value=call.get("device", 0) or Value(), index=call.get("index", 1))
    return Value(call.location, call.taints, name="torch.device")
