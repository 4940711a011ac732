"""Where the console script `tokenahead` enters: arguments are read before PyTorch is.

`import tokenahead` takes seconds, for it registers its classes with transformers. Here the package stands among the
modules before it is run, so that `tokenahead.cli` can be imported alone; it is run once a command is to be.
"""

import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path


def main() -> None:
    """Read the arguments, answer those that need no more (`--help`, `--version`, errors), and run the command."""
    spec = find_spec("tokenahead")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("tokenahead", name="tokenahead")
    package, run = module_from_spec(spec), spec.loader.exec_module
    sys.modules["tokenahead"] = package
    if not (Path(package.__path__[0]) / "training").is_dir():  # a clone without symbolic links: it says where to look
        run(package)
    from tokenahead import cli

    cli.main(enter=lambda: None if hasattr(package, "__version__") else run(package))
