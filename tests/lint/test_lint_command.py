"""`samestep lint`: what it prints, its exit status, settings, formats, repairs and its cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sarif_pydantic import Sarif

from samestep.cli.main import main
from samestep.lint.linter import lint
from tools import rule_pages

REPOSITORY = Path(__file__).resolve().parents[2]
RANK_0 = """\
import os

import torch.distributed as dist

dist.init_process_group("nccl")
rank = int(os.environ["RANK"])
if rank == 0:
    dist.barrier()
"""
CLEAN = """\
import torch.distributed as dist

dist.init_process_group("nccl")
dist.barrier()
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["lint", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_finding_has_its_place_its_evidence_and_its_repair(capsys):
    Path("train.py").write_text(RANK_0)
    code, out, _ = run(capsys, "train.py")
    assert code == 1
    assert "train.py:8:5: error SS301 collective-on-some-ranks\n" in out
    assert "  > 8 |     dist.barrier()\n      |     ^^^^^^^^^^^^^^\n" in out
    assert "`rank` comes from RANK (train.py:6:12)" in out
    assert "this runs only if `rank == 0` (train.py:7:1)" in out
    assert "1 error found in 1 file" in out


def test_the_current_folder_is_read_and_a_clean_one_exits_with_zero(capsys):
    Path("train.py").write_text(CLEAN)
    assert run(capsys) == (0, "no faults found in 1 file\n", "")


def test_an_imported_file_is_read_even_if_only_the_script_is_named(capsys):
    Path("train.py").write_text(
        CLEAN.replace("dist.barrier()", "from helper import wait\nif dist.get_rank() == 0:\n    wait()")
    )
    Path("helper.py").write_text("import torch.distributed as dist\n\n\ndef wait():\n    dist.barrier()\n")
    code, out, _ = run(capsys, "train.py")
    assert code == 1
    assert "train.py:6:5: error SS301" in out
    assert "helper.py:5:5: dist.barrier()" in out
    assert "found in 1 file" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.py"], "missing.py does not exist: pass files and folders to read"),
        (["notes.txt"], "notes.txt is neither a Python file nor a notebook"),
        (["--select", "SS9999"], "unknown rule SS9999 in the command line: `samestep lint --list` shows all rules"),
        (["--ignore", "collective-on-some-rank"], "did you mean SS301 collective-on-some-ranks?"),
        (["--explain", "SS3"], "SS3 is a family of rules: pass the code of one"),
        (["--list", "train.py"], "--list reads no file: leave out train.py"),
        (["--fix", "--diff"], "--diff changes nothing, --fix does: pass one of them"),
        (["--confirm"], "--confirm needs a script"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(capsys, arguments, text):
    Path("train.py").write_text(CLEAN)
    Path("notes.txt").write_text("")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert text in " ".join(err.split())


def test_a_file_that_cannot_be_parsed_is_named_and_the_others_are_read(capsys):
    Path("broken.py").write_text("import torch\ntorch.distributed.init_process_group(:\n")
    Path("train.py").write_text(RANK_0)
    code, out, _ = run(capsys)
    assert code == 2
    assert "broken.py: could not be read: SyntaxError" in out
    assert "train.py:8:5: error SS301" in out


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("# samestep: ignore[SS301] one rank on purpose", 0),
        ("# samestep: ignore[SS101, ss301]", 0),
        ("# samestep: ignore[SS3]", 0),
        ("# samestep: ignore[collective-on-some-ranks]", 0),
        ("# samestep: ignore SS301", 0),
        ("# samestep: ignore", 0),
        ("# samestep: ignore[SS101]", 1),
        ("# samestep: ignore SS101", 1),
        ("# samestep: ignore[]", 1),
        ("# samestep: ignore[SS301", 1),
    ],
)
def test_a_comment_ignores_a_rule_on_its_line(capsys, comment, code):
    Path("train.py").write_text(RANK_0.replace("    dist.barrier()", f"    dist.barrier()  {comment}"))
    assert run(capsys)[0] == code


