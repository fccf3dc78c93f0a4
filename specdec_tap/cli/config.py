"""``specdec-tap config``: show every capture setting, its value and where it came from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..config import (
    ADDITIONAL_CONFIG_KEY,
    ENV_PREFIX,
    ENV_SWITCH,
    SECRET_FIELDS,
    TapConfig,
    field_docs,
    left_out_by_vllm,
)
from ..errors import ConfigError
from ._console import print_table, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print the settings that a server started from this shell would use",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--additional-config", metavar="JSON", help="as given to 'vllm serve'")
    show.add_argument("--docs", action="store_true", help="explain each setting")
    show.add_argument("--json", type=Path, metavar="FILE", help="write them as JSON ('-': print them)")
    examples = """examples:
  SPECDEC_TAP_DIR=shards specdec-tap config show
  specdec-tap config show --docs
  specdec-tap config show --additional-config '{"specdec_tap": {"dir": "shards", "codec": "fp8"}}'"""
    show.epilog = examples
    parser.epilog = examples


def run(args: argparse.Namespace) -> int:
    config, sources = TapConfig.load(os.environ, parse_additional_config(args.additional_config))
    defaults = {
        f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(TapConfig)
    }
    docs = field_docs()
    values = defaults if config is None else {name: getattr(config, name) for name in defaults}
    settings = {
        name: {
            "value": "(set, not shown)" if name in SECRET_FIELDS and value else _plain(value),
            "source": sources.get(name, "default"),
            "environment": f"{ENV_PREFIX}{name.upper()}",
            "doc": docs.get(name, ""),
        }
        for name, value in values.items()
    }
    write_json(args.json, {"capture": config is not None, "settings": settings})
    if str(args.json) == "-":
        return 0
    rows = []
    for name, setting in settings.items():
        row = (name, _shown(setting["value"]), setting["source"])
        rows.append((*row, f"{setting['environment']}\n{setting['doc']}") if args.docs else row)
    headers = ("setting", "value", "from", "environment variable and meaning")[: 4 if args.docs else 3]
    title = "capture is on" if config is not None else "capture is off; these would be the settings"
    print_table(title, rows, headers=headers)
    if config is not None and (problem := left_out_by_vllm(os.environ)):
        print(f"but vLLM would not load the tap: {problem}", file=sys.stderr)
    if config is None:
        switched = os.environ.get(ENV_SWITCH)
        why = (
            f"{ENV_SWITCH}={switched} turns it off"
            if switched
            else f"set {ENV_PREFIX}DIR=shards to turn it on"
        )
        print(why, file=sys.stderr)
    return 0


def parse_additional_config(text: str | None) -> dict[str, Any] | None:
    """Parse the value of ``--additional-config``.

    Raises:
        ConfigError: It is no JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as err:
        raise ConfigError(
            f"--additional-config is no JSON ({err}); expected an object in single quotes"
        ) from err
    if not isinstance(value, dict):
        raise ConfigError(f"--additional-config is {value!r}; expected an object")
    if ADDITIONAL_CONFIG_KEY not in value:
        raise ConfigError(
            f'--additional-config has no key "{ADDITIONAL_CONFIG_KEY}"; expected '
            f'{{"{ADDITIONAL_CONFIG_KEY}": {{"dir": "shards"}}}}'
        )
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
