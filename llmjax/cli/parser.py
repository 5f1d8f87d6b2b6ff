"""Command lines out of settings: every setting is a flag, and every error is one line."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

from llmjax.config import Alias, EngineConfig
from llmjax.config_file import Configs, load_configs
from llmjax.errors import ConfigError
from llmjax.settings import Setting, nearest, parse_text, settings_of

EPILOG = """A flag wins over the file of --config, the file over the default. TOKENS may be written 8k (8,000) or 8K
(8,192), BYTES also 4GB or 4GiB; an ITEM flag is repeated or, where items hold no commas, given a,b,c."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are ``ConfigError`` and whose flags may be written with underscores."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter)
        self._optionals.title = "options"
        # Taken out of the arguments before any parser sees them (llmjax.cli.run): here for --help alone.
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The values that were given: one that was not given is not an attribute of the result.

        Raises:
            ConfigError: a flag is unknown (the nearest right one is named) or its value is wrong.
        """
        values, unknown = self.parse_known_intermixed_args(_with_dashes(argv))
        if unknown:
            name = unknown[0].partition("=")[0]
            hint = nearest(name, self._option_string_actions) if name.startswith("-") else ""
            raise ConfigError(f"unknown {'flag' if name.startswith('-') else 'argument'} {name}{hint} (see --help)")
        return values

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def add_settings(parser: Parser, settings: Iterable[Setting], *, section: str) -> None:
    """Adds a flag for every setting.

    Args:
        section: heading in ``--help`` of the settings before the first that brings its own.
    """
    group = None
    for setting in settings:
        if group is None or setting.section:
            group = parser.add_argument_group(setting.section or section)
        _add_setting(group, setting)


def add_config_flags(parser: Parser, *classes: type, without: Collection[str] = ()) -> None:
    """Adds ``--config`` and the flags of settings classes, ``EngineConfig`` if none is named.

    Args:
        without: settings that get no flag.
    """
    parser.epilog = EPILOG
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these settings, or the name of a bundled one (smollm2)"
    )
    for cls in classes or (EngineConfig,):
        add_settings(parser, settings_of(cls, without=without).values(), section=cls.__name__)


def configs_of(values: argparse.Namespace, *classes: type, model: str | None = None) -> Configs:
    """The settings that flags, the file of ``--config`` and the defaults give.

    Args:
        values: what ``Parser.parse`` returned.
        classes: the settings classes whose flags were added, ``EngineConfig`` if none is named.
        model: the positional model, if the command has one and it was given.

    Raises:
        ConfigError: a value is wrong, or the model is given twice.
    """
    names = {name for cls in classes or (EngineConfig,) for name in settings_of(cls)}
    given = {name: value for name, value in vars(values).items() if name in names}
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigError(f"the model is given twice: {model} and --model {given['model']}")
        given["model"] = model
    return load_configs(values.config, given)


def _add_setting(group: Any, setting: Setting) -> None:
    help = setting.help.replace("%", "%%") + _default(setting)
    plain = [setting.flag, *(alias.flag for alias in setting.aliases if alias.value is None and alias.unit == 1)]
    common = {"dest": setting.name, "default": argparse.SUPPRESS}
    if setting.kind is bool:
        group.add_argument(*plain, **common, action=argparse.BooleanOptionalAction, help=help)
    else:
        action = _Extend if setting.kind is list else "store"
        parse = _reader(setting, Alias(setting.flag))
        group.add_argument(*plain, **common, action=action, type=parse, metavar=_metavar(setting), help=help)
    for alias in setting.aliases:
        if alias.value is not None:
            short = f"the same as {_flag_for(setting, alias.value)}"
            group.add_argument(alias.flag, **common, action="store_const", const=alias.value, help=short)
        elif alias.unit != 1:
            short = f"the same as {setting.flag}, in {_UNITS[alias.unit]}"
            parse = _reader(setting, alias)
            group.add_argument(alias.flag, **common, type=parse, metavar=_UNITS[alias.unit], help=short)


_UNITS = {2**10: "KiB", 2**20: "MiB", 2**30: "GiB"}


def _reader(setting: Setting, alias: Alias) -> Callable[[str], Any]:
    """The function that argparse calls on a flag's text; its ``ConfigError`` passes through argparse."""

    def read(text: str) -> Any:
        if alias.unit == 1:
            return parse_text(setting, text, source=alias.flag)
        if not re.fullmatch(r"[0-9]+", text):
            raise ConfigError(f"{alias.flag} must be a number of {_UNITS[alias.unit]}, not {text!r}")
        return int(text) * alias.unit

    return read


def _flag_for(setting: Setting, value: Any) -> str:
    if setting.kind is bool:
        return setting.flag if value else f"--no-{setting.flag[2:]}"
    return f"{setting.flag} {value}"


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    if setting.unit:
        return setting.unit.upper()
    return {int: "N", float: "X", str: "TEXT", list: "ITEM", dict: "JSON"}[setting.kind]


def _default(setting: Setting) -> str:
    if "(default" in setting.help:
        return ""
    default = setting.default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    elif default is None or default in ("", (), [], {}):
        shown = "none"
    elif setting.kind is list:
        shown = (setting.separator or " ").join(map(str, default))
    else:
        shown = str(default)
    return f" (default: {shown.replace('%', '%%')})"


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """``--max_model_len=8`` as ``--max-model-len=8``; what follows ``--`` stays as it is."""
    end = argv.index("--") if "--" in argv else len(argv)
    named = [argument.partition("=") for argument in argv[:end]]
    dashed = [
        name.replace("_", "-") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in named
    ]
    return [*dashed, *argv[end:]]


class _Extend(argparse.Action):
    """Adds the items of a repeated flag; argparse's own "extend" would start from the suppressed default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])


class _Formatter(argparse.HelpFormatter):
    """Names a flag's value once, after its last spelling."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flags = ", ".join(action.option_strings)
        return flags if action.nargs == 0 else f"{flags} {self._format_args(action, action.dest.upper())}"

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        positional = "".join(f" {self._format_args(a, a.dest)}" for a in actions if not a.option_strings)
        return f"usage: {usage or f'{self._prog} [options]{positional}'}\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
