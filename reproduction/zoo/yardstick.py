"""Measure the yardstick of a packed model again: the method of its word effects, and their scale.

    python reproduction/zoo/yardstick.py photos-naaf lite2-36
    python reproduction/zoo/yardstick.py scenes-naaf scenes --option 'images=[0,1000,0]'

The data are those that the model was trained on; their dev split chooses the method (`build.sh
yardsticks` does this for all models). The weights stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pack import describe_files, register

from counterfoil.cli.inputs import DataChoice
from counterfoil.core.storage.checksums import write_sums
from counterfoil.core.zoo import FOLDER, ZooEntry, entries
from counterfoil.training.run import save_yardstick
from counterfoil.training.run_folder import load_model


def main() -> None:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(entries()))
    parser.add_argument("data", help="Data set: a path or a name.")
    parser.add_argument("--option", action="append", help="Option of the data source.")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    options = parser.parse_args()
    folder, entry = FOLDER / options.name, entries()[options.name]
    data = DataChoice(options.data, None, options.option, options.cache, quiet=False)
    model = load_model(folder, "cpu")
    save_yardstick(folder, model, data.read(folder, ["dev"])["dev"])
    write_sums(folder)
    described = {**entry.model_dump(exclude_defaults=True), "files": describe_files(folder)}
    register(options.name, ZooEntry.model_validate(described))
    print(f"{options.name}: {model.yardstick.word_method if model.yardstick else 'no yardstick'}")


if __name__ == "__main__":
    main()
