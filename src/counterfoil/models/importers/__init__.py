"""Import checkpoints of other projects as models, without running code of the file."""

from counterfoil.models.importers import projects as _projects  # noqa: F401
from counterfoil.models.importers import uniter as _uniter  # noqa: F401
from counterfoil.models.importers.base import Checkpoint, Importer, importers
from counterfoil.models.importers.convert import Imported, import_checkpoint
from counterfoil.models.importers.safe_pickles import read_checkpoint

__all__ = [
    "Checkpoint",
    "Imported",
    "Importer",
    "import_checkpoint",
    "importers",
    "read_checkpoint",
]
