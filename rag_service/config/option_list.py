"""Every option of the tree as a flat list, with its key and its environment variables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from rag_service.config.options import Section, Settings

PREFIXES = ("RAG_SERVICE_", "GLMOCR_", "OCR_", "RUNPOD_")


@dataclass(frozen=True)
class Option:
    """One leaf of the tree."""

    path: tuple[str, ...]
    env: str
    description: str
    area: str
    expert: bool
    secret: bool
    is_list: bool
    old_path: tuple[str, ...] | None

    @property
    def key(self) -> str:
        """The name in a config file, with dots."""
        return ".".join(self.path)

    @property
    def old_key(self) -> str | None:
        """The key before the option was renamed, or None."""
        return ".".join(self.old_path) if self.old_path else None

    @property
    def old_env(self) -> str | None:
        """The variable before the option was renamed, or None if it has the same name."""
        old = derived_env(self.old_path) if self.old_path else None
        return old if self.env == derived_env(self.path) else None

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set the option; of a secret also those that name a file."""
        names = [name for name in (self.env, self.old_env) if name]
        return tuple(names + [f"{name}_FILE" for name in names if self.secret])


@cache
def options() -> tuple[Option, ...]:
    """Return every option in the order of config.yaml."""
    return tuple(_walk(Settings, ()))


def option_of(key: str) -> Option:
    """Return the option with this key. Raises KeyError if there is none."""
    return {option.key: option for option in options()}[key]


def _walk(section: type[Section], path: tuple[str, ...]) -> Iterator[Option]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, (*path, name))
        else:
            yield _option(section, (*path, name), field)


def _option(section: type[Section], path: tuple[str, ...], field: FieldInfo) -> Option:
    extra: Any = field.json_schema_extra
    return Option(
        path=path,
        env=extra["env"] or derived_env(path),
        description=field.description or "",
        area=section.area,
        expert=extra["expert"],
        secret=_mentions(field.annotation, SecretStr),
        is_list=get_origin(field.annotation) is list,
        old_path=tuple(extra["was"].split(".")) if extra["was"] else None,
    )


def derived_env(path: tuple[str, ...]) -> str:
    """Return the variable of an option that has no name of its own."""
    return "RAG_SERVICE_" + "_".join(path).upper()


def _mentions(annotation: Any, wanted: type) -> bool:
    return annotation is wanted or any(_mentions(part, wanted) for part in get_args(annotation))
