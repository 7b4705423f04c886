"""What pyproject.toml cannot say: recipes lie beside the sources, and in an installed samestep inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the recipes into the package, for `samestep recipe`; an editable install finds them where they are."""

    def run(self) -> None:
        """Build as ever, then copy."""
        super().run()
        if not self.editable_mode:
            shutil.copytree("recipes", Path(self.build_lib) / "samestep" / "recipes", dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip


setup(cmdclass={"build_py": BuildWithRecipes})
