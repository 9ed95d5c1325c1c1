"""English words that say how a caption is built rather than what it shows."""

from __future__ import annotations

_ARTICLES = "a an the this that these those some any each every no"
_PREPOSITIONS = (
    "about above across after against along among around at before behind below beneath beside "
    "between by down during for from in inside into near next of off on onto out outside over "
    "past through to toward towards under underneath up upon via with within without"
)
_PRONOUNS = (
    "i you he she it we they me him her us them my your his its our their mine yours hers ours "
    "theirs myself yourself himself herself itself ourselves themselves who whom whose which what "
    "there here one's another other others both all"
)
_AUXILIARIES = (
    "am is are was were be been being has have had having do does did doing can could will would "
    "shall should may might must ca wo 's 're 've 'll 'd 'm n't"
)
_CONJUNCTIONS = (
    "and or but nor so yet if as than then because while when where although though until unless "
    "whether not very too also just only"
)

STOP_WORDS = frozenset(
    " ".join((_ARTICLES, _PREPOSITIONS, _PRONOUNS, _AUXILIARIES, _CONJUNCTIONS)).split()
)
