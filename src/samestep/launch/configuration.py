"""The configuration of a run: options that `--config FILE` reads, and config.json, which `samestep rerun` repeats."""

import json
import re
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from samestep.disk import write_atomically
from samestep.environment.world import CONFIG
from samestep.errors import LaunchError
from samestep.messages import hide_secrets, is_secret

CONFIG_FILE: Final = "config.json"
HIDDEN: Final = "***"
_MOST_BYTES: Final = 64 << 10  # the values are a variable of the ranks, whose size Linux limits
_NAME: Final = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
# Variables that can change what a run computes: config.json keeps them, and `samestep rerun` sets them again.
REPEATED_VARIABLES: Final = (
    "CUBLAS_WORKSPACE_CONFIG", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "SAMESTEP_PRECISION", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
# Variables about the machine: config.json keeps them, and those of the new run hold.
_OTHER_VARIABLES: Final = re.compile(
    r"(CUDA_|NCCL_|GLOO_|HIP_|ROCR_|TORCH_|PYTORCH_|SLURM_JOB_ID$|SLURM_JOB_NUM_NODES$|HF_HUB_OFFLINE$|WANDB_MODE$)"
)


@dataclass(frozen=True)
class KnownConfig:
    """Values that the arguments of a script have already: those of a recipe, or of a run that is repeated."""

    values: Mapping[str, Any]
    file: str | None
    rerun_of: str | None = None


@dataclass(frozen=True)
class FileOption:
    """One option of a file: its value, the text that the command line would have, and its line."""

    value: object
    text: str | list[str]
    line: int


@dataclass(frozen=True)
class OptionsFile:
    """The options of a file by name, as they are written."""

    path: Path
    options: Mapping[str, FileOption]

    def values(self) -> dict[str, object]:
        """The values by name."""
        return {name: option.value for name, option in self.options.items()}

    def error(self, line: int, text: str) -> LaunchError:
        """An error that names the file and the line."""
        return LaunchError(f"{self.path}, line {line}: {text}")


def read_options_file(path: Path) -> OptionsFile:
    """Read options of a script from a YAML, TOML or JSON file: names and values, without nesting."""
    try:
        content = path.read_bytes()
        if len(content) > _MOST_BYTES:
            raise LaunchError(f"--config {path} has {len(content):,} bytes: options have at most {_MOST_BYTES:,}")
        text = content.decode()
    except FileNotFoundError as error:
        raise LaunchError(f"--config {path} does not exist: check its path, which starts in {Path.cwd()}") from error
    except OSError as error:
        raise LaunchError(f"--config {path} cannot be read ({error.strerror}): pass a file") from error
    except UnicodeDecodeError as error:
        raise LaunchError(f"--config {path} is not UTF-8: save it as UTF-8") from error
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise LaunchError(f"--config {path} has the suffix {path.suffix!r}: pass a .yaml, .yml, .toml or .json file")
    found = OptionsFile(path, {})
    options: dict[str, FileOption] = {}
    try:
        entries = list(reader(found, text))
    except RecursionError as error:
        raise found.error(1, "has values inside of values, too deep to read: write one line per option") from error
    except (ValueError, OverflowError) as error:  # thousands of digits, or a character that does not exist
        problem = str(error).partition(";")[0]
        raise found.error(1, f"has a value that cannot be read ({problem}): write it as a text") from error
    for name, value, line in entries:
        if isinstance(name, str) and name in options:
            raise found.error(line, f"{name} is given twice, first in line {options[name].line}: remove one")
        options[str(name)] = _check_option(found, name, value, line)
    return OptionsFile(path, options)


def _check_option(file: OptionsFile, name: object, value: object, line: int) -> FileOption:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise file.error(
            line, f"{name!r} is not the name of an option: write it without dashes in front, as in lr: 0.1"
        )
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict | list) for each in value)):
        raise file.error(
            line, f"{name} has nested values, and an option has one value or a list: write one line per option"
        )
    if isinstance(value, list):
        typed, texts = zip(*map(_scalar, value), strict=True) if value else ((), ())
        return FileOption(list(typed), list(texts), line)
    typed, text = _scalar(value)
    return FileOption(typed, text, line)


@dataclass(frozen=True)
class _YamlText:
    """A value of YAML as it is written: 1e-3 and 010 keep their text."""

    text: str


def _scalar(value: object) -> tuple[object, str]:
    """The value and its text."""
    if isinstance(value, _YamlText):
        return _number(value.text), value.text
    if value is None or isinstance(value, bool | int | float | str):
        return value, str(value)
    return str(value), str(value)  # a date of TOML


def _number(text: str) -> object:
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[-+]?[\d_]{1,300}", text) else float(text)


# names, values and lines
Entries = Iterable[tuple[object, object, int]]


