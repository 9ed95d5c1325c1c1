"""The program `counterfoil`, also as `python -m counterfoil`, which is what torchrun starts."""

from __future__ import annotations


def main() -> None:
    """Run the command line; Ctrl-C is no traceback, even while modules are imported."""
    try:
        from counterfoil.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
