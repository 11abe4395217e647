"""The copy of code and config that a job runs, made at submission: edits meanwhile do not reach a queued job.

``RUN/code`` holds hpcflow with its configs, the modules of one's own that the config names, the script, and
a link to the Python environment, which is not copied.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hpcflow
from hpcflow.config import Config, share, to_dict

DOTTED = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")


def make(run: Path, script: str, name: str, config: Config) -> Path:
    """Fill RUN/code; the path of the script there. A copy of an earlier submission is replaced."""
    code = run / "code"
    old = code.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if code.exists():
        code.rename(old)
    shutil.copytree(Path(hpcflow.__file__).parent, code / "hpcflow", ignore=CACHES)
    for source in own_modules(config):
        if source.is_dir():
            shutil.copytree(source, code / source.name, ignore=CACHES)
        else:
            shutil.copy(source, code)
    (code / ".venv").symlink_to(sys.prefix)
    path = code / "sbatch" / f"{name}.sh"
    path.parent.mkdir()
    path.write_text(script)
    path.chmod(0o755)
    shutil.rmtree(old, ignore_errors=True)
    return path


def moved(config: Config, run: Path) -> Config:
    """The config whose prompts of hpcflow's own are those of the copy in RUN/code."""
    own, copy = str(share("configs").resolve()), str(run / "code" / "hpcflow" / "_share" / "configs")
    data = {key: getattr(config.data, key) for key in ("train", "eval")}
    data = {key: value.replace(own, copy) if value else value for key, value in data.items()}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


def own_modules(config: Config) -> list[Path]:
    """Files and package folders of the functions that the config names, beside those installed."""
    found = []
    matches = map(DOTTED.fullmatch, _texts(to_dict(config)))
    for name in sorted({match[1] for match in matches if match}):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if name == "hpcflow" or spec is None or not spec.origin or not spec.has_location:
            continue
        origin = Path(spec.origin).resolve()
        installed = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
        if not any(origin.is_relative_to(Path(folder).resolve()) for folder in installed):
            found.append(origin.parent if origin.name == "__init__.py" else origin)
    return found


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)
