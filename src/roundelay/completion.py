"""Shell completion: commands, options and `key=` settings, as a script for bash, zsh or fish.

The script holds all words, so a shell that has read it starts nothing of ours when Tab is pressed:

    roundelay completion bash > ~/.local/share/bash-completion/completions/roundelay
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Words:
    """What may follow a command."""

    help: str
    options: tuple[str, ...]
    choices: tuple[str, ...]
    """Of its positional arguments."""
    keys: tuple[str, ...] = ()
    """Settings, as `key=`."""


def words_of(parser: argparse.ArgumentParser, keys: Mapping[str, Sequence[str]]) -> dict[str, Words]:
    """Every command of a parser; `keys` gives the settings of those that take key=value."""
    found: dict[str, Words] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                found[name] = _words(sub, helps.get(name, ""), tuple(keys.get(name, ())))
    return found


def _words(parser: argparse.ArgumentParser, help: str, keys: tuple[str, ...]) -> Words:
    options: list[str] = []
    choices: list[str] = []
    for action in parser._actions:
        options += [o for o in action.option_strings if o.startswith("--")]
        if not action.option_strings and action.choices:
            choices += [str(c) for c in action.choices]
    return Words(help, tuple(options), tuple(choices), tuple(f"{key}=" for key in keys))


def script(shell: str, commands: Mapping[str, Words], values: Mapping[str, Sequence[str]]) -> str:
    """The script; `values` are what settings such as strategy may be."""
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](commands, values)


def _cases(commands: Mapping[str, Words]) -> str:
    return "\n".join(f"    {name}) words='{' '.join((*w.choices, *w.options, *w.keys))}' ;;" for name, w in commands.items())


def _values(values: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"    {key}) words='{' '.join(known)}' ;;" for key, known in values.items())


def bash(commands: Mapping[str, Words], values: Mapping[str, Sequence[str]]) -> str:
    return f"""# roundelay completion bash
_roundelay() {{
  local word key words='' i command=''
  word="${{COMP_WORDS[COMP_CWORD]}}"
  # '=' divides words for bash: strategy=ad comes as three
  key=''
  if [[ "$word" == '=' && $COMP_CWORD -gt 1 ]]; then
    key="${{COMP_WORDS[COMP_CWORD-1]}}"; word=''
  elif [[ $COMP_CWORD -gt 2 && "${{COMP_WORDS[COMP_CWORD-1]}}" == '=' ]]; then
    key="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ "${{COMP_WORDS[i]}}" != -* ]] && {{ command="${{COMP_WORDS[i]}}"; break; }}
  done
  if [[ -n "$key" ]]; then
    case "${{key##*.}}" in
{_values(values)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "$command" in
    '') words='{" ".join(commands)} --help --version' ;;
{_cases(commands)}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${{#COMPREPLY[@]}} -eq 1 && "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace 2>/dev/null
  [[ ${{#COMPREPLY[@]}} -eq 0 ]] && COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _roundelay roundelay
"""


def zsh(commands: Mapping[str, Words], values: Mapping[str, Sequence[str]]) -> str:
    described = "\n".join(f"    '{name}:{_quiet(w.help)}'" for name, w in commands.items())
    return f"""#compdef roundelay
# roundelay completion zsh
_roundelay() {{
  local -a commands
  local words_of key
  commands=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe 'command' commands
    return
  fi
  if [[ "$PREFIX" == *=* ]]; then
    key="${{PREFIX%%=*}}"
    compset -P '*='
    case "${{key##*.}}" in
{_values(values).replace("words=", "words_of=")}
    esac
    compadd -- ${{=words_of}}
    return
  fi
  case "$words[2]" in
{_cases(commands).replace("words=", "words_of=")}
  esac
  compadd -S '' -- ${{(M)${{=words_of}}:#*=}}
  compadd -- ${{${{=words_of}}:#*=}}
  _files
}}
if [[ "$funcstack[1]" == _roundelay ]]; then _roundelay "$@"; else compdef _roundelay roundelay; fi
"""


def fish(commands: Mapping[str, Words], values: Mapping[str, Sequence[str]]) -> str:
    lines = ["# roundelay completion fish", "complete -c roundelay -n __fish_use_subcommand -l version -d 'print the version'"]
    for name, w in commands.items():
        lines.append(f"complete -c roundelay -n __fish_use_subcommand -f -a {name} -d '{_quiet(w.help)}'")
        inside = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c roundelay {inside} -l {option[2:]}" for option in w.options]
        if w.choices or w.keys:
            spelled = [f"{key}{value}" for key in w.keys for value in values.get(key[:-1].rpartition(".")[2], ())]
            lines.append(f"complete -c roundelay {inside} -a '{' '.join((*w.choices, *w.keys, *spelled))}'")
    return "\n".join(lines) + "\n"


def _quiet(text: str) -> str:
    """Without what a shell would read."""
    return text.replace("'", "").replace(":", ",")
