"""Where the code of the package lies; everything else is in setup.cfg.

In a clone without symbolic links the five links in tokenahead/ are plain files, and the folders that they name are
given here, so that whole wheels are built there, too. With the links, packages lie where setuptools looks for them, and
an editable install is a path: one that maps folders would not be found from the directory that holds the clone, whose
name is the package's.
"""

from pathlib import Path

from setuptools import setup

FOLDERS = ("configuration", "modeling", "generation", "training", "model_cards")

is_linked = all(Path("tokenahead", folder).is_dir() for folder in FOLDERS)
setup(package_dir={"": "."} if is_linked else {f"tokenahead.{folder}": folder for folder in FOLDERS})
