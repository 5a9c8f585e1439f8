"""Commands whose help shows no type beside a flag: a flag takes no value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click.core import Context, Parameter


class PlainCommand(TyperCommand):
    """A command with plain flags."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        """Return the parameters; see the module."""
        return _without_flag_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The command of all commands, with plain flags."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        """Return the parameters; see the module."""
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(parameters: list[Parameter]) -> list[Parameter]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_bool_flag:
            parameter.metavar = ""
    return parameters
