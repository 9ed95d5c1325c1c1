"""How well models find the wrong words of a caption."""
