"""`bosch new MODEL --data PATH`: writes a commented recipe for a model, prints the next steps."""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bosch.commands import Command
from bosch.errors import RunError, UserError
from bosch.files import write_text
from data_prep.documents.sources import KINDS, Source, text_field
from data_prep.documents.sources.mds import INDEX
from data_prep.source_files import files_below
from pipeline.recipe.load import ROOT, load_recipe
from pipeline.recipe.model_shape import read_model
from pipeline.recipe.yaml_file import parse_yaml
from stages.formats import format_length
from stages.inputs import is_hub_name
from stages.stage import call, folder_name

COMMAND = Command("write a recipe for your own model, with a smoke test")
SCHEMA = ROOT / "docs" / "reference" / "recipe.schema.json"
# Overrides for a small run through every stage.
SMOKE = (
    "name=smoke",
    "prepare.train_tokens=256k",
    "prepare.calibration.examples=4",
    "train.total_tokens=256k",
    "train.checkpoint_tokens=[256k]",
    "evaluate.ruler.samples=4",
)
_LONGEST, _SHORTEST = 4096, 512
_KINDS = {name: kind.suffixes for name, kind in KINDS.items() if all(kind.suffixes)}
_JSON_BELOW = os.path.join("**", "*.json")
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
_RECIPE = """\
# yaml-language-server: $schema={schema}
# Relative paths in this file start at its folder. Every key: docs/reference/recipe.md of the
# checkout. A smoke test of every stage, whose scores mean nothing:
#
#   {smoke}

model:
  path: {model}   # a directory in Hugging Face form, or a name on the hub

prepare:
  sequence_length: {length}
  train_tokens: 16M
  sources:
    - {source}
  calibration:
    length: {length}                 # a length at which the model still answers needle questions

search:
  method: razor                # a ranking from one text; bosch_plus searches, bosch as published
  swa_ratio: 0.75              # three of four KV heads become sliding
  window_size: {window}             # well below the calibration length

train:
  total_tokens: 16M
  batch_tokens: 128k
  checkpoint_tokens: [16M]     # its last entry is at most total_tokens

evaluate:
  ruler:
    lengths: [{lengths}]
    samples: 50

runtime:
  output_root: runs            # results are in a folder of it that has this file's name
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="directory, or name on the hub")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="training documents: a file or folder of text, JSON lines, Parquet or MDS, or a "
        "dataset's name on the hub (default: the source code of Python's library)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="where to write it (default: my_<model's name>.yaml)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the recipe and print the next steps; raises UserError for unusable arguments."""
    source = None if options.data is None else _source_of(options.data)
    name = os.path.basename(os.path.abspath(options.model)).lower().replace(".", "p")
    file = Path(options.output or f"my_{re.sub('[^a-z0-9]+', '_', name)}.yaml")
    if os.path.lexists(file):
        raise UserError(f"--output {file}: exists; remove it or name another file")
    if not file.absolute().parent.is_dir():
        raise UserError(f"--output {file}: there is no folder {file.parent}")
    info, faults = read_model(options.model, None, Path.cwd(), fetch=False, files=False)
    if faults:
        raise UserError("\n".join(f"{options.model}: {fault.text}" for fault in faults))
    try:
        folder_name(file.stem)
    except ValueError as fault:
        raise UserError(f"--output {file}: {fault}") from None
    positions = info.max_positions if info is not None else None
    length = min(_LONGEST, positions or _LONGEST)
    if length < _SHORTEST:
        raise UserError(
            f"{options.model}: has {length} positions; RULER's tasks of a recipe need {_SHORTEST}"
        )
    length = 1 << length.bit_length() - 1  # a power of two
    write_text(file, recipe_text(file, options.model, options.data, source, length))
    print(f"{file}: written; check it, try it, run it:")
    for command in ("validate", "plan"):
        print(f"  bosch {command} {shlex.quote(str(file))}")
    print(f"  {_smoke(file)}\n  bosch run {shlex.quote(str(file))}")
    try:
        written = load_recipe(file, fetch=False)
        for text in call("stages.prepare.run:first_document_faults", written):
            print(f"before it can run: {text}")
    except UserError as error:
        print(f"before it can run: {error}")
    return 0


