"""`python -m counterfoil`, which is what torchrun starts."""

from counterfoil.cli import main

main()
