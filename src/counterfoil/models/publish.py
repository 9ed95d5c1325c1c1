"""Push a model to the Hugging Face hub, with a card; needs the extra ``hub``."""

from __future__ import annotations

from pathlib import Path

from counterfoil.core.config import model_folder
from counterfoil.core.errors import ArgumentError, CheckpointError
from counterfoil.core.hub import HUB_ADDRESS, hub_library
from counterfoil.core.storage.atomic import scratch_folder
from counterfoil.core.storage.reading import MIB, read_text
from counterfoil.core.zoo import CARD
from counterfoil.models.model import Model
from counterfoil.models.store import save_pretrained

PLAIN_CARD = """---
library_name: counterfoil
tags: [image-text-matching]
---
# {name}

A {model} for image–text matching, trained with Counterfoil.

```python
import counterfoil as cf

model = cf.load("hf://{name}")
model.score(["photo.jpg"], ["a dog on a beach"])
```

| | |
| --- | --- |
| image encoder | {image} |
| text encoder | {text} |
| matcher | {matcher} |
| fragments | {fragments} |
| parameters | {parameters:,} |

What it was trained on, its license and its results: not stated yet.
"""


def push_to_hub(
    model: Model,
    name: str,
    *,
    card: str | None = None,
    source: Path | None = None,
    half: bool = False,
    private: bool | None = None,
    message: str = "Push a model with Counterfoil",
) -> str:
    """Push a model to ``owner/name`` and return the address of its commit.

    Without a ``card`` (the text of its README.md), a card on the hub stays as it is; a model that
    has none there gets that of ``source``, the folder it was loaded from, or else a plain one. The
    card is not among the checksums, so that it can be edited on the hub.
    """
    parts = HUB_ADDRESS.fullmatch(f"hf://{name.removeprefix('hf://')}")
    if parts is None or parts[2]:
        raise ArgumentError(f"{name}: expected owner/name, as on the hub")
    hub = hub_library()
    with scratch_folder("counterfoil-push-") as scratch:
        folder = scratch / "model"
        save_pretrained(model, folder, half=half)
        text = card or _card_of(source) or plain_card(model, parts[1])
        try:
            api = hub.HfApi()
            api.create_repo(parts[1], private=private, exist_ok=True)
            if card is not None or not api.file_exists(parts[1], CARD):
                (folder / CARD).write_text(text, encoding="utf-8")
            commit = api.upload_folder(repo_id=parts[1], folder_path=folder, commit_message=message)
        except Exception as error:  # the package raises errors of several HTTP libraries
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise CheckpointError(
                f"{name}: could not be pushed ({reason}); log in with: hf auth login, and check "
                "that you may write there"
            ) from None
    return str(commit.commit_url)


def _card_of(source: Path | None) -> str | None:
    """The card in the folder of a saved model or of a run, if there is one."""
    for folder in (model_folder(source), source) if source is not None else ():
        try:
            return read_text(folder / CARD, MIB)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{folder / CARD}: cannot be read as a card ({error}); give one with --card"
            ) from None
    return None


def plain_card(model: Model, name: str) -> str:
    """A card that says what can be read off a model."""
    spec = model.spec
    return PLAIN_CARD.format(
        name=name,
        model=spec.name,
        image=spec.image["name"],
        text=spec.text["name"],
        matcher=spec.matcher["name"],
        fragments=model.fragments_from or "precomputed features",
        parameters=sum(value.numel() for value in model.parameters()),
    )
