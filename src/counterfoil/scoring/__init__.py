"""A split encoded, and every pair of it scored."""
