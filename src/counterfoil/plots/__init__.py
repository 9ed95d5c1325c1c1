"""All drawing."""
