"""A paper's tables and figures as data: run, cached, and set beside the published numbers."""
