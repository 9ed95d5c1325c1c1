"""Pack a trained run into the zoo: weights in half precision, a card, an entry in the registry.

    python reproduction/zoo/pack.py runs/photos-naaf photos-naaf --summary "…" --trained-on "…" \
      --command "counterfoil train …" --license other --terms "…" --extra vision \
      --result "RSUM, Flickr8k test" rsum "counterfoil evaluate NAME --data lite2-36"

Each result is measured on the packed model: its command runs with --json, and KEY is the place of
the number in what it prints (``i2t.recalls.1``). NAME in a command stands for the model. Packing a
name again replaces its entry and its folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from counterfoil.core.errors import CounterfoilError
from counterfoil.core.storage.atomic import scratch_folder, write_atomically
from counterfoil.core.storage.reading import digest_of
from counterfoil.core.zoo import FOLDER, REGISTRY, ZooEntry, card, entries, size_text
from counterfoil.features import extractors
from counterfoil.features.extractors import split_full_name
from counterfoil.models import Model, from_pretrained, save_pretrained
from counterfoil.training.run_folder import load_model

MAX_BYTES = 25_000_000
"""Size of the whole zoo, which is part of the package."""


def main() -> None:
    options = _options()
    try:
        pack(options)
    except CounterfoilError as error:
        sys.exit(f"error: {error}")


def pack(options: argparse.Namespace) -> None:
    model = load_model(options.run, "cpu")
    _check(model, options.run)
    with scratch_folder("counterfoil-pack-") as scratch:
        save_pretrained(model, scratch / "measured", half=True)
        results = [_measure(result, scratch / "measured") for result in options.result]
    described: dict[str, Any] = {
        key: value
        for key in ("summary", "trained_on", "command", "license", "terms", "extra", "url")
        if (value := getattr(options, key)) is not None
    }
    for result in results:
        result["command"] = result["command"].replace("NAME", options.name)
    described["results"] = results
    target = FOLDER / options.name
    save_pretrained(model, target, half=True, card=card(options.name, described))
    described["files"] = describe_files(target)
    entry = ZooEntry.model_validate(described)
    register(options.name, entry)
    from_pretrained(target)
    print(f"{target}: {size_text(entry.size)}, {len(entry.files)} files")
    for result in entry.results:
        print(f"  {result.name}: {result.value:g}")


def _check(model: Model, run: Path) -> None:
    """Refuse a model that cannot read images, or that names files of this machine."""
    if model.fragments_from is None:
        sys.exit(f"error: {run}: trained on features of an unknown extractor; it reads no images")
    name, own = split_full_name(model.fragments_from)
    extractor = extractors.create(name, own or model.fragments_options or {}, where=str(run))
    if extractor.dim != model.input_dim:
        sys.exit(
            f"error: {run}: reads fragments of {model.input_dim} numbers, its extractor "
            f"'{model.fragments_from}' makes {extractor.dim}"
        )
    if model.yardstick is None:
        sys.exit(f"error: {run}: has no yardstick.json; train it to the end")
    strings = _strings([model.spec.model_dump(), model.fragments_from, model.fragments_options])
    for text in strings:
        if text.startswith(("/", "~")) or Path(text).is_absolute():
            sys.exit(f"error: {run}: its configuration names a file of this machine: {text}")


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in value.values() for text in _strings(one)]
    if isinstance(value, (list, tuple)):
        return [text for one in value for text in _strings(one)]
    return [value] if isinstance(value, str) else []


def _measure(result: list[str], folder: Path) -> dict[str, Any]:
    """Run the command of a result on the packed model, and read the number it prints."""
    name, key, command = result
    words = [str(folder) if word == "NAME" else word for word in shlex.split(command)]
    if words[:1] != ["counterfoil"] or str(folder) not in words:
        sys.exit(f"error: --result: expected 'counterfoil … NAME …', got '{command}'")
    done = subprocess.run(  # noqa: S603 - the person who packs wrote the command
        [sys.executable, "-m", *words, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"error: failed: {command}")
    value = json.loads(done.stdout)
    for part in key.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    return {"name": name, "value": round(float(value), 3), "command": command}


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Digest and size of each file of a packed model."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "sha256": digest_of(path),
            "size": path.stat().st_size,
        }
        for path in files
    }


def register(name: str, entry: ZooEntry) -> None:
    """Write the entry of one model into the registry."""
    known = dict(entries()) if REGISTRY.is_file() else {}
    known[name] = entry
    size = sum(one.size for one in known.values() if one.url is None)
    if size > MAX_BYTES:
        sys.exit(f"error: the zoo has {size:,} bytes, at most {MAX_BYTES:,} are shipped")
    tree = {key: known[key].model_dump(exclude_defaults=True) for key in sorted(known)}
    header = "# Pretrained models by name; written by reproduction/zoo/pack.py.\n"
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    write_atomically(REGISTRY, header + text)


def _options() -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="Run to pack (its best checkpoint).")
    parser.add_argument("name", help="Name of the model in the zoo, such as photos-naaf.")
    parser.add_argument("--summary", required=True, help="What the model is for, in one line.")
    parser.add_argument("--trained-on", required=True, help="Data that it was trained on.")
    parser.add_argument("--command", required=True, help="Command that trained it.")
    parser.add_argument("--license", required=True, help="SPDX identifier, or 'other'.")
    parser.add_argument("--terms", required=True, help="What the model may be used for.")
    parser.add_argument("--extra", help="Extra that reading images needs, such as vision.")
    parser.add_argument("--url", help="Folder to download from, if the files are not shipped.")
    parser.add_argument(
        "--result",
        nargs=3,
        action="append",
        required=True,
        metavar=("LABEL", "KEY", "COMMAND"),
        help="A number to measure: its label, its place in the JSON, the command. Repeatable.",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
