"""Named compositions of encoders and matchers, and their folders on disk."""

from counterfoil.models import catalogue as _attention  # noqa: F401
from counterfoil.models import catalogue as _cross  # noqa: F401
from counterfoil.models import catalogue as _diverse  # noqa: F401
from counterfoil.models import catalogue as _esa  # noqa: F401
from counterfoil.models import catalogue as _graphs  # noqa: F401
from counterfoil.models import catalogue as _naaf  # noqa: F401
from counterfoil.models import catalogue as _reasoning  # noqa: F401
from counterfoil.models import catalogue as _relations  # noqa: F401
from counterfoil.models import catalogue as _vse  # noqa: F401
from counterfoil.models import spec as _dual  # noqa: F401
from counterfoil.models.model import Model, create_model
from counterfoil.models.spec import ModelSpec, models, resolve
from counterfoil.models.store import from_pretrained, save_pretrained

__all__ = [
    "Model",
    "ModelSpec",
    "create_model",
    "from_pretrained",
    "models",
    "resolve",
    "save_pretrained",
]