@pytest.mark.parametrize(
    ("comment", "text"),
    [
        ("ignore[]", "the comment names no rule and ignores nothing: write `# samestep: ignore[SS301] reason`"),
        ("ignore[SS301", "the comment has no closing bracket and ignores nothing: write `# samestep: ignore[SS301]"),
        ("ignore[SS999]", "the comment ignores SS999, which does not exist: `samestep lint --list` shows all rules"),
    ],
)
def test_a_comment_that_ignores_nothing_is_a_warning(capsys, comment, text):
    Path("train.py").write_text(RANK_0.replace("    dist.barrier()", f"    dist.barrier()  # samestep: {comment}"))
    code, out, err = run(capsys, "--json")
    assert code == 1
    assert err.startswith(f"samestep: train.py:8: {text}")
    assert json.loads(out)["warnings"] == [err.removeprefix("samestep: ").strip()]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ('ignore = ["SS3"]', 0),
        ('select = ["SS1"]', 0),
        ('select = ["collective-on-some-ranks"]', 1),
        ('exclude = ["lab"]', 0),
        ('exclude = ["other"]', 1),
        ('per-file-ignores = { "lab/*" = ["SS301"] }', 0),
        ('per-file-ignores = { "lab/other.py" = ["SS301"] }', 1),
    ],
)
def test_settings_come_from_pyproject(capsys, settings, code):
    Path("pyproject.toml").write_text(f"[tool.samestep.lint]\n{settings}\n")
    Path("lab").mkdir()
    Path("lab/train.py").write_text(RANK_0)
    assert run(capsys, "--no-cache")[0] == code


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ('selct = ["SS1"]', "unknown key 'selct'; did you mean 'select'?"),
        ('select = "SS1"', "select must be a list of strings, got 'SS1'"),
        ('ignore = ["SS999"]', "unknown rule SS999 in [tool.samestep.lint]"),
        ("per-file-ignores = 3", "per-file-ignores must be a table of patterns and rules, got 3"),
        ('strict = "yes"', "strict must be true or false, got 'yes'"),
        ("select = [", "pyproject.toml cannot be read"),
    ],
)
def test_wrong_settings_are_an_error(capsys, settings, text):
    Path("pyproject.toml").write_text(f"[tool.samestep.lint]\n{settings}\n")
    code, _, err = run(capsys)
    assert code == 2
    assert text in " ".join(err.split())


def test_json_has_findings_counts_and_problems(capsys):
    Path("train.py").write_text(RANK_0)
    Path("broken.py").write_text("import torch\ntorch.distributed.init_process_group(:\n")
    code, out, _ = run(capsys, "--json")
    assert code == 2
    result = json.loads(out)
    (finding,) = result["findings"]
    assert (finding["code"], finding["location"]["file"], finding["location"]["line"]) == ("SS301", "train.py", 8)
    assert result["counts"] == {"error": 1, "warning": 0, "note": 0}
    assert list(result["problems"]) == ["broken.py"]


def test_sarif_follows_its_model(capsys):
    Path("a train.py").write_text(RANK_0)
    Path("broken.py").write_text("import torch\ntorch.distributed.init_process_group(:\n")
    assert run(capsys, "--format", "sarif", "--output", "out.sarif")[:2] == (2, "")
    text = Path("out.sarif").read_text()
    log = Sarif.model_validate_json(text)
    (each,) = log.runs
    (result,) = each.results
    assert result.rule_id == "SS301"
    assert each.tool.driver.rules[result.rule_index].id == "SS301"
    assert result.locations[0].physical_location.artifact_location.uri == "a%20train.py"
    assert result.locations[0].physical_location.region.start_line == 8
    assert (
        "SyntaxError"
        in json.loads(text)["runs"][0]["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    )


def test_github_annotations_are_escaped(capsys):
    Path("a,b.py").write_text(RANK_0)
    _, out, _ = run(capsys, "--format", "github")
    assert out.startswith(
        "::error file=a%2Cb.py,line=8,col=5,title=SS301 collective-on-some-ranks::`barrier` is called"
    )
    assert "%0ARepair: " in out
    assert out.count("\n") == 1


def test_rules_are_listed_and_explained(capsys):
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert "SS301  collective-on-some-ranks " in out
    code, out, _ = run(capsys, "--explain", "collective-on-some-ranks")
    assert code == 0
    assert out.startswith("SS301 collective-on-some-ranks (error)\n\nA collective")
    assert "Bad:" in out
    assert len(json.loads(run(capsys, "--list", "--json")[1])["rules"]) == len(run(capsys, "--list")[1].splitlines())


def test_a_comment_in_the_last_line_of_a_statement_ignores_it(capsys):
    Path("train.py").write_text(RANK_0.replace("dist.barrier()", "dist.barrier(\n    )  # samestep: ignore[SS301]"))
    assert run(capsys)[0] == 0


def write_notebook(*cells: str) -> None:
    found = [{"cell_type": "markdown", "source": ["text"]}]
    found += [{"cell_type": "code", "source": each.splitlines(keepends=True)} for each in cells]
    Path("train.ipynb").write_text(json.dumps({"cells": found, "nbformat": 4}))


@pytest.mark.parametrize(
    "first",
    [
        "%pip list",
        "%%time",
        "files = !ls",
        "x = %time 3",
        "print?",
        "!nvidia-smi",
        "rows = (7\n  % 4)",
        "!pip install \\\n  torch",
    ],
)
def test_notebooks_are_read_and_findings_name_the_cell_and_its_line(capsys, first):
    write_notebook("import torch", f"{first}\n{RANK_0}")
    line = 9 + first.count("\n")
    code, out, _ = run(capsys)
    assert code == 1
    assert f"train.ipynb:cell 3:{line}:5: error SS301" in out
    assert f"  > {line} |     dist.barrier()" in out
    assert f"this runs only if `rank == 0` (train.ipynb:cell 3:{line - 1}:1)" in " ".join(out.split())


def test_formats_for_programs_name_the_cell_of_a_notebook(capsys):
    write_notebook("import torch", RANK_0)
    location = json.loads(run(capsys, "--json")[1])["findings"][0]["location"]
    assert (location["line"], location["cell"], location["cell_line"]) == (9, 3, 8)
    assert location["source"] == "dist.barrier()"
    result = json.loads(run(capsys, "--format", "sarif")[1])["runs"][0]["results"][0]
    assert result["message"]["text"].startswith("Cell 3, line 8: `barrier` is called on some ranks only.")
    assert "region" not in result["locations"][0]["physicalLocation"]
    _, out, _ = run(capsys, "--format", "github")
    assert out.startswith("::error file=train.ipynb,title=SS301 collective-on-some-ranks::Cell 3, line 8: `barrier`")


def test_a_comment_in_a_cell_ignores_a_rule_there(capsys):
    write_notebook("import torch", RANK_0.replace("dist.barrier()", "dist.barrier()  # samestep: ignore[SS301]"))
    assert run(capsys)[0] == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not a notebook: JSONDecodeError"),
        ('{"cells": [{"cell_type": "code"}]}', "not a notebook: KeyError: 'source'"),
        ("[]", "not a notebook: TypeError"),
    ],
)
def test_a_file_that_is_no_notebook_is_named(capsys, text, problem):
    Path("train.ipynb").write_text(text)
    code, out, _ = run(capsys)
    assert code == 2
    assert f"train.ipynb: could not be read: ValueError: {problem}" in out


