"""Values of the options: packaged config.yaml < the file in RAG_SERVICE_CONFIG < environment.

An empty variable counts as unset. A secret may also come from a file named by NAME_FILE, and
never from a config file. The old name of a renamed option still works, with a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rag_service.config.explanations import did_you_mean, explain, near_variables
from rag_service.config.option_list import PREFIXES, Option, option_of, options
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError
from rag_service.states import LayoutMode

log = logging.getLogger(__name__)

PACKAGED_CONFIG = Path(__file__).with_name("config.yaml")
CONFIG_VARIABLE = "RAG_SERVICE_CONFIG"

Tree = dict[str, Any]


@cache
def get_settings() -> Settings:
    """Return the settings of this process, read once. Raises ConfigurationError."""
    return load_settings()


def load_settings() -> Settings:
    """Read the files and the environment.

    Raises ConfigurationError, which names every bad key and its variable.
    """
    own = _own_file()
    _refuse_secrets(own)
    tree = _merge(_merge(packaged_defaults(), own), _environment_tree())
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error


def packaged_defaults() -> Tree:
    """Return the default of every option, as a tree."""
    return _read_yaml(PACKAGED_CONFIG)


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return the value at this path of a tree, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def is_chosen(key: str) -> bool:
    """Return whether the environment or the user's own file sets this option."""
    option = option_of(key)
    return _from_environment(option) is not None or value_at(_own_file(), option.path) is not None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names that are not settings but look like one: by prefix, or nearly the same."""
    known = _known_variables()
    return sorted(
        name
        for name in environment
        if name not in known and (name.startswith(PREFIXES) or near_variables(name))
    )


def warn_of_unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Log each of unknown_variables() with the names that may have been meant."""
    unknown = unknown_variables(environment)
    for name in unknown:
        hint = did_you_mean(near_variables(name))
        log.warning("The variable %s is not a setting of rag_service.%s", name, hint)
    return unknown


def current_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without unknown variables and with the new names of renamed ones.

    Processes that are started with it do not repeat the warnings of this process.
    """
    unknown = unknown_variables(environment)
    kept = {name: value for name, value in environment.items() if name not in unknown}
    for option in options():
        for end in ("", "_FILE") if option.old_env else ():
            value = kept.pop(f"{option.old_env}{end}", "")
            if value and not kept.get(option.env + end):
                kept[option.env + end] = value
    return kept


def warn_of_doubtful_settings(settings: Settings) -> None:
    """Log settings that are allowed but probably not intended."""
    if settings.ocr.transport == "runpod" and settings.ocr.base_url is not None:
        log.warning(
            "ocr.transport is runpod: pages go to the RunPod endpoint, and ocr.base_url "
            "(GLMOCR_BASE_URL) is not used."
        )
    if settings.ocr.layout == LayoutMode.REGIONS and settings.layout.model == "cdla":
        log.warning(
            "ocr.layout is regions and layout.model is cdla. The boxes of cdla are too narrow on "
            "some pages, and text outside them is lost. Set layout.model to pp_doclayout_v3 "
            "(RAG_SERVICE_LAYOUT_MODEL), or ocr.layout to auto (RAG_SERVICE_OCR_LAYOUT)."
        )


def _known_variables() -> set[str]:
    return {name for option in options() for name in option.variables} | {CONFIG_VARIABLE}


def _environment_tree() -> Tree:
    tree: Tree = {}
    for option in options():
        value = _from_environment(option)
        if value is not None:
            _put(tree, option.path, value)
    return tree


def _from_environment(option: Option) -> Any:
    for name in filter(None, (option.env, option.old_env)):
        value = _variable(name, secret=option.secret)
        if value is None:
            continue
        if name != option.env:
            _warn_of_old_name(name, option.env)
        elif option.old_env and os.environ.get(option.old_env):
            _warn_of_ignored_name(option.old_env, option.env)
        return [part.strip() for part in value.split(",")] if option.is_list else value
    return None


def _variable(name: str, *, secret: bool) -> str | None:
    value = os.environ.get(name) or None
    if value is None and secret and (file := os.environ.get(f"{name}_FILE")):
        try:
            return Path(file).read_text().strip() or None
        except OSError as error:
            raise ConfigurationError(f"{name}_FILE: cannot read {file}: {error}") from error
    return value


@cache
def _warn_of_old_name(old: str, new: str) -> None:
    """Log once per process that a name has changed."""
    log.warning("%s is now %s; the old name still works", old, new)


@cache
def _warn_of_ignored_name(old: str, new: str) -> None:
    """Log once per process that an old name was ignored because the new one is set too."""
    log.warning("%s is ignored, because its new name %s is set too", old, new)


def _own_file() -> Tree:
    """Return the user's own file, with the old keys of renamed options replaced."""
    own = os.environ.get(CONFIG_VARIABLE)
    tree = _read_yaml(Path(own).expanduser()) if own else {}
    for option in options():
        if option.old_path and option.old_key:
            _rename(tree, option.old_path, option)
    return tree


def _rename(tree: Tree, old: tuple[str, ...], option: Option) -> None:
    """Move the value of an old key to the new key, unless that is set too."""
    section = value_at(tree, old[:-1])
    if not isinstance(section, dict) or old[-1] not in section:
        return
    value = section.pop(old[-1])
    if value_at(tree, option.path) is None:
        _warn_of_old_name(".".join(old), option.key)
        _put(tree, option.path, value)
    else:
        _warn_of_ignored_name(".".join(old), option.key)


def _read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: the file must contain keys and values.")
    return tree


def _put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree[name] = tree.get(name) or {}
        tree = tree[name]
    tree[path[-1]] = value


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    """Return base with own's values over it. An empty section of own keeps the base's."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        if isinstance(below, dict) and (value is None or isinstance(value, Mapping)):
            merged[key] = _merge(below, value or {})
        else:
            merged[key] = value
    return merged


def _refuse_secrets(own: Tree) -> None:
    for option in options():
        if option.secret and value_at(own, option.path) is not None:
            raise ConfigurationError(
                f"{option.key}: a secret does not belong in a config file. "
                f"Set {option.env}, or {option.env}_FILE to a file that contains it."
            )
