"""Charts, maps and pictures: all drawing of the package."""
