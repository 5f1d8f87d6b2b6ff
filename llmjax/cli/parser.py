"""Command lines out of settings: every setting is a flag, and every error is one line."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from llmjax.config import Alias, EngineConfig, ModelSettings
from llmjax.config_file import Configs, load_configs
from llmjax.errors import ConfigError
from llmjax.migration.answers import ForeignFlag, Takes, merge
from llmjax.migration.candle_vllm import MODEL_TYPES
from llmjax.migration.tables import FLAGS
from llmjax.settings import Setting, nearest, parse_text, settings_of

NOTES = "notes"  # where the values of a command line hold what is to be said of its flags
REPEATED = "repeated"  # all values of settings that were given more than once, by name
WINNERS = "winners"  # and by which spellings the settings were given that win over others
FLAG_SIMILARITY = 0.7  # below it, a flag that is suggested for an unknown one is rarely what was meant

# The settings of an engine and a server that --help shows; --help all shows the others too.
COMMON = frozenset(
    {
        "model",
        "gguf_file",
        "tokenizer",
        "chat_template",
        "offline",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "speculative_config",
        "device",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "served_model_name",
        "host",
        "port",
        "api_key",
        "allowed_hosts",
        "allowed_origins",
        "tool_call_parser",
        "reasoning_parser",
        "log_level",
    }
)

EPILOG = """A flag wins over the file of --config, the file over the default. TOKENS may be written 8k (8,000) or 8K
(8,192), BYTES also 4GB or 4GiB; an ITEM flag is repeated or, where items hold no commas, given a,b,c.
Flags of vLLM, candle-vLLM and llama-server are known too: docs/flags.md says what becomes of each."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are ``ConfigError`` and whose flags may be written with underscores.

    Attributes:
        foreign: the settings that flags of other programs may mean; None: they are not known.
        rows: those flags.
    """

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter, add_help=False
        )
        self._optionals.title = "options"
        self.hidden: set[str] = set()  # settings that only --help all shows
        self.add_argument("-h", "--help", nargs="?", metavar="all", action=_Help, help="show this, or all flags")
        self.foreign: Mapping[str, Setting] | None = None
        self.rows: Sequence[ForeignFlag] = FLAGS
        # Taken out of the arguments before any parser sees them (llmjax.cli.run): here for --help alone.
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The values that were given: one that was not given is not an attribute of the result.

        Raises:
            ConfigError: a flag is unknown (the nearest right one is named) or its value is wrong.
        """
        self._add_foreign()
        values, unknown = self.parse_known_intermixed_args(self._with_switches(_with_dashes(_with_objects(argv))))
        if unknown:
            name = unknown[0].partition("=")[0]
            shown = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            hint = nearest(name, shown, similarity=FLAG_SIMILARITY) if name.startswith("-") else ""
            raise ConfigError(f"unknown {'flag' if name.startswith('-') else 'argument'} {name}{hint} (see --help)")
        return values

    def flags(self) -> frozenset[str]:
        """All that the command knows, those of other programs among them."""
        self._add_foreign()
        return frozenset(self._option_string_actions)

    def _with_switches(self, argv: Sequence[str]) -> list[str]:
        """``--x false`` as ``--no-x`` and ``--x=true`` as ``--x``, where ``--x`` is a switch, as older versions of vLLM
        have them. Of a command that takes texts, a word after ``--x`` is one of these."""
        actions = self._option_string_actions
        takes_texts = any(action.nargs in ("*", "+") for action in self._get_positional_actions())
        end = argv.index("--") if "--" in argv else len(argv)
        arguments = list(argv[:end])
        written: list[str] = []
        while arguments:
            name, equals, word = arguments.pop(0).partition("=")
            if not equals and arguments and name in actions and not takes_texts:
                word = arguments[0]
            if name not in actions or actions[name].nargs != 0 or word.lower() not in ("true", "false"):
                written.append(name + equals + (word if equals else ""))
                continue
            if not equals:
                del arguments[0]
            off = f"--no-{name[2:]}"
            if word.lower() == "true":
                written.append(name)
            elif off in actions:
                written.append(off)
        return [*written, *argv[end:]]

    def _add_foreign(self) -> None:
        """Flags of other programs, without a line of help, where the command has none of its own."""
        settings, self.foreign = self.foreign, None
        for row in self.rows if settings is not None else ():
            names = [name for name in row.spellings if name not in self._option_string_actions]
            if names and not row.ours:
                self.add_argument(*names, action=_Foreign, row=row, settings=settings)

    def short_help(self) -> str:
        """What ``--help`` shows: of settings that a command shares with all others, those that people change most."""
        if not self.hidden:
            return self.format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([action for action in group._group_actions if action.dest not in self.hidden])
            formatter.end_section()
        formatter.add_text(f"{len(self.hidden)} more settings: {self.prog} --help all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def add_settings(parser: Parser, settings: Iterable[Setting], *, section: str) -> None:
    """Adds a flag for every setting.

    Args:
        section: heading in ``--help`` of the settings that bring none.
    """
    groups: dict[str, Any] = {}
    for setting in settings:
        title = setting.section or section
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_setting(groups[title], setting)


def add_model(parser: Parser) -> None:
    """Adds the model as what stands alone in a command, ``positional_model``; `configs_of` takes it."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def add_config_flags(
    parser: Parser, *classes: type, without: Collection[str] = (), rows: Sequence[ForeignFlag] = ()
) -> None:
    """Adds ``--config`` and the flags of settings classes, ``EngineConfig`` if none is named.

    Args:
        without: settings that get no flag.
        rows: flags of other programs that this command alone knows, over those that all know.
    """
    parser.rows = (*rows, *FLAGS)
    parser.epilog = EPILOG
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these settings, or the name of a bundled one (smollm2)"
    )
    parser.foreign = {}
    for cls in classes or (EngineConfig,):
        settings = settings_of(cls, without=without)
        add_settings(parser, settings.values(), section="settings")
        parser.hidden |= settings.keys() - COMMON
        parser.foreign = {**parser.foreign, **settings}


def configs_of(
    values: argparse.Namespace,
    *classes: type,
    model: str | None = None,
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Configs:
    """The settings that flags, the file of ``--config`` and the defaults give.

    Args:
        values: what ``Parser.parse`` returned.
        classes: the settings classes whose flags were added, ``EngineConfig`` if none is named.
        model: the positional model, if the command has one and it was given.
        derived: as in ``load_configs``.

    Raises:
        ConfigError: a value is wrong, the model is given twice, or there are several where ``ModelSettings`` has no
            flags.
    """
    names = {name for cls in classes or (EngineConfig,) for name in settings_of(cls)}
    models = getattr(values, REPEATED, {}).get("model", []) if ModelSettings in classes else []
    values_given = {name: value for name, value in vars(values).items() if name in names}
    for note in getattr(values, NOTES, ()):
        print(f"llmjax: note: {note}", file=sys.stderr)
    if model in MODEL_TYPES and values_given.keys() & {"model", "gguf_file"}:
        print(f"llmjax: note: {model}: the model's files say what it is", file=sys.stderr)
    elif model is not None:
        if values_given.get("model", model) != model:
            raise ConfigError(f"the model is given twice: {model} and --model {values_given['model']}")
        values_given["model"] = model
    configs = load_configs(values.config, values_given, models=list(dict.fromkeys(models)), derived=derived)
    if configs.models is not None and ModelSettings not in classes:
        raise ConfigError(f"{values.config} is for a server with several models, and this command takes one")
    return configs


def _add_setting(group: Any, setting: Setting) -> None:
    help = setting.help.replace("%", "%%") + _remarks(setting)
    plain = [setting.flag, *(alias.flag for alias in setting.aliases if alias.value is None and alias.unit == 1)]
    winning = frozenset(alias.flag for alias in setting.aliases if alias.wins)
    common = {"dest": setting.name, "default": argparse.SUPPRESS}
    if setting.kind is bool and setting.name.startswith("no_"):  # what turns it off has no second no
        group.add_argument(*plain, **common, action="store_true", help=help)
        off = f"--{setting.flag.removeprefix('--no-')}"
        group.add_argument(off, **common, action="store_false", help=argparse.SUPPRESS)
    elif setting.kind is bool:
        group.add_argument(*plain, **common, action=argparse.BooleanOptionalAction, help=help)
    else:
        action: Any = _Extend if setting.kind is list else _Merge if setting.kind is dict else "store"
        nargs: dict[str, Any] = {"nargs": "+"} if setting.several else {}
        if winning:
            action, nargs = _Store, {"winning": winning}
        if "true" in setting.words:  # the flag alone stands for a value
            nargs = {"nargs": "?", "const": setting.words["true"]}
        parse = _reader(setting, Alias(setting.flag))
        group.add_argument(*plain, **common, **nargs, action=action, type=parse, metavar=_metavar(setting), help=help)
    for alias in setting.aliases:
        if alias.value is not None:
            short = f"the same as {_flag_for(setting, alias.value)}"
            group.add_argument(alias.flag, **common, action="store_const", const=alias.value, help=short)
            off = setting.switched(alias, on=False)
            hidden = {"action": "store_const", "const": off, "help": argparse.SUPPRESS}
            group.add_argument(f"--no-{alias.flag[2:]}", **common, **hidden)
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


def _remarks(setting: Setting) -> str:
    """What stands in parentheses at the end of a help text: the default, unless the text says it, and the limits."""
    default = _default(setting)
    remarks = [f"default: {default}"] if default and "(default" not in setting.help else []
    if setting.limits is not None:
        remarks.append(str(setting.limits))
    return f" ({'; '.join(remarks)})".replace("%", "%%") if remarks else ""


def _default(setting: Setting) -> str:
    default = setting.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ("", (), [], {}):
        return ""
    return (setting.separator or " ").join(map(str, default)) if setting.kind is list else str(default)


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """``--max_model_len=8`` as ``--max-model-len=8``; what follows ``--`` stays as it is."""
    end = argv.index("--") if "--" in argv else len(argv)
    named = [argument.partition("=") for argument in argv[:end]]
    dashed = [
        name.replace("_", "-") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in named
    ]
    return [*dashed, *argv[end:]]


def _with_objects(argv: Sequence[str]) -> list[str]:
    """``--hf-overrides.rope_scaling.factor 4`` as ``--hf-overrides '{"rope_scaling": {"factor": 4}}'``, as in vLLM."""
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = list(argv[:end])
    written: list[str] = []
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        flag, _, path = name.partition(".")
        if not (re.fullmatch(r"--?[A-Za-z][\w-]*", flag) and path):
            written.append(name + equals + value)
            continue
        if not equals:
            value = arguments.pop(0) if arguments else ""
        try:
            content = json.loads(value)
        except ValueError:
            content = value
        for key in reversed(path.split(".")):
            content = {key: content}
        written += [flag, json.dumps(content)]
    return [*written, *argv[end:]]


class _Help(argparse.Action):
    """Prints the help and ends the program."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values not in (None, "all"):
            raise ConfigError(f"{option_string} takes nothing or all, not {values!r}")
        print(parser.format_help() if values else parser.short_help(), end="")
        parser.exit()


class _Store(argparse.Action):
    """Stores a value, unless a spelling that wins over this one has stored another."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, winning: frozenset[str], **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self._winning = winning

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        winners, before = getattr(namespace, WINNERS, {}), getattr(namespace, self.dest, values)
        winner_values, lost = values, values
        if option_string in self._winning:
            winners, lost = {**winners, self.dest: option_string}, before
        elif self.dest in winners:
            winner_values, lost = before, values
        setattr(namespace, self.dest, winner_values)
        setattr(namespace, WINNERS, winners)
        if option_string == self.option_strings[0]:  # other spellings are programs' in which the last one counts
            repeated = getattr(namespace, REPEATED, {})
            setattr(namespace, REPEATED, {**repeated, self.dest: [*repeated.get(self.dest, ()), values]})
        if lost != winner_values:
            note = f"{winners[self.dest]}: {lost} is not read"
            setattr(namespace, NOTES, [*getattr(namespace, NOTES, []), note])


class _Extend(argparse.Action):
    """Adds the items of a repeated flag; argparse's own "extend" would start from the suppressed default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        items = values if self.nargs is None else [item for items in values for item in items]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *items])


class _Merge(argparse.Action):
    """Adds the keys of a repeated flag."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


class _Foreign(argparse.Action):
    """A flag of another program: sets what it means of ours, and leaves a note where there is something to say."""

    NARGS: ClassVar[Mapping[Takes, Any]] = {
        Takes.NOTHING: 0, Takes.SWITCH: 0, Takes.VALUE: None, Takes.OPTIONAL: "?", Takes.VALUES: "+"
    }  # fmt: skip

    def __init__(self, option_strings: Sequence[str], dest: str, *, row: ForeignFlag, settings: Mapping[str, Setting]):
        off = [f"--no-{name[2:]}" for name in option_strings if name.startswith("--") and row.takes is Takes.SWITCH]
        super().__init__(
            [*option_strings, *off],
            NOTES,
            nargs=self.NARGS[row.takes],
            const=True,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=argparse.SUPPRESS,
        )
        self._off = off
        self._row = row
        self._settings = settings

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = option_string or self.option_strings[0]
        value = flag not in self._off if self.nargs == 0 else values
        if isinstance(value, list) and len(value) == 1:
            (value,) = value  # perhaps a list as JSON
        answer = self._row.answer(value, source=flag, settings=self._settings)
        given = dict(vars(namespace))
        merge(given, answer.values)
        for name, setting in given.items():
            setattr(namespace, name, setting)
        if answer.note:
            setattr(namespace, NOTES, [*getattr(namespace, NOTES, []), answer.note])


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
