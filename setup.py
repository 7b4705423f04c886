"""Build steps that pyproject.toml cannot express: recipes inside the package, and a README for package indexes."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithRecipes(build_py):
    """Copy the recipes into the package for `samestep recipe`; an editable install uses them in place."""

    def run(self) -> None:
        """Build the package, then copy."""
        super().run()
        if not self.editable_mode:
            shutil.copytree("recipes", Path(self.build_lib) / "samestep" / "recipes", dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip


def readme() -> str:
    """Return README.md with links to files of the repository as full URLs: a package index has no such files."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", rf"]({source}/\1)", text)


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