def recipe_text(
    file: Path, model: str, data: str | None, source: Source | None, length: int
) -> str:
    """The recipe at `file` for sequences of `length` tokens."""
    folder = file.absolute().parent
    text = "{name: python, kind: python_docs}   # --data of `bosch new` names your own"
    if source is not None and data is not None:
        path = _relative_path(folder, data)
        if source.path != data:
            path = os.path.join(glob.escape(path), _JSON_BELOW)
        fields = {"name": source.name, "kind": source.kind, "path": path}
        if source.text_field != Source.text_field:
            fields["text_field"] = source.text_field
        text = f"{{{', '.join(f'{name}: {_yaml(value)}' for name, value in fields.items())}}}"
    return _RECIPE.format(
        schema=os.path.relpath(SCHEMA, folder) if ROOT in (folder, *folder.parents) else SCHEMA,
        smoke=_smoke(file),
        model=_yaml(_relative_path(folder, model)),
        source=text,
        length=format_length(length),
        lengths=", ".join(format_length(n) for n in (length // 2, length) if n >= _SHORTEST),
        window=length // 16,
    )


def _smoke(file: Path) -> str:
    return shlex.join(["bosch", "run", str(file), *SMOKE])


def _relative_path(folder: Path, path: str) -> str:
    """A path of the command line, relative to the recipe's `folder`; a hub name as it is."""
    local = Path(os.path.expanduser(path))
    return os.path.relpath(local, folder) if local.exists() and not local.is_absolute() else path


def _yaml(text: str) -> str:
    """A text as YAML, in quotes only where it needs them."""
    is_plain = _PLAIN.fullmatch(text) is not None and parse_yaml(f"[{text}]", text) == [text]
    # JSON would escape some characters as surrogate pairs, which YAML does not have.
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _source_of(data: str) -> Source:
    """The source at a path; raises UserError where no kind fits."""
    path = Path(os.path.expanduser(data))
    kind = _kind(data, path)
    if not path.exists():
        return Source("mine", kind, data)
    is_json = path.is_dir() and kind == "jsonl" and _holds_json(_names(path))
    pattern = os.path.join(glob.escape(data), _JSON_BELOW) if is_json else data
    source = Source("mine", kind, os.path.expanduser(pattern))
    field = source.text_field
    with contextlib.suppress(UserError, RunError):  # `run` says why a document cannot be read
        field = text_field(source)
    return replace(source, path=pattern, text_field=field)


def _kind(data: str, path: Path) -> str:
    if not path.exists():
        if is_hub_name(data, Path.cwd()):
            return "huggingface"
        raise UserError(f"--data {data}: there is no such file or folder, and it is no hub name")
    names = _names(path)
    if not names:
        raise UserError(f"--data {data}: is an empty folder")
    if INDEX in names and any(".mds" in name for name in names):
        return "mds"
    if {"dataset_dict.json", "state.json"} & {*names}:  # of save_to_disk
        return "huggingface"
    kinds = [kind for kind, ends in _KINDS.items() if any(name.endswith(ends) for name in names)]
    if len(kinds) > 1:
        raise UserError(f"--data {data}: holds {' and '.join(kinds)}; name the files of one kind")
    if kinds:
        return kinds[0]
    return "jsonl" if _holds_json(names) else "text"


def _holds_json(names: Sequence[str]) -> bool:
    """Whether the documents are .json files, which kind jsonl reads only if a glob names them.

    With other files than a README beside them, .json files are metadata.
    """
    suffixes = {Path(name).suffix for name in names}
    return ".json" in suffixes and suffixes <= {".json", ".md", ""}


def _names(path: Path) -> list[str]:
    return [path.name] if path.is_file() else sorted(file.name for file in files_below(path))