def _read_yaml(file: OptionsFile, text: str) -> Entries:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise LaunchError(
            f"--config {file.path} needs PyYAML, which is not installed: pip install 'samestep[yaml]', or write the "
            "options as .toml or .json"
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise file.error(
            mark.line + 1 if mark else 1, f"not valid YAML ({problem or 'a control character'})"
        ) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise file.error(1, "a list or a text, not options: write one option per line, as in lr: 0.1")
    return [(_yaml_value(key), _yaml_value(value), key.start_mark.line + 1) for key, value in root.value]


def _yaml_value(node: Any) -> object:
    if isinstance(node.value, str):
        if node.tag.endswith(":null"):
            return None
        if node.tag.endswith(":bool") and node.value.lower() in ("true", "false"):  # not yes, no, on and off
            return node.value.lower() == "true"
        return node.value if node.style else _YamlText(node.value) if _number(node.value) != node.value else node.value
    is_mapping = node.value and isinstance(node.value[0], tuple)
    return {} if is_mapping else [_yaml_value(each) for each in node.value]


def _read_toml(file: OptionsFile, text: str) -> Entries:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        problem = re.sub(r" \(at .*\)$", "", str(error))
        raise file.error(int(line[1]) if line else text.count("\n") + 1, f"not valid TOML ({problem})") from error
    return [(name, value, _find_line(text, name)) for name, value in values.items()]


def _read_json(file: OptionsFile, text: str) -> Entries:
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise file.error(error.lineno, f"not valid JSON ({error.msg})") from error
    if not isinstance(pairs, _Pairs):
        raise file.error(1, 'a list or a text, not options: write an object, as in {"lr": 0.1}')
    return [(name, _without_pairs(value), _find_line(text, name)) for name, value in pairs]


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON, in which a name may come twice."""


def _without_pairs(value: object) -> object:
    if isinstance(value, _Pairs):
        return dict(value)
    return [_without_pairs(each) for each in value] if isinstance(value, list) else value


_READERS: Final = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}


def _find_line(text: str, name: str) -> int:
    found = re.search(rf"(?:^|[{{,\[])\s*[\"']?{re.escape(name)}[\"']?\s*[=:.\]]", text, re.MULTILINE)
    return text.count("\n", 0, found.end()) + 1 if found else 1


def merge_arguments(options: Mapping[str, FileOption], explicit: Sequence[str], repeat_lists: bool) -> list[str]:
    """The arguments of a script: those of a file, without what is given explicitly, and the explicit ones.

    `repeat_lists`: click and typer read a list as `--size=1 --size=2`, argparse as `--size 1 2`.

    >>> options = {"lr": FileOption(0.1, "0.1", 1), "fast": FileOption(True, "True", 2)}
    >>> merge_arguments(options, ["--lr", "0.2"], repeat_lists=False)
    ['--fast', '--lr', '0.2']
    """
    single, lists = list[str](), list[str]()
    for name, option in without_given(options, explicit).items():
        if option.value is None:
            continue
        if isinstance(option.value, bool):
            single.append(f"--{name}" if option.value else f"--no-{name}")
        elif isinstance(option.text, str):
            single.append(f"--{name}={option.text}")
        elif repeat_lists:
            single += [f"--{name}={text}" for text in option.text]
        else:
            lists += [f"--{name}", *option.text]
    # A list takes all words that follow until the next option, so positional arguments of the script are before it.
    # What is given by a short name is after it, since the last one counts.
    positional = list(takewhile(_is_value, explicit))
    return [*single, *positional, *lists, *explicit[len(positional) :]]


def _is_value(word: str) -> bool:
    """Whether a word of a command line is a value, such as a negative number, and not an option."""
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None


def without_given(options: Mapping[str, FileOption], explicit: Sequence[str]) -> dict[str, FileOption]:
    """The options of a file that are not given explicitly."""
    given = given_names(explicit)
    return {name: option for name, option in options.items() if name.replace("_", "-") not in given}


def given_names(arguments: Sequence[str]) -> set[str]:
    """The names of the options in a command line, with dashes inside, and without `no-` in front."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    names = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in options if word.startswith("--")}
    return names | {name.removeprefix("no-") for name in names}


def hide_secret_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values, with those of names such as `api_key` hidden, also inside of values; names become texts, as in JSON.

    >>> hide_secret_values({"lr": 0.1, "tracker": {"api_key": "a1b2"}, "sizes": {8: "small"}})
    {'lr': 0.1, 'tracker': {'api_key': '***'}, 'sizes': {'8': 'small'}}
    """
    return {
        str(name): HIDDEN if is_secret(str(name)) and value is not None else _hide_inside(value)
        for name, value in values.items()
    }


def _hide_inside(value: Any) -> Any:
    if isinstance(value, Namespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return hide_secret_values(value)
    return [_hide_inside(each) for each in value] if isinstance(value, list | tuple) else value


def config_variable(values: Mapping[str, Any]) -> dict[str, str | None]:
    """The variable by which ranks know the values of a file."""
    return {CONFIG: json.dumps(values) if values else None}


def config_values(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of a file, as the launcher of this rank has read them."""
    try:
        values = json.loads(environ.get(CONFIG) or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise LaunchError(f"{CONFIG} is not a JSON object: samestep sets this variable itself; run `unset {CONFIG}`")
    return values


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that config.json keeps."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if (name in REPEATED_VARIABLES or _OTHER_VARIABLES.match(name)) and not is_secret(name)
    }


def describe_command() -> dict[str, Any]:
    """How this Python process was started: script or module, and its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = sys.argv[0] if spec is None else spec.name.removesuffix(".__main__")
    return {"script": script, "module": spec is not None, "arguments": hide_secrets(sys.argv[1:])}


def write_launch(folder: Path, launch: Mapping[str, Any]) -> None:
    """Write config.json into the folder of a launcher; a `Run` adds what it knows."""
    write_atomically(folder / CONFIG_FILE, json.dumps(launch, indent=2, default=str) + "\n")


def read_launch(folder: Path | None) -> dict[str, Any]:
    """The config.json in the folder of a launcher; empty if there is none."""
    if folder is None:
        return {}
    try:
        found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
