"""What pyproject.toml cannot say of the archive of sources: it has the links in canzona_compile/ as links.

Setuptools follows links or leaves them out. A copy of passes/ inside of canzona_compile/ would be a second one to edit;
without any, code and tests run only where the archive was installed.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class SourcesWithLinks(sdist):
    """Makes the archive, with the links that lead from the package to folders of the repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for link in sorted(path for path in Path("canzona_compile").iterdir() if path.is_symlink()):
            Path(base_dir, link).symlink_to(link.readlink())


setup(cmdclass={"sdist": SourcesWithLinks})
