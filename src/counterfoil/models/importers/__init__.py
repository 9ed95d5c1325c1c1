"""Other projects' checkpoints to models: one file per family, safe to point at any file."""

from counterfoil.models.importers import bfan as _bfan  # noqa: F401 - registers its importer
from counterfoil.models.importers import chan as _chan  # noqa: F401
from counterfoil.models.importers import naaf as _naaf  # noqa: F401
from counterfoil.models.importers import scan as _scan  # noqa: F401
from counterfoil.models.importers import sgraf as _sgraf  # noqa: F401
from counterfoil.models.importers import uniter as _uniter  # noqa: F401
from counterfoil.models.importers import vse_infty as _vse_infty  # noqa: F401
from counterfoil.models.importers.base import Checkpoint, Importer, importers
from counterfoil.models.importers.convert import Imported, import_checkpoint
from counterfoil.models.importers.pickles import read_checkpoint

__all__ = [
    "Checkpoint",
    "Imported",
    "Importer",
    "import_checkpoint",
    "importers",
    "read_checkpoint",
]
