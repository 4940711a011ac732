"""Repositories of the Hub for transformers' `custom_generate`, which draft where this library is not installed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path

from huggingface_hub import ModelCard

from .. import __version__
from ..generation.drafter import DRAFTERS
from ..generation.tensors.saving import whole_directory
from ..modeling.common.remote_code import REQUIREMENT
from ..training.evaluation.decoding import UNTRAINED
from .bundle import HEADER, bundle
from .card import ENVIRONMENT, marked, write_card


def publish_generate(folder: str | PathLike, drafters: Sequence[str], repo_id: str | None = None) -> Path:
    """Write a directory for `model.generate(..., custom_generate=folder, trust_remote_code=True)`; return its path.

    It has the code of these drafters and of decoding with them, whole or not at all, and a README.md. Code of an
    earlier version is replaced or removed; all else that is there stays, also a README.md of a person.

    Args:
        folder: The directory, which is created.
        drafters: Names as `tokenahead bench` has them: `"ngram"`, `"suffix"`, `"recycling"` and `"lookahead"`;
            `"heads"`, `"eagle"`, `"block"` and `"student"` read trained drafters.
        repo_id: `"owner/name"` on the Hub, for the examples in README.md.

    Raises:
        ValueError: There is no drafter of a name; the message lists them.
        FileExistsError: A file of the code has the name of another one there.
    """
    known = UNTRAINED | {name: kind for name, kind in DRAFTERS.items() if kind.is_apart}
    if unknown := [name for name in drafters if name not in known]:
        raise ValueError(f"--with {unknown[0]}: choose of {', '.join(known)}")
    kinds, imports = {name: known[name] for name in drafters}, ""
    entry, files = bundle("modeling.common.custom_generate")
    for kind in kinds.values():
        module, needed = bundle(kind.__module__.partition(".")[2])
        files, imports = files | needed, f"{imports}from .{module} import {kind.__name__}\n"
    added = ", ".join(f"{name}={kind.__name__}" for name, kind in kinds.items() if name in UNTRAINED)
    imports += f"from .{entry} import LOOK_UPS, generate\n\nLOOK_UPS.update({added})\n"
    imports += "if False:  # transformers follows imports file by file, and reads each once where the first names all\n"
    imports += "".join(f"    from .{Path(name).stem} import *\n" for name in sorted(files))
    files = files | {"generate.py": HEADER.format(source="generate.py") + imports}
    text = ENVIRONMENT.get_template("custom_generate.md.jinja").render(
        about={name: (inspect.getdoc(kind) or "").partition("\n")[0] for name, kind in kinds.items()},
        look_ups=[name for name in kinds if name in UNTRAINED],
        place=repo_id or "path/to/this/directory",
        number=len(files),
        version=__version__,
        requires=f"torch '{REQUIREMENT}'" + " peft" * ("student" in kinds),
    )
    folder, code = Path(folder), "custom_generate"  # where transformers looks for `generate.py`
    earlier = [path.name for path in folder.glob(f"{code}/*.py") if " of tokenahead " in path.open().readline()]
    if foreign := [name for name in files if (folder / code / name).exists() and name not in earlier]:
        raise FileExistsError(f"{folder / code / foreign[0]} is not of tokenahead; name another directory")
    with whole_directory(folder, replaced=[f"{code}/{name}" for name in earlier]) as written:
        (written / code).mkdir()
        for name, source in files.items():
            (written / code / name).write_text(source, encoding="utf-8", newline="")
    with suppress(FileExistsError):  # a person's
        write_card(folder, marked(ModelCard(text)))
    return folder