def test_a_cell_that_cannot_be_parsed_is_named(capsys):
    write_notebook("import torch", RANK_0 + "x = = 3")
    code, out, _ = run(capsys)
    assert code == 2
    assert "train.ipynb: could not be read: SyntaxError: invalid syntax (cell 3, line 9)" in out


def test_cells_of_other_languages_are_left_out(capsys):
    cells = [{"cell_type": "code", "source": ["%%bash\n", "if rank; then\n", "fi\n"]}]
    cells.append({"cell_type": "code", "source": RANK_0.splitlines(keepends=True)})
    Path("train.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert run(capsys)[0] == 1


def test_a_folder_that_cannot_be_read_is_named(capsys, monkeypatch):
    Path("locked").mkdir()
    contents = Path.iterdir

    def iterdir(folder: Path):
        if folder.name == "locked":
            raise PermissionError(13, "Permission denied")
        return contents(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    status, out, err = run(capsys)
    assert status == 2
    assert "locked: could not be read" in out + err


def test_a_file_may_declare_its_encoding(capsys):
    Path("train.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + RANK_0.encode())
    code, out, _ = run(capsys)
    assert code == 1
    assert "train.py:10:5: error SS301" in out


def test_an_expression_that_is_too_deep_for_python_hides_no_other_finding(capsys):
    Path("deep.py").write_text(RANK_0 + "x = y" + ".a" * 5_000 + "\n")
    Path("train.py").write_text(RANK_0)
    code, out, _ = run(capsys)
    assert code in (1, 2)
    assert "train.py:8:5: error SS301" in out


def test_of_modules_with_one_name_the_nearest_is_imported(capsys):
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "train.py").write_text(CLEAN + "from utils import wait\nif dist.get_rank() == 0:\n    wait()\n")
    Path("a/utils.py").write_text("import torch.distributed as dist\n\n\ndef wait():\n    dist.barrier()\n")
    Path("b/utils.py").write_text("import torch.distributed as dist\n\n\ndef wait():\n    print('alone')\n")
    _, out, _ = run(capsys)
    assert "a/train.py:7:5: error SS301" in out
    assert "b/train.py" not in out


def test_the_cache_is_used_until_a_file_changes(monkeypatch):
    Path("train.py").write_text("from lab import helper\n" + RANK_0)
    Path("lab").mkdir()
    Path("lab/__init__.py").write_text("")
    Path("lab/helper.py").write_text("import torch\n")
    first = lint([Path()], cache_folder=Path())
    assert (Path(".samestep_cache/.gitignore")).read_text() == "*\n"

    def fail(*arguments: object) -> None:
        raise AssertionError("linted again")

    with monkeypatch.context() as patch:
        patch.setattr("samestep.lint.linter.follow", fail)
        second = lint([Path()], cache_folder=Path())
    assert (second.findings, second.problems) == (first.findings, {})
    assert len(first.findings) == 1
    Path("train.py").write_text("from lab import helper\n" + CLEAN)
    assert lint([Path()], cache_folder=Path()).findings == []
    Path(".samestep_cache/lint.json").write_text('{"key": 1')
    assert lint([Path()], cache_folder=Path()).findings == []


def test_lint_does_not_import_torch():
    Path("train.py").write_text(RANK_0)
    program = (
        "import sys\nfrom samestep.cli.main import main\nmain(['lint', 'train.py'])\nassert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_page_of_rules_is_up_to_date():
    page = REPOSITORY / "docs" / "rules.md"
    assert page.read_text() == rule_pages.page(), "run `python -m tools.rule_pages --write docs/rules.md`"
