"""From command-line overrides to a `Config`, by Hydra's compose API.

Config groups are the folders of ``configs/``, and of a folder of the user's own, which is searched first:
``placement=split`` takes ``placement/split.yaml``, ``algorithm.batch.prompts=64`` sets one key. Hydra only
merges; keys and values are checked against the dataclasses of `hpcflow.config`, so that a misspelt key is
refused wherever it was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from hpcflow.config import Config, from_dict, load, share, to_dict
from hpcflow.schema import ConfigError, Problem, nearest

POOLS = "placement.pools"
"""Given as a whole on the command line it replaces the pools, where Hydra would merge the two."""

SCHEMES = ("package:", "random:", "shape:", "reasoning_gym:")
"""Beginnings of paths that are no files."""


def compose(overrides: list[str], config_dir: Path | str | None = None) -> Config:
    """The config of ``overrides``, e.g. ``["experiment=ppo_quickstart", "iterations=2"]``.

    Relative paths of data and models are looked for in the working directory, then among hpcflow's own files,
    and become absolute. ValueError names each unknown group, option or key and the nearest valid ones, and
    each wrong value with one that works.
    """
    with _hydra(config_dir):
        parsed = _parse(overrides)
        words = [word for override in parsed for word in _hydra_words(override)]
        config = _config(hydra.compose("config", words))
        experiment = next((o.value() for o in parsed if o.key_or_group == "experiment"), None)
        return dataclasses.replace(config, experiment=experiment)


def overlay(base: Path, overrides: list[str], config_dir: Path | str | None = None) -> Config:
    """The resolved config in file ``base``, changed by ``overrides``: what ``--resume`` runs.

    A group (``placement=split``) replaces its whole section. The run's own experiment may be named again, as
    the script that started the run does; another one is refused.
    """
    config = load(base)
    tree = to_dict(config)
    if config.placement.written is not None:
        tree["placement"].update(pools=tree["placement"]["written"], written=None)
    with _hydra(config_dir):
        words = []
        for override in _parse(overrides):
            key = override.key_or_group
            if key == "experiment" and override.value() == config.experiment:
                continue
            if override.is_delete() or key == "experiment":
                own = f"experiment={config.experiment}" if config.experiment else "single keys"
                raise ValueError(
                    f"{override.input_line}: a run continues with its own config; works: {own}, single "
                    "keys, placement=, protocol=, cluster=, run="
                )
            if _is_group(key):
                tree.pop(key, None)
                words.append("+" + override.input_line.lstrip("+"))
            else:
                if _replaces_pools(override):
                    tree["placement"]["pools"] = {}
                words.append("++" + override.input_line.lstrip("+"))
        changes = hydra.compose(None, words)
    return _config(OmegaConf.merge(OmegaConf.create(tree), changes))


class UserConfigs(SearchPathPlugin):
    """Puts the user's own folder before hpcflow's in Hydra's search path."""

    folder: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if UserConfigs.folder is not None:
            search_path.prepend("user", f"file://{UserConfigs.folder}")


Plugins.instance().register(UserConfigs)


@contextlib.contextmanager
def _hydra(config_dir: Path | str | None) -> Iterator[None]:
    """Hydra over the user's folder, if there is one, and hpcflow's own; its errors become ValueErrors."""
    folder = Path(config_dir).expanduser().resolve() if config_dir else None
    own = share("configs").resolve()
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--config-dir={config_dir}: there is no such folder; works: --config-dir={own}")
    UserConfigs.folder = folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra 1.3 under OmegaConf 2.4 warns of its own calls
            with hydra.initialize_config_dir(str(own), version_base="1.3"):
                yield
    except MissingConfigException as error:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        works = nearest(choice, error.options or []).replace(", ", f", {group}=")
        raise ConfigError([Problem(group, choice, "there is no such config", f"{group}={works}")]) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(f"the config cannot be composed: {error}") from error
    finally:
        UserConfigs.folder = None


def _parse(overrides: list[str]) -> list[Override]:
    """The overrides, the last one of each group only: a script's choices yield to those typed after them."""
    parsed: dict[str, Override] = {}
    for text in overrides:
        override = _parse_one(text)
        if override.is_sweep_override():
            raise ValueError(
                f"{text}: one run takes one value; works: {override.key_or_group}="
                f"{text.partition('=')[2].partition(',')[0]}"
            )
        key = override.key_or_group
        if "." not in key and not _is_group(key) and key not in _top_level():
            near = nearest(key, _top_level() | set(_groups()))
            raise ConfigError([Problem(key, text.partition("=")[2], "there is no such key or group", near)])
        parsed[key if _is_group(key) else text] = override
    return list(parsed.values())


def _parse_one(text: str) -> Override:
    parser = OverridesParser.create()
    key, _, value = text.partition("=")
    # Hydra wants quotes, which a shell eats, around what holds = or ?: paths of tasks and random models do.
    quoted = [] if not value or set(value) & set("[]{}()'\"\\") else [f"{key}='{value}'"]
    for attempt in [text, *quoted]:
        try:
            return parser.parse_override(attempt)
        except HydraException as caught:
            error = caught
    raise ValueError(f"{text!r} is not an override; works: key=value, e.g. iterations=2") from error


def _hydra_words(override: Override) -> list[str]:
    """What Hydra is told. Keys are set or added alike: whether they exist is for the dataclasses to say."""
    text = override.input_line
    if override.is_delete() or _is_group(override.key_or_group):
        return [text]
    text = "++" + text.lstrip("+")
    return ["~" + POOLS, text] if _replaces_pools(override) else [text]


def _replaces_pools(override: Override) -> bool:
    return override.key_or_group == POOLS and isinstance(override.value(), dict)


def _groups() -> list[str]:
    folders = [share("configs"), UserConfigs.folder]
    return [p.name for folder in folders if folder is not None for p in folder.iterdir() if p.is_dir()]


def _is_group(key: str) -> bool:
    return bool(GlobalHydra.instance().config_loader().get_group_options(key))


def _top_level() -> set[str]:
    return {f.name for f in dataclasses.fields(Config)}


def _config(merged: DictConfig) -> Config:
    """The checked config, with absolute paths."""
    try:
        tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        key = str(error).partition("'")[2].partition("'")[0]
        raise ConfigError(
            [Problem(error.full_key, f"${{{key}}}", f"there is no {key}", f"{key}=<value>")]
        ) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"the config cannot be resolved: {error}") from error
    config = from_dict(tree)
    located = {name: _locate(getattr(config.data, name)) for name in ("train", "eval", "pretrain")}
    data = dataclasses.replace(config.data, **located)
    models = {
        name: dataclasses.replace(spec, path=_locate(spec.path)) for name, spec in config.models.items()
    }
    return dataclasses.replace(config, data=data, models=models)


def _locate(path: str | None) -> str | None:
    """Absolute, if there is such a file or folder here or among hpcflow's own; else as it is."""
    if path is None or path.startswith(SCHEMES):
        return path
    for candidate in (Path(path).expanduser(), share("configs").resolve().parent / path):
        if candidate.exists():
            return str(candidate.resolve())
    return path
